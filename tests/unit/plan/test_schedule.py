from __future__ import annotations

from typing import Any

import pytest

from dsft.plan.schedule import learning_rate, total_steps
from dsft.spec.schema import Optim, Train

torch = pytest.importorskip("torch")

PEAK = 3e-4
KINDS = ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr"]


def transformers_rates(kind: str, warmup: int, total: int, steps: int, **kwargs: Any) -> list[float]:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=kwargs or None)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (10, 10), (20, 10), (1, 1)])
def test_rates_equal_transformers(kind: Any, warmup: int, total: int) -> None:
    floor = {"min_lr_ratio": 0.1} if kind == "cosine_with_min_lr" else {}
    kwargs = {"min_lr_rate": 0.1} if floor else {}
    optim = Optim(learning_rate=PEAK, lr_scheduler_type=kind, warmup_steps=warmup, **floor)
    ours = [learning_rate(optim, step, total) for step in range(total + 2)]
    assert ours == pytest.approx(
        transformers_rates(kind, warmup, total, total + 2, **kwargs), rel=1e-12, abs=1e-18
    )


def test_warmup_ratio_is_rounded_up_as_the_trainer_does() -> None:
    optim = Optim(learning_rate=PEAK, warmup_ratio=0.101)
    assert learning_rate(optim, 10, 100) == pytest.approx(PEAK * 10 / 11)
    assert learning_rate(optim, 11, 100) == PEAK


def test_total_steps() -> None:
    assert total_steps(Train(), 100, 8) == 13  # the last step is filled
    assert total_steps(Train(num_train_epochs=2.5), 100, 8) == 33
    assert total_steps(Train(num_train_epochs=0.001), 100, 8) == 1
    assert total_steps(Train(num_train_epochs=3.0, max_steps=7), 100, 8) == 7
