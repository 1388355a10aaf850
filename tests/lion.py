"""An optimizer that is no part of dsft, as a user would add one: Lion (arXiv 2302.06675). Its sign is smooth
near 0 here, so that rounding does not turn it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dsft.engine.api import StateKind
from dsft.engine.base_optimizer import BaseOptimizer, Samples
from dsft.engine.optimizer import BUILD
from dsft.spec.optimizers import OPTIMIZERS, OptimizerFacts

SMOOTH = 1e-3
FACTS = OptimizerFacts(("betas",), moments=lambda optim: 1, offloads=False, rates=("Lion", 1e-6, 1e-3))


def update(value: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    (beta1, beta2), rate = group["betas"], group["lr"]
    mean = momentum.lerp(gradient, 1 - beta1)
    value.mul_(1 - rate * group["weight_decay"]).sub_(rate * mean / (mean.abs() + SMOOTH))
    momentum.lerp_(gradient, 1 - beta2)


class Lion(BaseOptimizer):
    def __init__(self, groups: Iterable[Any], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for home in group["params"]:
                if home.grad is not None:
                    state = self.state[home]
                    update(home, home.grad, state.setdefault("exp_avg", torch.zeros_like(home)), group)

    def kinds_of(self, home: Tensor) -> tuple[StateKind, ...]:
        return ("exp_avg",)

    def first_moments(self, after: Samples) -> Tensor:
        return after["exp_avg"]

    def expected_change(self, gradients: Tensor, after: Samples, step: int) -> Tensor:
        beta1, beta2 = self.defaults["betas"]
        before = (after["exp_avg"] - (1 - beta2) * gradients) / beta2
        mean = before.lerp(gradients, 1 - beta1).abs()
        return mean / (mean + SMOOTH)


def register() -> None:
    OPTIMIZERS["lion"] = FACTS
    BUILD["lion"] = lambda groups, spec, _: Lion(groups, spec.optim.learning_rate, spec.optim.betas)
