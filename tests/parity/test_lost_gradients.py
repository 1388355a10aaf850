"""The check of a start's first steps finds gradients that do not reach the optimizer and weights that it does
not change, and names their parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dsft.engine.api import StateKind
from dsft.engine.base_optimizer import BaseOptimizer
from dsft.engine.first_step import FACTOR, SAMPLES, mismatches, unchanged
from dsft.engine.optimizer import AdamW, Sgd
from tests.launching import forked, on_the_cpu
from tests.swap_disk import why_no_swap

WORKER = Path(__file__).with_name("lost_gradient_worker.py")


def test_lost_gradients_are_found_in_real_engines(tmp_path: Path) -> None:
    with on_the_cpu():
        done = forked(WORKER, 2, [str(tmp_path / "found.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sgd"] is found["lora"] is None
    assert (
        "has not changed model.layers.0.self_attn.v_proj.weight (on rank 0)," in found["sgd, lost gradient"]
    )
    for stage in (1, 2, 3):
        assert "(on rank 1)" in found[f"zero{stage}, kept values"]
        assert "(on rank 0)" not in found[f"zero{stage}, kept values"]
    assert "the gradients of model.embed_tokens.weight that" in found["tied copies"]
    if reason := why_no_swap():
        pytest.skip(reason)
    assert found["nvme"] is None
    assert "(on rank 1)" in found["nvme, kept values"]
    assert "proj.weight" in found["unaligned reads"]


def parameters(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right gradients, squares and moments of a step with eight contributions."""
    draw = torch.Generator().manual_seed(3)
    each = torch.randn(8, count, SAMPLES, generator=draw, dtype=torch.float64) * 1e-4
    return each.sum(0), each.square().sum(0), each.sum(0) * 0.05


@pytest.mark.parametrize("noise", [0.0, 1e-2])
def test_rounding_differences_pass(noise: float) -> None:
    gradients, squares, moments = parameters(5)
    moments += noise * moments.std() * torch.randn(moments.shape, dtype=torch.float64)
    moments[1] *= 0.5  # whose hook has seen each gradient twice
    gradients[2] = squares[2] = moments[2] = 0  # no gradient
    gradients[3, 5:] = squares[3, 5:] = moments[3, 5:] = 0  # rows of an embedding that do not occur
    gradients[4], moments[4] = 1e-9 * squares[4].sqrt(), 0  # contributions cancel
    assert mismatches(gradients, squares, moments) == []


def test_each_gradient_fault_is_found() -> None:
    right = parameters(11)
    gradients, squares, moments = (one.clone() for one in right)
    moments[0] = 0  # no gradient has arrived
    moments[1] = moments[1].roll(1)  # another's
    moments[2] *= -1
    moments[3, : SAMPLES // 2] = 0  # one of two ranks has none
    moments[4] *= 1.1 * FACTOR
    assert mismatches(gradients, squares, moments) == [0, 1, 2, 3, 4]
    assert mismatches(*right[:2], torch.zeros_like(right[2])) == list(range(11))


@dataclass
class Step:
    """A step of one parameter."""

    optimizer: BaseOptimizer
    learning_rate: float
    weight_decay: float
    number: int


def update(learning_rate: float, weight_decay: float = 0.0, step: int = 1, *, is_adamw: bool = True) -> Step:
    optimizer = (AdamW if is_adamw else Sgd)([torch.zeros(1)], lr=1.0)
    return Step(optimizer, learning_rate, weight_decay, step)


def is_named(
    value: float,
    gradient: float,
    update: Step,
    *,
    changed: int = 0,
    owned: int = SAMPLES,
    noise: float = 0.0,
    momentum: float = 0.0,
) -> bool:
    """Return whether a parameter is named all of whose samples have this value and this gradient, of whose
    `owned` ones the step has changed the first."""
    gradients, before = (torch.full((1, SAMPLES), x, dtype=torch.float64) for x in (gradient, value))
    before[:, owned:] = torch.nan
    after: dict[StateKind, torch.Tensor] = {
        "value": before.clone(),
        "momentum_buffer": torch.full_like(before, momentum),
    }
    after["value"][:, :changed] += 1e-3
    if isinstance(update.optimizer, AdamW):
        beta1, beta2 = update.optimizer.defaults["betas"]
        after["exp_avg"] = gradients * (1 - beta1**update.number)
        after["exp_avg_sq"] = gradients.square() * (1 - beta2**update.number)
    squares = gradients.square() + noise**2
    change = update.optimizer.expected_change(gradients, after, update.number)
    settings = torch.tensor([update.learning_rate, update.weight_decay], dtype=torch.float64)[:, None, None]
    return unchanged(gradients, squares, before, after["value"], change, settings).tolist() == [True]


def test_unchanged_parameter_is_named() -> None:
    sgd = update(1e-2, is_adamw=False)
    assert is_named(0.02, 1e-3, update(1e-5))
    assert is_named(0.0, 1e-3, update(1e-5), owned=1)
    assert is_named(1.0, 1e-3, update(1e-5, weight_decay=0.1, step=1000))
    assert is_named(0.02, 1e-3, sgd)
    assert not is_named(0.02, 1e-3, update(1e-5), changed=1)
    assert not is_named(0.02, 1e-3, sgd, changed=1)


@pytest.mark.parametrize("is_adamw", [True, False])
def test_parameter_that_need_not_change_is_not_named(is_adamw: bool) -> None:
    usual = update(1e-2, is_adamw=is_adamw)
    assert is_named(1.0, 1e-3, usual)
    assert not is_named(1.0, 0.0, usual)  # A of a new adapter
    assert not is_named(1.0, 1e-3, update(0.0, is_adamw=is_adamw))  # warmup, or its group's learning rate
    assert not is_named(1.0, 1e-3, usual, owned=0)  # another rank's
    assert not is_named(1.0, 1e-9, usual, noise=1e-3)  # contributions cancel
    assert not is_named(1.0, 1e-3, update(1e-8, is_adamw=is_adamw))  # less than rounding


def test_no_change_expected_where_decay_or_eps_may_undo_it() -> None:
    assert not is_named(1.0, 1e-3, update(1e-5, weight_decay=1.0))
    assert not is_named(1.0, 1e-16, update(1e-3))


@pytest.mark.parametrize("momentum", [0.0, 1e-3, torch.nan])
def test_momentum_may_cancel_an_sgd_step(momentum: float) -> None:
    sgd = update(1e-2, step=2, is_adamw=False)
    assert is_named(1.0, 1e-3, sgd, momentum=momentum) is (momentum != 0.0)
