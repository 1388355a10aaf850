from typing import Any

import pytest

from dsft.plan.schedule import batch_scale, learning_rate, scaling_equation, total_steps
from dsft.spec.schema import Optim, Train

torch = pytest.importorskip("torch")

PEAK = 3e-4


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


@pytest.mark.parametrize(("kind", "floor"), [
    *((kind, None) for kind in ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")),
    *(("cosine_with_min_lr", floor) for floor in (0.0, 0.1, 0.5, 1.0)),
])  # fmt: skip
@pytest.mark.parametrize(
    ("warmup", "total"), [(0, 10), (3, 10), (10, 10), (20, 10), (1, 1), (0, 500), (1, 500), (100, 500)]
)
def test_rates_equal_transformers(kind: Any, floor: float | None, warmup: int, total: int) -> None:
    kwargs = {} if floor is None else {"min_lr_rate": floor}
    optim = Optim(learning_rate=PEAK, lr_scheduler_type=kind, warmup_steps=warmup, min_lr_ratio=floor)
    ours = [learning_rate(optim, step, total) for step in range(total + 2)]
    theirs = transformers_rates(kind, warmup, total, total + 2, **kwargs)
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("decay_type", [None, "cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize("floor", [None, 0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("warmup", "decay", "total"),
    [(0, 3, 10), (3, 2, 10), (3, 7, 10), (0, 10, 10), (5, 8, 10), (12, 4, 10), (0, 1, 1), (2, 20, 10)],
)
def test_wsd_equals_transformers(warmup: int, decay: int, total: int, floor: Any, decay_type: Any) -> None:
    optim = Optim(
        learning_rate=PEAK, lr_scheduler_type="wsd", warmup_steps=warmup, decay_steps=decay,
        decay_type=decay_type, min_lr_ratio=floor,
    )  # fmt: skip
    kwargs = {"num_decay_steps": decay, "min_lr_ratio": floor or 0.0, "decay_type": decay_type or "cosine"}
    theirs = transformers_rates("warmup_stable_decay", warmup, total, total + 2, **kwargs)
    ours = [learning_rate(optim, step, total) for step in range(total + 2)]
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)


def test_decay_ratio_is_rounded_up() -> None:
    optim = Optim(learning_rate=PEAK, lr_scheduler_type="wsd", decay_ratio=0.101, decay_type="linear")
    assert learning_rate(optim, 89, 100) == PEAK
    assert learning_rate(optim, 90, 100) == pytest.approx(PEAK * 10 / 11)


def test_the_rate_follows_the_batch_only_where_it_is_asked_to() -> None:
    assert batch_scale(Optim(learning_rate=PEAK), 256) == 1.0
    assert scaling_equation(Optim(learning_rate=PEAK), 256) is None
    linear = Optim(learning_rate=1e-4, scale_with_batch="linear", base_batch_size=64)
    assert batch_scale(linear, 256) == 4.0
    assert batch_scale(linear, 16) == 0.25
    sqrt = Optim(learning_rate=1e-4, scale_with_batch="sqrt", base_batch_size=64)
    assert batch_scale(sqrt, 256) == 2.0
    expected = "learning rate: 0.0001 × √(256 ÷ 64) = 0.0002 (optim.scale_with_batch sqrt)"
    assert scaling_equation(sqrt, 256) == expected


def test_warmup_ratio_is_rounded_up_as_the_trainer_does() -> None:
    optim = Optim(learning_rate=PEAK, warmup_ratio=0.101)
    assert learning_rate(optim, 10, 100) == pytest.approx(PEAK * 10 / 11)
    assert learning_rate(optim, 11, 100) == PEAK


def test_total_steps() -> None:
    assert total_steps(Train(), 100, 8) == 13  # the last step is filled
    assert total_steps(Train(num_train_epochs=2.5), 100, 8) == 33
    assert total_steps(Train(num_train_epochs=0.001), 100, 8) == 1
    assert total_steps(Train(num_train_epochs=3.0, max_steps=7), 100, 8) == 7
