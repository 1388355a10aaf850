"""The learning rate as a pure function of the applied step, and how many steps a run has. Plain numbers.

The values are those of `transformers.get_scheduler`, so a run matches one made with the Trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dsft.spec.schema import DecayType, Optim, Schedule, Train


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """The rate of the step that follows `step` applied ones (0 for the first) of `total_steps`."""
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
    """What `learning_rate` is multiplied by: 1 unless scale_with_batch says otherwise.

    linear: Goyal et al. 2017 (SGD); sqrt: Malladi et al. 2022 (Adam).
    """
    if optim.scale_with_batch == "none":
        return 1.0
    assert optim.base_batch_size is not None, "validated"
    ratio = global_batch_size / optim.base_batch_size
    return ratio if optim.scale_with_batch == "linear" else math.sqrt(ratio)


def scaling_equation(optim: Optim, global_batch_size: int) -> str | None:
    """The arithmetic of `batch_scale` in a line; None where nothing is scaled."""
    if optim.scale_with_batch == "none":
        return None
    root = "√" if optim.scale_with_batch == "sqrt" else ""
    scaled = optim.learning_rate * batch_scale(optim, global_batch_size)
    return (
        f"learning rate: {optim.learning_rate:g} × {root}({global_batch_size} ÷ {optim.base_batch_size}) = "
        f"{scaled:g} (optim.scale_with_batch {optim.scale_with_batch})"
    )


def warmup_steps(optim: Optim, total_steps: int) -> int:
    """`warmup_steps` where given, else `warmup_ratio` of the run, rounded up as the Trainer does."""
    if optim.warmup_steps is not None:
        return optim.warmup_steps
    return math.ceil(total_steps * (optim.warmup_ratio or 0.0))


def decay_steps(optim: Optim, total_steps: int) -> int:
    """Of wsd: `decay_steps` where given, else `decay_ratio` of the run, rounded up."""
    if optim.decay_steps is not None:
        return optim.decay_steps
    return math.ceil(total_steps * (optim.decay_ratio or 0.0))


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Steps that show each example once; the last one is filled with empty rows."""
    return math.ceil(num_examples / global_batch_size)


def total_steps(train: Train, num_examples: int, global_batch_size: int) -> int:
    """`max_steps` where given, else `num_train_epochs` (may be a fraction) of the data, rounded up."""
    if train.max_steps is not None:
        return train.max_steps
    return max(1, math.ceil(train.num_train_epochs * steps_per_epoch(num_examples, global_batch_size)))


def _between(floor: float, factor: float) -> float:
    """`factor` from 0 to 1 as a value from `floor` to 1."""
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
    """After the warm-up: the peak, and in the last `decay_steps` down to the floor."""
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
