"""Which layers are checkpointed changes what is computed twice and kept, and no bit of the result."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsft.model.build import Part, build_model, layers_of
from dsft.plan.cut import balanced
from dsft.spec.schema import Model
from tests.make import logps_of
from tests.unit.model.test_model_init import FACTS, LLAMA

LAYERS = 4
KEYS = LLAMA | {"num_hidden_layers": LAYERS, "initializer_range": 0.3}
VALUES = {False: [], 0.25: [0], 3: [0, 3], 2: [0, 2], 0.5: [0, 2], 0.75: [0, 1, 2], True: [0, 1, 2, 3]}
"""Value of model.gradient_checkpointing -> the layers that are checkpointed."""


def step(value: Any) -> tuple[list[Tensor], list[int], int]:
    """Return loss and gradients, how often each layer ran, and the bytes that were saved for the backward."""
    policy = build_model(Model(from_config=KEYS, gradient_checkpointing=value), FACTS, 3, torch.float32)
    runs, saved = [0] * LAYERS, dict[int, int]()

    def count(number: int) -> Any:
        def hook(*given: Any) -> None:
            runs[number] += 1

        return hook

    for number, layer in enumerate(layers_of(policy.causal_lm)):
        layer.self_attn.register_forward_hook(count(number))

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.arange(24).view(2, 12)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logps = logps_of(policy, ids, torch.arange(12).repeat(2, 1), ids.roll(-1, 1))
    loss = -logps.sum()
    loss.backward()
    gradients = [p.grad for p in policy.named_trained().values()]
    return [loss.detach(), *gradients], runs, sum(saved.values())


@pytest.mark.parametrize("value", VALUES)
def test_recomputed_layers_change_no_bit(value: Any) -> None:
    found, runs, saved = step(value)
    expected, _, most = step(False)
    assert all(map(torch.equal, found, expected))
    assert runs == [1 + (number in VALUES[value]) for number in range(LAYERS)]
    least = step(True)[2]
    assert saved == pytest.approx(most - (most - least) * len(VALUES[value]) / LAYERS, rel=0.02)


def test_stage_checkpoints_the_layers_of_the_whole_model() -> None:
    model = Model(from_config=KEYS, gradient_checkpointing=0.75)
    found = []
    for stage in range(2):
        policy = build_model(model, FACTS, 3, torch.float32, Part(stage, balanced([1] * LAYERS, 2)))
        found += [layer.gradient_checkpointing for layer in layers_of(policy.causal_lm)]
    assert found == [True, True, True, False]
