"""The micro-batch of a run that takes the most memory: takes a dataset and the batch sizes."""

from __future__ import annotations

import numpy as np

from dsft.data.batch import MicroBatch
from dsft.data.dataset import Dataset, Example
from dsft.data.pack import lay
from dsft.data.steps import BatchSizes, collate


def longest_micro_batch(dataset: Dataset, batch: BatchSizes, pad_id: int) -> MicroBatch:
    """micro_batch_size rows of the longest example's length. Rows are dealt longest first, so a step that
    has that example has it in a full micro-batch of this shape, unless the step itself is short of rows.

    Packed: the longest examples of a step, as many as one micro-batch can come to have."""
    if batch.tokens_per_micro_batch is not None:
        return lay(_fullest_pack(dataset, batch, batch.tokens_per_micro_batch), pad_id)
    example = dataset.examples[int(np.argmax(dataset.lengths))]
    return collate([example] * min(batch.micro_batch_size, len(dataset)), pad_id)


def _fullest_pack(dataset: Dataset, batch: BatchSizes, budget: int) -> list[Example]:
    """Up to the budget, or to a rank's share of a step's longest examples and one example more: packs differ
    by no more than that."""
    order = np.argsort(-dataset.lengths, kind="stable")[: batch.global_batch_size]
    share = -(-int(dataset.lengths[order].sum()) // batch.data_parallel)
    room = min(budget, share + int(dataset.lengths[order[0]]))
    taken = []
    for which in order:
        length = int(dataset.lengths[which])
        if length <= room:
            taken.append(dataset.examples[which])
            room -= length
    return taken
