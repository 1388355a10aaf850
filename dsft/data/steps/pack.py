"""Which examples of a step stand together in a micro-batch: packed without padding, or dealt like cards.

Takes lengths, a budget of tokens and a number of data-parallel ranks; pure, without torch. Nothing here
decides in which step an example stands, so packed and padded runs learn the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsft.plan.batch import BatchSizes


def micro_batches_of(
    lengths: NDArray[np.int64], batch: BatchSizes, data_rank: int
) -> list[NDArray[np.int64]]:
    """The positions in a step that each micro-batch of one rank holds: packed where there is a budget."""
    if batch.tokens_per_micro_batch is None:
        return deal(lengths, batch.micro_batch_size, batch.data_parallel, data_rank)
    packs = pack(lengths, batch.tokens_per_micro_batch, batch.data_parallel, data_rank)
    return [np.array(members, dtype=np.int64) for members in packs]


def pack(lengths: NDArray[np.int64], budget: int, data_parallel: int, data_rank: int) -> list[list[int]]:
    """The positions in a step that each micro-batch of one rank holds; some may be empty.

    All ranks together have `data_parallel` × K micro-batches of at most `budget` tokens, with a K that is the
    smallest, or near it, for which the longest example first into the emptiest micro-batch fits. Ranks differ
    by at most the longest example's tokens: no two micro-batches differ by more, and they are dealt by size.

    Raises ValueError for an example over the budget.
    """
    if lengths.max(initial=0) > budget:
        raise ValueError(f"an example of {lengths.max()} tokens is over the budget of {budget}")
    order = np.argsort(-lengths, kind="stable").tolist()
    packs = _fewest(lengths, order, budget, data_parallel)
    by_size = sorted(packs, key=lambda members: -int(lengths[members].sum()))
    return by_size[data_rank::data_parallel]


def _fewest(lengths: NDArray[np.int64], order: Sequence[int], budget: int, together: int) -> list[list[int]]:
    """Packs, a multiple of `together` of them: from the least that could do in doubling steps to a number
    that does, then by halves back. One by one, ten thousand long rows would take thousands of tries."""
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
    """`number` packs, or None where one would be over the budget."""
    packs: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, which) for which in range(number)]  # a heap; equal loads: the first pack
    for position in order:
        load, which = loads[0]
        load += int(lengths[position])
        if load > budget:
            return None
        heapq.heapreplace(loads, (load, which))
        packs[which].append(position)
    return packs


def deal(
    lengths: NDArray[np.int64], micro_batch_size: int, data_parallel: int, data_rank: int
) -> list[NDArray[np.int64]]:
    """The positions in a step that each micro-batch of one rank holds; some are empty at the end.

    Longest first, so that the micro-batches that all ranks compute together hold rows of about one length:
    the n-th `data_parallel` × `micro_batch_size` of them make the n-th micro-batch, dealt like cards.
    """
    order = np.argsort(-lengths, kind="stable")
    together = data_parallel * micro_batch_size
    return [order[i : i + together][data_rank::data_parallel] for i in range(0, len(order), together)]
