"""Compute the learning rate as a function of the applied step, and the number of steps of a run.

The values equal those of `transformers.get_scheduler`, so a run matches one with the Trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dsft.spec.schema import DecayType, Optim, Schedule, Train


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Return the learning rate of the step after `step` applied steps (0 for the first step of the run)."""
    kind = optim.lr_scheduler_type
    warmup = 0 if kind == "constant" else warmup_steps(optim, total_steps)
    floor = optim.min_lr_ratio or 0.0
    if step < warmup:
        start = floor if kind == "wsd" else 0.0
        return optim.learning_rate * _between(start, step / warmup)
    if kind == "wsd":
        return optim.learning_rate * _wsd(optim, step, total_steps)
    return optim.learning_rate * _DECAYS[kind](step, warmup, total_steps, floor)


def batch_scale(optim: Optim, global_batch_size: int) -> float:
    """Return the factor on `learning_rate` that scale_with_batch gives; 1 if it is none.

    linear: Goyal et al. 2017 (SGD); sqrt: Malladi et al. 2022 (Adam).
    """
    if optim.scale_with_batch == "none":
        return 1.0
    assert optim.base_batch_size is not None, "validated"
    ratio = global_batch_size / optim.base_batch_size
    return ratio if optim.scale_with_batch == "linear" else math.sqrt(ratio)


def scaling_equation(optim: Optim, global_batch_size: int) -> str | None:
    """Return the arithmetic of `batch_scale` as a line; None if nothing is scaled."""
    if optim.scale_with_batch == "none":
        return None
    root = "√" if optim.scale_with_batch == "sqrt" else ""
    scaled = optim.learning_rate * batch_scale(optim, global_batch_size)
    return (
        f"learning rate: {optim.learning_rate:g} × {root}({global_batch_size} ÷ {optim.base_batch_size}) = "
        f"{scaled:g} (optim.scale_with_batch {optim.scale_with_batch})"
    )


def warmup_steps(optim: Optim, total_steps: int) -> int:
    """Return `warmup_steps` if given, else `warmup_ratio` of the run, rounded up as the Trainer does."""
    if optim.warmup_steps is not None:
        return optim.warmup_steps
    return math.ceil(total_steps * (optim.warmup_ratio or 0.0))


def decay_steps(optim: Optim, total_steps: int) -> int:
    """Return the decay steps of wsd: `decay_steps` if given, else `decay_ratio` of the run, rounded up."""
    if optim.decay_steps is not None:
        return optim.decay_steps
    return math.ceil(total_steps * (optim.decay_ratio or 0.0))


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Return the steps per epoch; the last one is padded with empty rows."""
    return math.ceil(num_examples / global_batch_size)


def total_steps(train: Train, num_examples: int, global_batch_size: int) -> int:
    """Return the steps of a run: `max_steps` if given, else `num_train_epochs` (may be a fraction) of the
    data, rounded up, at least 1."""
    if train.max_steps is not None:
        return train.max_steps
    return max(1, math.ceil(train.num_train_epochs * steps_per_epoch(num_examples, global_batch_size)))


def _between(floor: float, factor: float) -> float:
    """Map `factor` from the range 0 to 1 to the range `floor` to 1."""
    return factor * (1 - floor) + floor


def _constant(step: int, warmup: int, total: int, floor: float) -> float:
    return 1.0


def _linear(step: int, warmup: int, total: int, floor: float) -> float:
    return max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, warmup: int, total: int, floor: float) -> float:
    progress = (step - warmup) / max(1, total - warmup)
    factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return max(0.0, _between(floor, factor))


def _inverse_sqrt(step: int, warmup: int, total: int, floor: float) -> float:
    timescale = warmup or 10_000
    return 1.0 / math.sqrt((step + timescale - warmup) / timescale)


def _wsd(optim: Optim, step: int, total: int) -> float:
    """Return wsd's factor on the peak after the warm-up: 1, then falling to the floor in the last
    `decay_steps`."""
    decay, floor = decay_steps(optim, total), optim.min_lr_ratio or 0.0
    if step < total - decay:
        return 1.0
    if step >= total:
        return floor
    progress = (step - (total - decay)) / decay
    return _between(floor, _FALLS[optim.decay_type or "cosine"](progress))


_FALLS: Mapping[DecayType, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}

Decay = Callable[[int, int, int, float], float]
"""(step, warm-up steps, total steps, floor as a ratio) -> factor on the peak, for steps after the warm-up."""

_DECAYS: Mapping[Schedule, Decay] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine,
    "inverse_sqrt": _inverse_sqrt,
}
