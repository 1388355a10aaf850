"""The next-token objective, by hand and against torch's own cross entropy."""

import math

import pytest
import torch
import torch.nn.functional as F

from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.model.policy import target_logps
from dsft.objective.next_token import next_token
from tests.make import make_micro_batch


def micro_batch(targets: torch.Tensor) -> MicroBatch:
    return make_micro_batch(torch.zeros_like(targets), torch.zeros_like(targets), targets)


def test_values_by_hand() -> None:
    logps = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0]])
    targets = torch.tensor([[5, NO_TARGET, 1], [NO_TARGET, 0, NO_TARGET]])
    (total,) = next_token().sums(logps, micro_batch(targets))
    assert total.dtype == torch.float64
    assert total.item() == 1 + 4 + 16
    assert next_token().scales({"tokens": 3}) == (1 / 3,)
    assert next_token().uniform
    assert next_token().scales({"tokens": 0}) == (0.0,), "by which a memory probe's gradient is 0"


def test_loss_equals_cross_entropy_for_any_micro_batches() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, 11, requires_grad=True)
    targets = torch.randint(0, 11, (4, 7))
    targets[0, 2:] = NO_TARGET
    targets[3] = NO_TARGET
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
    (expected_gradient,) = torch.autograd.grad(expected, logits)

    objective = next_token()
    (scale,) = objective.scales({"tokens": int((targets != NO_TARGET).sum())})
    parts = [
        scale * objective.sums(target_logps(logits[rows], targets[rows]), micro_batch(targets[rows]))[0]
        for rows in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    found = torch.stack(parts).sum()
    (gradient,) = torch.autograd.grad(found, logits)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient)


def test_no_targets_is_zero_with_a_gradient_of_zeros() -> None:
    logps = torch.full((1, 3), -1.0, requires_grad=True)
    (total,) = next_token().sums(logps, micro_batch(torch.full((1, 3), NO_TARGET)))
    (next_token().scales({"tokens": 0})[0] * total).backward()
    assert total.item() == 0
    assert not logps.grad.any()


def test_sums_keep_what_float32_would_lose() -> None:
    """10,001 terms of 0.4: float32 would be off in the fourth digit after the point."""
    logps = torch.full((1, 10_001), -0.4, dtype=torch.float32)
    (total,) = next_token().sums(logps, micro_batch(torch.zeros(1, 10_001, dtype=torch.int64)))
    assert math.isclose(total.item(), 10_001 * torch.tensor(0.4).item(), rel_tol=1e-12)
