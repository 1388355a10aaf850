"""The micro-batch of a run that takes the most memory: takes a dataset and the batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset
from dsft.data.sets.order import Order
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.cut import first_part
from dsft.data.steps.lay import collate, lay
from dsft.data.steps.pack import BatchSizes, pack

LAID = 1_000_000  # examples of all steps that are laid to find the largest pack: seconds


def longest_micro_batch(
    dataset: Dataset, batch: BatchSizes, pad_id: int, seed: int, total_steps: int
) -> MicroBatch:
    """micro_batch_size rows (pairs: of two) of the longest example's length. Rows are dealt longest first, so
    a step that has that example has it in a full micro-batch of this shape, unless the step itself is short
    of rows. The reference of pairs is 0.

    Packed: the largest of all steps; of a run of more than LAID examples as many of the longest ones as a
    micro-batch can come to have, which may be more than any has."""
    budget, size = batch.tokens_per_micro_batch, batch.global_batch_size
    if budget is not None:
        if total_steps * size > LAID:
            return _fullest_pack(dataset, batch, budget, pad_id)
        order = Order(dataset, size, seed)
        packs = (_largest_pack(dataset, batch, budget, order.step(index).ids) for index in range(total_steps))
        largest = max(packs, key=lambda members: int(dataset.lengths[members].sum()))
        return _laid(dataset, largest, pad_id)
    widest = np.full(min(batch.micro_batch_size, len(dataset)), np.argmax(dataset.widths))
    return _laid(dataset, widest, pad_id, packed=False)


def _laid(dataset: Dataset, ids: NDArray[np.int64], pad_id: int, *, packed: bool = True) -> MicroBatch:
    examples = [dataset[which] for which in ids.tolist()]
    laid = (lay if packed else collate)(examples, pad_id, None, ids if dataset.is_pairs else None)
    if laid.pairs is None:
        return laid
    reference = torch.zeros(laid.pairs.num_tokens.shape, dtype=torch.float64)
    return replace(laid, pairs=replace(laid.pairs, reference=reference))


def _largest_pack(
    dataset: Dataset, batch: BatchSizes, budget: int, ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Of a step's examples; packs are dealt by size, so it is the first one of rank 0."""
    members: Sequence[int] = pack(
        dataset.lengths[ids].astype(np.int64), budget, batch.data_parallel, data_rank=0
    )[0]
    return ids[members]


def _fullest_pack(dataset: Dataset, batch: BatchSizes, budget: int, pad_id: int) -> MicroBatch:
    """Up to the budget, or to a rank's share of a step's longest examples and the longest once more: packs
    differ by no more than that."""
    order = np.argsort(-dataset.lengths, kind="stable")[: batch.global_batch_size]
    ends = np.cumsum(dataset.lengths[order])
    total, longest = int(ends[-1]), int(ends[0])
    tokens = min(budget, total, -(-total // batch.data_parallel) + longest)
    taken = order[: np.searchsorted(ends, tokens) + 1]
    return first_part(_laid(dataset, taken, pad_id), tokens)
