"""Assign the examples of a step to the micro-batches of its ranks: packed by a token
budget, or a fixed number to each.

Pure functions of lengths, a token budget and the number of data-parallel ranks, without torch. The examples
of a step are decided elsewhere, so packed and padded runs have the same steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset
from dsft.spec.batch import BatchSizes


def assign(
    dataset: Dataset, ids: NDArray[np.int64], batch: BatchSizes, data_rank: int
) -> list[NDArray[np.int64]]:
    """Return, for each micro-batch of one rank, which of the step's examples `ids` (b,) it has: packed if
    there is a token budget."""
    budget, ranks = batch.tokens_per_micro_batch, batch.data_parallel
    lengths = (dataset.widths if budget is None else dataset.lengths)[ids].astype(np.int64)
    if budget is None:
        return [ids[members] for members in assign_padded(lengths, batch.micro_batch_size, ranks, data_rank)]
    return [ids[np.array(members, np.int64)] for members in pack(lengths, budget, ranks, data_rank)]


def pack(lengths: NDArray[np.int64], budget: int, data_parallel: int, data_rank: int) -> list[list[int]]:
    """Return, for each packed micro-batch of one rank, the positions of its examples in the step; some may be
    empty.

    All ranks together have `data_parallel` × K micro-batches of at most `budget` tokens. They are filled
    greedily, the longest example first, into the emptiest micro-batch; K is the smallest number for which
    that fits, or close to it. Micro-batches are assigned to ranks by size, and no two differ by more tokens
    than the longest example has; therefore, neither do ranks.

    Raises ValueError for an example over the budget.
    """
    if lengths.max(initial=0) > budget:
        raise ValueError(f"an example of {lengths.max()} tokens is over the budget of {budget}")
    order = np.argsort(-lengths, kind="stable").tolist()
    packs = _fewest(lengths, order, budget, data_parallel)
    by_size = sorted(packs, key=lambda members: -int(lengths[members].sum()))
    return by_size[data_rank::data_parallel]


def _fewest(lengths: NDArray[np.int64], order: Sequence[int], budget: int, together: int) -> list[list[int]]:
    """Return as few packs as possible, a multiple of `together`. The number is found by doubling steps up
    from the lower bound and then by bisection; trying every number would take thousands of attempts for ten
    thousand long rows."""
    least = max(1, -(-int(lengths.sum()) // budget), int(np.count_nonzero(lengths > budget // 2)))
    too_few = -(-least // together) - 1
    step = 1
    while (packs := _emptiest_first(lengths, order, budget, (too_few + step) * together)) is None:
        too_few, step = too_few + step, 2 * step
    enough = too_few + step
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        fewer = _emptiest_first(lengths, order, budget, middle * together)
        if fewer is None:
            too_few = middle
        else:
            packs, enough = fewer, middle
    return packs


def _emptiest_first(
    lengths: NDArray[np.int64], order: Sequence[int], budget: int, number: int
) -> list[list[int]] | None:
    """Return `number` packs, filled in `order` into the emptiest; None if one would exceed the budget."""
    packs: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, which) for which in range(number)]  # a heap; of equal loads, the first pack
    for position in order:
        load, which = loads[0]
        load += int(lengths[position])
        if load > budget:
            return None
        heapq.heapreplace(loads, (load, which))
        packs[which].append(position)
    return packs


def assign_padded(
    lengths: NDArray[np.int64], micro_batch_size: int, data_parallel: int, data_rank: int
) -> list[NDArray[np.int64]]:
    """Return, for each padded micro-batch of one rank, the positions of its examples in the step; the last
    ones may be empty.

    Examples are sorted by length, the longest first, so that the micro-batches that the ranks compute at the
    same time have rows of similar length. The n-th `data_parallel` × `micro_batch_size` examples make the
    n-th micro-batches, assigned to the ranks round-robin.
    """
    order = np.argsort(-lengths, kind="stable")
    together = data_parallel * micro_batch_size
    return [order[i : i + together][data_rank::data_parallel] for i in range(0, len(order), together)]
