"""The rows of a step that was not applied: takes an engine and its data, names where the rows stand.

Only a skipped step is looked at again. What is named costs a step that is applied nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import NO_TARGET, GlobalStep, MicroBatch
from dsft.engine.api import Scorer
from dsft.engine.world import World
from dsft.job.api import Say

SHOWN = 8
"""How many rows a line names."""


def skipped_rows(
    engine: Scorer, data: Dataset, world: World, say: Say
) -> Callable[[int, GlobalStep, Sequence[MicroBatch], float], str]:
    """`Run.skipped`: says which rows have a loss that is not finite, with the rank that computed each, and
    returns the same words. A loss that is finite, or that is when it is computed again without dropout, names
    no row; then the step's rows are given. A collective; one forward pass where the loss is not finite."""

    def tell(step: int, batch: GlobalStep, micro_batches: Sequence[MicroBatch], loss: float) -> str:
        found: list[list[int]] = []
        if not math.isfinite(loss):
            found = world.gather(list(_not_finite(engine, data, batch, micro_batches)))
        if any(found):
            what = "the loss is not finite on"
            named = _listed(
                [f"{data.source(id)} (rank {rank})" for rank, ids in enumerate(found) for id in ids]
            )
        else:
            what = "the gradient is not finite while the loss is, its rows are"
            if not math.isfinite(loss):
                what = "the loss is not finite, but is when scored again without dropout, its rows are"
            named = _listed([data.source(id) for id in batch.example_ids])
        say(f"warning: step {step} was skipped: {what} {named}")
        return named

    return tell


def _not_finite(
    engine: Scorer, data: Dataset, batch: GlobalStep, micro_batches: Sequence[MicroBatch]
) -> Iterator[int]:
    """Of this rank's examples those of which a target's log-probability is not finite; none where this rank
    has no last stage."""
    scored = engine.score(micro_batches, _faults)
    for faults, ids, micro_batch in zip(scored, batch.dealt, micro_batches, strict=False):
        parts: Sequence[Tensor] = ()
        if ids and micro_batch.lengths is not None:  # packed: one row
            parts = torch.split(faults[0], data.lengths[list(ids)].tolist())
        elif ids:
            parts = faults.view(len(ids), -1).unbind()  # a pair has two rows
        yield from (id for id, part in zip(ids, parts, strict=True) if bool(part.any()))


def _faults(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    """(B, T) bool."""
    return ~torch.isfinite(logps) & (micro_batch.targets != NO_TARGET)


def _listed(rows: Sequence[str]) -> str:
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return ", ".join(rows[:SHOWN]) + more
