"""What a global batch counts: examples, or pairs of them. Takes a dataset, gives numbers of its examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset, RowPart
from dsft.data.sets.pairs import rejected_answers


@dataclass(frozen=True, eq=False)
class Units:
    """examples (u, k): the numbers of the k examples of each unit; sizes and weights: of the sources."""

    examples: NDArray[np.int64]
    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None


def units_of(data: Dataset, task: str) -> Units:
    """Of task dpo, the pairs of which both answers are there: rows beside each other of one line."""
    if task != "dpo":
        return Units(np.arange(len(data))[:, None], data.sizes, data.weights)
    first = [_pairs(part) for part in data.parts if isinstance(part, RowPart)]
    starts = np.cumsum([0, *data.sizes])
    numbers = np.concatenate(
        [np.zeros(0, np.int64), *(at + mine for at, mine in zip(starts, first, strict=False))]
    )
    sizes = tuple(len(mine) for mine in first)
    return Units(np.stack([numbers, numbers + 1], axis=1), sizes, data.weights)


def _pairs(part: RowPart) -> NDArray[np.int64]:
    """The examples that are a chosen answer, of which the next one is the rejected answer."""
    rows = part.pieces.rows
    rejected = rejected_answers(part.rows, len(part.rows.lengths))
    return np.flatnonzero((np.diff(rows) == 1) & rejected[rows[1:]])
