"""The micro-batch of a run that takes the most memory: takes a dataset and the batch sizes."""

from __future__ import annotations

import numpy as np

from dsft.data.batch import MicroBatch
from dsft.data.dataset import Dataset
from dsft.data.steps import BatchSizes, collate


def longest_micro_batch(dataset: Dataset, batch: BatchSizes, pad_id: int) -> MicroBatch:
    """micro_batch_size rows of the longest example's length. Rows are dealt longest first, so a step that
    has that example has it in a full micro-batch of this shape, unless the step itself is short of rows."""
    example = dataset.examples[int(np.argmax(dataset.lengths))]
    return collate([example] * min(batch.micro_batch_size, len(dataset)), pad_id)
