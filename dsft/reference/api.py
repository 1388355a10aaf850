"""What a run sees of its reference, whichever of the three ways it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from torch import Tensor

from dsft.data.steps.batch import MicroBatch, Pairs

Refer = Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]
"""Micro-batches of pairs -> the same with `pairs.reference`. Of a store it only looks them up; of an engine
it is a collective, and ranks without the last stage get theirs back as they were."""


@dataclass(frozen=True)
class Held:
    """A reference that an engine scores. weights: what this rank holds of them, none of which is trained."""

    refer: Refer
    weights: Callable[[], Iterator[Tensor]]


class WithReference(Sequence[MicroBatch]):
    """Micro-batches of pairs, each filled when it is asked for: a held-out set may be larger than memory."""

    def __init__(self, micro_batches: Sequence[MicroBatch], logps: Callable[[int, Pairs], Tensor]) -> None:
        """logps: number and pairs of a micro-batch -> (n, 2) float64."""
        self._micro_batches, self._logps = micro_batches, logps

    def __len__(self) -> int:
        return len(self._micro_batches)

    @overload
    def __getitem__(self, which: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[MicroBatch, ...]: ...
    def __getitem__(self, which: int | slice) -> MicroBatch | tuple[MicroBatch, ...]:
        if isinstance(which, slice):
            return tuple(self[i] for i in range(*which.indices(len(self))))
        batch = self._micro_batches[which]
        assert batch.pairs is not None, "only pairs have a reference"
        return replace(batch, pairs=replace(batch.pairs, reference=self._logps(which, batch.pairs)))


def filled(micro_batches: Sequence[MicroBatch], scored: Sequence[Tensor]) -> Sequence[MicroBatch]:
    """scored: (n, 2) float64 of each, or nothing where this rank has no last stage."""
    return WithReference(micro_batches, lambda which, pairs: scored[which]) if scored else micro_batches
