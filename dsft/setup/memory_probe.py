"""Open the file of the run's memory, and run a step on the longest micro-batch before step 1, so that a run
that does not fit into memory fails in its first minute and names the sizes that would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dsft.data.steps.batch import MicroBatch
from dsft.engine.api import Engine
from dsft.errors import OutOfMemoryError
from dsft.plan.memory.ranks import memory as memory_plan
from dsft.plan.memory.reference import with_reference
from dsft.plan.memory.sizes import GIB, with_device
from dsft.report.memory import PHASES, MemoryFile, MemoryMeter, Peaks, Phase, is_out_of_memory, room
from dsft.setup.resolve import Plan
from dsft.setup.run import Run

PARTS = (4, 2, 1)  # divisors of the longest micro-batch: two smaller ones are measured first
LESS = (
    "model.gradient_checkpointing, parallel.sequence_parallel, a higher parallel.zero_stage or "
    "parallel.offload_optimizer"
)
MARGIN = 64  # 1/64 of the memory is not counted on: allocators round to pages


def open_memory(run: Run, plan: Plan, tokens: int) -> MemoryFile:
    """Open the memory file, which shows the planned bytes of the fullest rank beside the measured ones.
    tokens: of one micro-batch."""
    world, counted, layout = run.world, plan.counted, run.layout
    on_gpu = world.device.type != "cpu"
    spec = with_device(plan.spec, world.device.type, world.places[world.rank].device.memory)
    alone = memory_plan(counted, spec, layout, {}, tokens)
    ranks = with_reference(alone, counted, spec, layout, {}, tokens)[0].stages
    figures: dict[Phase, Peaks] = {}
    for phase in PHASES:
        if on_gpu:
            figures[phase] = {
                "device_allocated": max(rank.phase(phase) for rank in ranks),
                "host_rss": max(rank.offloaded for rank in ranks),
            }
        else:
            figures[phase] = {
                "host_rss": max(rank.phase(phase) + rank.offloaded + rank.retained for rank in ranks)
            }
    folder = run.folder if world.rank == 0 else None
    return MemoryFile(folder, MemoryMeter(world.device), world.gather, figures)


@dataclass(frozen=True)
class PeakMemory:
    """The peak memory of a micro-batch, in bytes, and its number of tokens."""

    tokens: int
    peak: int


def probe_memory(
    engine: Engine, longest: MicroBatch, held_out: MicroBatch | None, meter: MemoryMeter
) -> None:
    """Run a whole step on a quarter, on half and on all of `longest`, then an evaluation of `held_out`.

    A collective. `held_out` is None where no held-out row is longer than the training rows: evaluation keeps
    neither activations nor gradients, so a training step of the same length needs more memory. Raises
    OutOfMemoryError on the rank that runs out of memory, while the others still wait for it.
    """
    measured: list[PeakMemory] = []
    for part in PARTS:
        micro_batch = longest.first(-(-longest.shape[1] // part))
        meter.enter("first_step")
        _run(lambda: engine.probe(micro_batch), longest, measured, meter)  # noqa: B023  # called at once
        measured.append(PeakMemory(micro_batch.shape.numel(), meter.peak()))
    if held_out is not None:
        meter.enter("evaluation")
        _run(lambda: engine.evaluate([held_out]), held_out, [], meter)


def _run(
    step: Callable[[], object], longest: MicroBatch, measured: list[PeakMemory], meter: MemoryMeter
) -> None:
    memory = meter.used() + room(meter.device)
    limit = memory - memory // MARGIN
    try:
        step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(advice(longest, measured, limit, str(error))) from error


@contextmanager
def explain_out_of_memory(meter: MemoryMeter) -> Iterator[None]:
    """Raise OutOfMemoryError for an allocation that fails in the block, in whichever phase."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(full(meter.phase, str(error))) from error


def full(phase: Phase, error: str) -> str:
    """Return the message for an allocation that failed outside of the memory probe."""
    reason = " ".join(error.split())[:400]
    if phase in ("load", "reference"):
        return f"The model and its engine do not fit into memory ({reason}); use {LESS}, or a smaller model."
    where = {"evaluation": "in an evaluation", "save": "in a save"}.get(phase, "in a step")
    return (
        f"The memory is full {where} ({reason}), although the longest micro-batch of the run fitted before "
        "step 1: check whether another process uses this device; a smaller micro-batch leaves more room "
        f"(lower data.max_tokens_per_micro_batch or train.micro_batch_size), and so do {LESS}."
    )


def tokens_that_fit(measured: list[PeakMemory], limit: int) -> int | None:
    """Return the largest micro-batch that fits into `limit` bytes, in tokens; None where nothing was
    measured.

    Activations and the head's share grow with the tokens, weights and optimizer states do not: a straight
    line through the peaks of two smaller micro-batches gives bytes per token. Where the second needed no more
    than the first (the peak was in the update, not in the backward pass), only its own size is known to fit.
    """
    if len(measured) < 2:
        return measured[0].tokens if measured else None
    first, second = measured[-2:]
    per_token = (second.peak - first.peak) / max(second.tokens - first.tokens, 1)
    if per_token <= 0:
        return second.tokens
    return max(second.tokens, second.tokens + int((limit - second.peak) / per_token))


def advice(longest: MicroBatch, measured: list[PeakMemory], limit: int, error: str) -> str:
    """Return the message: what was too large, what was measured, and what would fit."""
    rows, length = longest.shape
    rows_each = 1 if longest.answers is None else longest.answers.num_targets.shape[1]
    what = f"{rows} × {length:,} tokens" if longest.segments is None else f"{length:,} packed tokens"
    reason = " ".join(error.split())[:200]
    problem = (
        f"The longest micro-batch of this run, {what}, does not fit into {limit / GIB:.1f} GiB ({reason})"
    )
    smaller = "; ".join(f"{t.tokens:,} tokens took {t.peak / GIB:.2f} GiB" for t in measured)
    fit = tokens_that_fit(measured, limit)
    if fit is None:
        return f"{problem}; not even a quarter of it fits. Use {LESS}, or a smaller model."
    fit = min(fit, rows * length - 1)  # the whole did not fit
    if longest.segments is not None:
        way_out = f"set data.max_tokens_per_micro_batch to {fit} or less"
    elif fit >= rows_each * length:
        way_out = f"set train.micro_batch_size to {fit // (rows_each * length)} or less"
    else:
        way_out = f"set train.micro_batch_size to 1 and data.max_length to {fit // rows_each} or less"
    return f"{problem}; {smaller}, so about {fit:,} tokens would fit: {way_out}, or use {LESS}."
