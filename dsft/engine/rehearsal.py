"""One whole step that leaves nothing behind: takes a started engine and a function that steps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsft.engine import state

COUNTERS = (
    "global_steps", "global_samples", "micro_steps", "skipped_steps", "_step_applied", "_global_grad_norm"
)  # fmt: skip
"""Of DeepSpeed's engine, all that a step advances (deepspeed/runtime/engine.py:536 global_steps and the lines
after it)."""


def rehearse(engine: Any, step: Callable[[], object], device: torch.device) -> None:
    """Call `step`, which must give the optimizer a rate and a gradient of 0, then take it back: moments,
    Adam's step count, DeepSpeed's counters and loss scale, random numbers. Weights do not change, since
    Adam and SGD move and decay them by a multiple of the rate. The moments are made before it, so that the
    backward has them beside its activations, as every step but a run's first does."""
    cpu = device.type == "cpu"
    state.make_moments(engine)
    with torch.random.fork_rng([] if cpu else [device], device_type="cuda" if cpu else device.type):
        with _counters_kept(engine):
            step()
    state.forget_steps(engine)


@contextmanager
def _counters_kept(engine: Any) -> Iterator[None]:
    owners = (engine, engine.optimizer)
    kept = [(owner, {k: v for k, v in vars(owner).items() if k in COUNTERS}) for owner in owners]
    for name in ("loss_scaler", "loss_scale_config"):  # of fp16, at ZeRO 1 to 3 and at 0
        scale = getattr(engine.optimizer, name, None)
        if hasattr(scale, "__dict__"):
            kept.append((scale, dict(vars(scale))))
    try:
        yield
    finally:
        for owner, numbers in kept:
            vars(owner).update(numbers)
