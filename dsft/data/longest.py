"""The micro-batch of a run that takes the most memory: takes a dataset and the batch sizes."""

from __future__ import annotations

import numpy as np

from dsft.data.batch import MicroBatch
from dsft.data.dataset import Dataset
from dsft.data.pack import lay
from dsft.data.steps import BatchSizes, collate


def longest_micro_batch(dataset: Dataset, batch: BatchSizes, pad_id: int) -> MicroBatch:
    """micro_batch_size rows of the longest example's length. Rows are dealt longest first, so a step that
    has that example has it in a full micro-batch of this shape, unless the step itself is short of rows.

    Packed: the longest examples of a step, as many tokens as one micro-batch can come to have."""
    if batch.tokens_per_micro_batch is not None:
        return _fullest_pack(dataset, batch, batch.tokens_per_micro_batch, pad_id)
    example = dataset.examples[int(np.argmax(dataset.lengths))]
    return collate([example] * min(batch.micro_batch_size, len(dataset)), pad_id)


def _fullest_pack(dataset: Dataset, batch: BatchSizes, budget: int, pad_id: int) -> MicroBatch:
    """Up to the budget, or to a rank's share of a step's longest examples and the longest once more: packs
    differ by no more than that."""
    order = np.argsort(-dataset.lengths, kind="stable")[: batch.global_batch_size]
    ends = np.cumsum(dataset.lengths[order])
    total, longest = int(ends[-1]), int(ends[0])
    tokens = min(budget, total, -(-total // batch.data_parallel) + longest)
    taken = order[: np.searchsorted(ends, tokens) + 1]
    examples = [dataset.examples[which] for which in taken]
    whole = lay(examples, pad_id)
    pieces = np.cumsum([length for example in examples for length in example.segment_lengths])
    lengths = np.diff(np.minimum(pieces, tokens), prepend=0)
    input_ids, position_ids, targets = (
        row[:, :tokens] for row in (whole.input_ids, whole.position_ids, whole.targets)
    )
    return MicroBatch(input_ids, position_ids, targets, tuple(lengths[lengths > 0].tolist()))
