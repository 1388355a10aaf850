"""Packing: which examples of a step stand together in a padding-free row, and the row's tensors.

Takes lengths, a budget of tokens and a number of data-parallel ranks; pure. Nothing here decides in which
step an example stands, so packed and padded runs learn the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dsft.data.batch import NO_TARGET, MicroBatch
from dsft.data.dataset import Example

EMPTY_ROW_LENGTH = 2  # tokens of a row without targets, where no example is left to deal


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


def lay(examples: Sequence[Example], pad_id: int, neftune_alpha: float | None = None) -> MicroBatch:
    """One row of the examples' segments one after the other; without examples one of two tokens and no
    target. neftune_alpha: with the scale of noise on the embeddings, by the length of each segment."""
    if not examples:
        ids, targets = np.full(EMPTY_ROW_LENGTH, pad_id), np.full(EMPTY_ROW_LENGTH, NO_TARGET)
        lengths: tuple[int, ...] = (EMPTY_ROW_LENGTH,)
    else:
        ids = np.concatenate([example.input_ids for example in examples])
        targets = np.concatenate([targets_of(example) for example in examples])
        lengths = tuple(length for example in examples for length in example.segment_lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    input_ids, position_ids, target_ids = (
        torch.from_numpy(row[None].astype(np.int64)) for row in (ids, positions, targets)
    )
    noise_scale = None if neftune_alpha is None else noise_scales(lengths, neftune_alpha)[None]
    return MicroBatch(input_ids, position_ids, target_ids, lengths, noise_scale)


def noise_scales(lengths: Sequence[int], alpha: float) -> torch.Tensor:
    """(sum of lengths,) float32: α ÷ √L on each token of a segment of L tokens."""
    return torch.cat([torch.full((length,), alpha / math.sqrt(length)) for length in lengths])


def targets_of(example: Example) -> NDArray[np.int64]:
    """(T,): the token that each position predicts, or NO_TARGET."""
    targets = np.full(len(example.input_ids), NO_TARGET, dtype=np.int64)
    targets[:-1] = np.where(example.trained[1:], example.input_ids[1:], NO_TARGET)
    return targets
