"""Compute the learning rate as a function of the applied step, and the number of steps of a run.

The values equal those of `transformers.get_scheduler`, so a run matches one with the Trainer.
"""

from __future__ import annotations

import math

from dsft.spec.schema import Optim, Train


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Return the learning rate of the step after `step` applied steps (0 for the first step of the run)."""
    kind, floor = optim.lr_scheduler_type, optim.min_lr_ratio or 0.0
    warmup = 0 if kind == "constant" else warmup_steps(optim, total_steps)
    if step < warmup:
        return optim.learning_rate * _between(floor if kind == "wsd" else 0.0, step / warmup)
    rest = max(1, total_steps - warmup)
    if kind == "wsd":
        factor = _wsd(optim, step, total_steps)
    elif kind == "linear":
        factor = max(0.0, (total_steps - step) / rest)
    elif kind in ("cosine", "cosine_with_min_lr"):
        factor = max(0.0, _between(floor, _half_cosine((step - warmup) / rest)))
    elif kind == "inverse_sqrt":
        timescale = warmup or 10_000
        factor = 1.0 / math.sqrt((step + timescale - warmup) / timescale)
    else:  # constant, constant_with_warmup
        factor = 1.0
    return optim.learning_rate * factor


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


def _half_cosine(progress: float) -> float:
    """Fall from 1 to 0 as `progress` rises from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _wsd(optim: Optim, step: int, total: int) -> float:
    """Return wsd's factor on the peak after the warm-up: 1, then falling to the floor in the last
    `decay_steps`."""
    decay, floor = decay_steps(optim, total), optim.min_lr_ratio or 0.0
    if step < total - decay:
        return 1.0
    if step >= total:
        return floor
    progress = (step - (total - decay)) / decay
    if optim.decay_type == "linear":
        return _between(floor, 1.0 - progress)
    if optim.decay_type == "1-sqrt":
        return _between(floor, 1.0 - math.sqrt(progress))
    return _between(floor, _half_cosine(progress))
