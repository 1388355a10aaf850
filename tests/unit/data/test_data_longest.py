"""The longest micro-batch, against all micro-batches of an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps import steps as module
from dsft.data.steps.pack import assign_padded
from dsft.data.steps.steps import TrainSteps, longest_micro_batch
from dsft.spec.batch import BatchSizes
from tests.examples import dataset_of


def dataset(*lengths: int) -> Dataset:
    examples = [Example(np.arange(n, dtype=np.int32), np.ones(n, dtype=bool)) for n in lengths]
    return dataset_of(examples)


def test_it_is_as_large_as_the_largest_of_any_step() -> None:
    data, sizes = dataset(3, 9, 4, 7, 9, 5, 2, 6, 8), BatchSizes(4, 2, 1, 2)
    longest = longest_micro_batch(data, sizes, pad_id=0, seed=1, total_steps=30)
    assert longest.shape == (2, 9)
    shapes = [
        batch.shape
        for rank in range(2)
        for index in range(30)
        for batch in TrainSteps(data, sizes, rank, seed=1, pad_id=0).step(index).micro_batches
    ]
    assert max(rows * length for rows, length in shapes) == 18


def test_it_has_no_more_rows_than_there_are() -> None:
    assert longest_micro_batch(dataset(5), BatchSizes(8, 8, 1, 1), 0, 1, 1).tokens.input_ids.shape == (1, 5)


@pytest.mark.parametrize(("budget", "lengths"), [(20, (9, 9, 2)), (40, (9, 9, 8)), (9, (9,))])
def test_of_a_long_run_the_longest_rows_fill_a_pack(
    budget: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the four longest, of 33 tokens, a rank may get half and the longest once more: 26."""
    data, sizes = dataset(3, 9, 4, 7, 9, 5, 2, 6, 8), BatchSizes(4, 2, 1, 2, tokens_per_micro_batch=budget)
    exact = longest_micro_batch(data, sizes, pad_id=0, seed=1, total_steps=30)
    monkeypatch.setattr(module, "SEARCH_LIMIT", 0)
    found = longest_micro_batch(data, sizes, pad_id=0, seed=1, total_steps=30)
    assert found.segments.lengths == lengths
    assert found.tokens.input_ids.shape == (1, sum(lengths)) and exact.tokens.input_ids.numel() <= sum(
        lengths
    )


def test_rows_are_dealt_longest_first() -> None:
    lengths = np.array([3, 9, 4, 7, 5])
    assigned = [[ids.tolist() for ids in assign_padded(lengths, 1, 2, rank)] for rank in range(2)]
    assert assigned == [[[1], [4], [0]], [[3], [2], []]]
