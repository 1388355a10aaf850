"""The check of a run's first step finds gradients that do not reach the optimizer, and names their
parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dsft.engine.first_step import FACTOR, SAMPLES, mismatches
from tests.launching import forked, on_the_cpu
from tests.swap_disk import why_no_swap

WORKER = Path(__file__).with_name("lost_gradient_worker.py")


def test_lost_gradients_are_found_in_real_engines(tmp_path: Path) -> None:
    if reason := why_no_swap():
        pytest.skip(reason)
    with on_the_cpu():
        done = forked(WORKER, 2, [str(tmp_path / "found.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["none"] is None
    assert "proj.weight" in found["unaligned reads"]
    assert "the gradients of model.embed_tokens.weight that" in found["tied copies"]


def parameters(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right gradients, squares and moments of a step with eight contributions."""
    draw = torch.Generator().manual_seed(3)
    each = torch.randn(8, count, SAMPLES, generator=draw, dtype=torch.float64) * 1e-4
    return each.sum(0), each.square().sum(0), each.sum(0) * 0.05


@pytest.mark.parametrize("noise", [0.0, 1e-2])
def test_what_differs_by_rounding_alone_passes(noise: float) -> None:
    gradients, squares, moments = parameters(5)
    moments += noise * moments.std() * torch.randn(moments.shape, dtype=torch.float64)
    moments[1] *= 0.5  # whose hook has seen each gradient twice
    gradients[2] = squares[2] = moments[2] = 0  # no gradient
    gradients[3, 5:] = squares[3, 5:] = moments[3, 5:] = 0  # rows of an embedding that do not occur
    gradients[4], moments[4] = 1e-9 * squares[4].sqrt(), 0  # contributions cancel
    assert mismatches(gradients, squares, moments) == []


def test_each_fault_is_found() -> None:
    right = parameters(11)
    gradients, squares, moments = (one.clone() for one in right)
    moments[0] = 0  # no gradient has arrived
    moments[1] = moments[1].roll(1)  # another's
    moments[2] *= -1
    moments[3, : SAMPLES // 2] = 0  # one of two ranks has none
    moments[4] *= 1.1 * FACTOR
    assert mismatches(gradients, squares, moments) == [0, 1, 2, 3, 4]
    assert mismatches(*right[:2], torch.zeros_like(right[2])) == list(range(11))
