"""Estimate what a run takes: steps, tokens, hours and the hours of all devices together.

The time of a step is that of `cost`, which assumes speeds, or follows from the tokens per second that another
run measured. The start, evaluations and checkpoints are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dsft.plan.build import Plan
from dsft.plan.cost import StepSize, assumed, cost, full_step
from dsft.plan.schedule import steps_per_epoch, total_steps

LAUNCHED = 0.05
"""Seconds of a micro-batch on a GPU below which the time to launch its kernels, which is not estimated, may
be longer than what they compute: a layer's forward and backward launch 100 or more, in about 10 µs each."""


@dataclass(frozen=True)
class Rows:
    """What the rows of data.train give.

    examples   of an epoch
    tokens     of an example, on average
    length     tokens of the example that a token is in, on average: Σ n² ÷ Σ n
    positions  that are computed for each token of the examples, with padding
    sampled    number of rows that the others were estimated from; None: all were counted
    refusal    why a run would refuse the rows; "" if it would not
    """

    examples: int
    tokens: float
    length: float
    positions: float
    sampled: int | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Measured:
    """The speed of a run. differs: keys whose values are other ones in its spec."""

    run: str
    tokens_per_second: float
    devices: int
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Duration:
    """What a run takes; None for what is not known.

    rows              what its rows give, or why they could not be read; a step is then taken to be full
    step_tokens       tokens of the examples of a step
    seconds_per_step  `measured` or estimated
    """

    rows: Rows | str
    measured: Measured | None
    devices: int
    steps: int | None
    step_tokens: float
    seconds_per_step: float | None

    @property
    def tokens(self) -> float | None:
        return None if self.steps is None else self.steps * self.step_tokens

    @property
    def seconds(self) -> float | None:
        if self.steps is None or self.seconds_per_step is None:
            return None
        return self.steps * self.seconds_per_step

    def as_mapping(self) -> dict[str, Any]:
        """Return JSON values."""
        rows, seconds = self.rows, self.seconds
        return {
            "rows": rows if isinstance(rows, str) else asdict(rows),
            "steps": self.steps,
            "tokens_per_step": round(self.step_tokens),
            "tokens": self.tokens and round(self.tokens),
            "seconds_per_step": self.seconds_per_step,
            "hours": seconds and seconds / 3600,
            "device_hours": seconds and seconds / 3600 * self.devices,
            "measured": self.measured and asdict(self.measured),
        }


def duration(plan: Plan, rows: Rows | str, measured: Measured | None = None) -> Duration:
    """Return what the run of a plan takes. rows: what its rows give, or why they could not be read."""
    spec, batch, train = plan.spec, plan.batch, plan.spec.train
    size, steps, devices = full_step(spec, batch), train.max_steps, plan.layout.world_size
    tokens = size.tokens
    if isinstance(rows, Rows):
        steps = total_steps(train, rows.examples, batch.global_batch_size)
        tokens = rows.tokens * rows.examples / steps_per_epoch(rows.examples, batch.global_batch_size)
        computed, micro_batches = tokens * rows.positions, float(batch.accumulation_steps)
        if batch.tokens_per_micro_batch is not None:
            micro_batches = math.ceil(computed / (batch.tokens_per_micro_batch * batch.data_parallel))
        size = StepSize(computed, rows.length, micro_batches)
    seconds: float | None
    if measured is not None:
        seconds = tokens / (measured.tokens_per_second * devices / measured.devices)
    else:
        seconds = cost(plan.census, spec, batch, plan.traffic, plan.hosts, size).seconds
        if seconds < LAUNCHED * size.micro_batches and not spec.is_on_cpu:
            seconds = None
    return Duration(rows, measured, devices, steps, tokens, seconds)


def steps_line(plan: Plan) -> str:
    """Return the sentence on the number of steps of a run whose rows are not known."""
    train = plan.spec.train
    if train.max_steps is not None:
        return f"{train.max_steps} steps (train.max_steps)"
    return (
        f"Steps: {train.num_train_epochs:g} × rows ÷ {plan.batch.global_batch_size}, rounded up; "
        "unknown until the rows are read"
    )


def duration_lines(plan: Plan, found: Duration) -> Iterator[str]:
    """Yield the sentences on what a run takes."""
    rows, steps, size = found.rows, found.steps, plan.batch.global_batch_size
    if isinstance(rows, str):
        yield f"{steps_line(plan)}. Rows: {rows}."
        yield f"With rows of data.max_length, the most, a step has {found.step_tokens:,.0f} tokens:"
    elif steps is not None and found.tokens is not None:
        sampled, given = rows.sampled is not None, plan.spec.train.max_steps is not None
        how = f"estimated from {rows.sampled:,} rows" if sampled else "counted"
        yield (
            f"{_number(steps, sampled and not given)} steps{' (train.max_steps)' * given}, "
            f"{steps / steps_per_epoch(rows.examples, size):.3g} epochs of {_number(rows.examples, sampled)} "
            f"examples of {rows.tokens:,.0f} tokens on average ({how}): "
            f"{_number(found.tokens, sampled)} tokens, {_number(found.step_tokens, sampled)} in a step"
        )
        if rows.refusal:
            yield f"A run would refuse these rows: {rows.refusal} (dsft preview shows them)"
    if found.seconds_per_step is None:
        yield (
            "The hours are not estimated: a micro-batch of this model is computed in less than "
            f"{LAUNCHED:g} s, so that launching its kernels decides. --like RUN takes a run's speed."
        )
        return
    if found.seconds is not None:
        kind = "process" if plan.spec.is_on_cpu else "GPU" if plan.spec.accelerator else "device"
        on, hours = f"{found.devices} {kind}{'s' * (found.devices > 1)}", found.seconds / 3600 * found.devices
        yield f"About {_time(found.seconds)} on {on}: {hours:,.3g} {kind}-hours"
    yield (
        f"{_time(found.seconds_per_step)} for a step, {_speed(plan, found)}; the start, evaluations and "
        "checkpoints are not counted"
    )


def _speed(plan: Plan, found: Duration) -> str:
    """Return the clause on where the time of a step comes from."""
    one = found.measured
    if one is None:
        accelerator, speeds = plan.spec.accelerator, assumed(plan.spec)
        device = accelerator.name if accelerator else "an A100, as the spec has no cluster.accelerator"
        return f"an estimate: {speeds['reached']:.0%} of the {speeds['tflops']:g} TFLOP/s of {device}"
    text = f"at the {one.tokens_per_second:,.0f} tokens/s that {one.run} measured on {one.devices}"
    if one.devices != found.devices:
        text += f", scaled to {found.devices} as if each were as fast as there"
    if one.differs:
        text += f" (its spec differs in {', '.join(one.differs)})"
    return text


def _number(value: float, is_estimate: bool) -> str:
    """Return a count; of an estimate three digits."""
    return f"{float(f'{value:.3g}') if is_estimate else value:,.0f}"


def _time(seconds: float) -> str:
    """Return a time with three digits, in the unit that fits."""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    found = next(((name, size) for name, size in units if seconds >= 2 * size), ("s", 1))
    return f"{seconds / found[1]:,.3g} {found[0]}"
