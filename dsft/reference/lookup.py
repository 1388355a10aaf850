"""The reference out of a store: takes the log-probabilities of a dataset's pairs, gives a Refer that looks
them up. On the host, for any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from dsft.data.steps.batch import MicroBatch
from dsft.reference.api import Refer


def look_up(logps: NDArray[np.float64]) -> Refer:
    """logps: (n, 2) of all pairs of one dataset. Its micro-batches are filled when they are asked for."""
    held = torch.from_numpy(logps)
    return lambda micro_batches: LookedUp(micro_batches, held)


class LookedUp(Sequence[MicroBatch]):
    def __init__(self, micro_batches: Sequence[MicroBatch], logps: torch.Tensor) -> None:
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
        return replace(batch, pairs=replace(batch.pairs, reference=self._logps[batch.pairs.ids]))
