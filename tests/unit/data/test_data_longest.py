"""The longest micro-batch, against all micro-batches of an epoch."""

from __future__ import annotations

import numpy as np

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.longest import longest_micro_batch
from dsft.data.steps.steps import TrainSteps
from dsft.plan.batch import BatchSizes


def dataset(*lengths: int) -> Dataset:
    examples = [Example(np.arange(n, dtype=np.int32), np.ones(n, dtype=bool), f"f:{n}") for n in lengths]
    return Dataset.of(examples)


def test_it_is_as_large_as_the_largest_of_any_step() -> None:
    data, sizes = dataset(3, 9, 4, 7, 9, 5, 2, 6, 8), BatchSizes(4, 2, 1, 2)
    longest = longest_micro_batch(data, sizes, pad_id=0, seed=1, total_steps=30)
    assert longest.input_ids.shape == (2, 9)
    shapes = [
        batch.input_ids.shape
        for rank in range(2)
        for index in range(30)
        for batch in TrainSteps(data, sizes, rank, seed=1, pad_id=0).step(index).micro_batches
    ]
    assert max(rows * length for rows, length in shapes) == 18


def test_it_has_no_more_rows_than_there_are() -> None:
    assert longest_micro_batch(dataset(5), BatchSizes(8, 8, 1, 1), 0, 1, 1).input_ids.shape == (1, 5)
