"""Which of DeepSpeed's optimizers reduce gradients beside the backward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from dsft.engine import reduction
from dsft.engine.reduction import OverlappedZero, install_reduction


@pytest.mark.parametrize(("overlap_comm", "contiguous_gradients", "kind"), [
    (True, True, OverlappedZero),
    (True, False, DeepSpeedZeroOptimizer),  # a user's file may say so: then there are no buffers
    (False, True, DeepSpeedZeroOptimizer),
])  # fmt: skip
def test_only_buffered_buckets_overlap_with_backward(
    monkeypatch: pytest.MonkeyPatch, overlap_comm: bool, contiguous_gradients: bool, kind: type
) -> None:
    gpu = SimpleNamespace(is_synchronized_device=lambda: False)
    monkeypatch.setattr(reduction, "get_accelerator", lambda: gpu)
    monkeypatch.setattr(reduction.comm, "get_world_size", lambda: 2)
    optimizer: Any = object.__new__(DeepSpeedZeroOptimizer)
    optimizer.overlap_comm, optimizer.contiguous_gradients = overlap_comm, contiguous_gradients
    install_reduction(SimpleNamespace(optimizer=optimizer))
    assert type(optimizer) is kind
