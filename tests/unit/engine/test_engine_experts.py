"""The pass that counts a step's experts before it trains."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsft.engine.initialize import TrainingEngine
from dsft.spec.schema import Experts


def test_counting_pass_uses_the_random_numbers_of_training() -> None:
    drawn: list[Tensor] = []
    routing = SimpleNamespace(
        experts=Experts(balance="global_batch", balance_weight=0.1),
        counting=nullcontext,
        pop=lambda device: torch.zeros(2),
        training=lambda loss: nullcontext(),
    )
    engine: Any = SimpleNamespace(
        _routing=routing,
        _shards=1,
        _world=SimpleNamespace(device=torch.device("cpu"), sum=lambda t: t),
        _deepspeed=SimpleNamespace(scaler=None),
        score=lambda batches, training: drawn.append(torch.rand(4)),
    )
    with TrainingEngine._routed(engine, [], {"sequences": 1}):
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)
