"""Packing: which examples stand together, the row's tensors, pretraining's full rows."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps import pack as packing
from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.data.steps.collate import collate_packed
from dsft.data.steps.pack import pack
from dsft.data.steps.steps import SEARCH_LIMIT, TrainSteps, evaluation, longest_micro_batch
from dsft.spec.batch import BatchSizes
from tests.examples import dataset_of

PAD = 7
lengths_of_a_step = st.lists(st.integers(1, 50), min_size=1, max_size=80)


def example(first: int, length: int) -> Example:
    """Tokens that no other example has; two thirds are trained on."""
    ids = np.arange(first, first + length, dtype=np.int32)
    return Example(ids, ids % 3 > 0)


def dataset(lengths: list[int]) -> Dataset:
    firsts = np.cumsum([100, *lengths])
    examples = tuple(example(int(f), n) for f, n in zip(firsts, lengths, strict=False))
    return dataset_of(examples)


@given(lengths_of_a_step, st.integers(50, 200), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_every_example_once_and_none_over_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    array = np.array(lengths)
    packs = [pack(array, budget, ranks, rank) for rank in range(ranks)]
    assert sorted(i for rank in packs for members in rank for i in members) == list(range(len(lengths)))
    assert len({len(rank) for rank in packs}) == 1
    loads = [[int(array[members].sum()) for members in rank] for rank in packs]
    assert all(load <= budget for rank in loads for load in rank)
    assert packs == [pack(array, budget, ranks, rank) for rank in range(ranks)]


@given(lengths_of_a_step, st.integers(50, 200), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_packs_and_ranks_differ_by_no_more_than_the_longest(
    lengths: list[int], budget: int, ranks: int
) -> None:
    array = np.array(lengths)
    loads = np.array(
        [[int(array[members].sum()) for members in pack(array, budget, ranks, rank)] for rank in range(ranks)]
    )
    assert np.ptp(loads) <= max(lengths)
    assert np.ptp(loads.sum(axis=1)) <= max(lengths)


def test_no_more_micro_batches_than_needed() -> None:
    """Two ranks: 100 tokens fill two packs of 50; one token more takes two packs on each rank."""
    assert [len(pack(np.array([30, 30, 20, 20]), 50, 2, rank)) for rank in (0, 1)] == [1, 1]
    assert [len(pack(np.array([30, 30, 20, 20, 1]), 50, 2, rank)) for rank in (0, 1)] == [2, 2]
    # 40 + 40 + 20 tokens fit into two packs by their sum alone
    assert [len(pack(np.array([40, 40, 20]), 50, 2, rank)) for rank in (0, 1)] == [2, 2]
    assert pack(np.array([5]), 50, 2, 1) == [[]]  # nothing is left for the second rank


@pytest.mark.parametrize("longest", [50, 20])
def test_few_tries_where_the_sum_of_tokens_says_little(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which one or two fit where the sum of tokens says more: a held-out set of thousands of them is
    packed at each evaluation."""
    one_try = Mock(side_effect=packing._emptiest_first)
    monkeypatch.setattr(packing, "_emptiest_first", one_try)
    lengths = np.random.default_rng(0).integers(longest - 2, longest, 2000)
    assert len(pack(lengths, 60, 2, 0)) == -(-1000 // (60 // (longest - 1)))
    assert one_try.call_count < 25


def test_an_example_over_the_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="51 tokens is over the budget of 50"):
        pack(np.array([3, 51]), 50, 1, 0)


def test_the_packing_is_pinned() -> None:
    """Another one is as good, but rounds otherwise, so a resumed run would not repeat its digits."""
    packs = [pack(np.array([9, 5, 8, 1, 7, 4, 3, 6]), 12, 2, rank) for rank in (0, 1)]
    assert packs == [[[2, 6], [7, 1]], [[4, 5], [0, 3]]]


def test_tensors_of_a_packed_row() -> None:
    one = Example(np.array([1, 2, 3, 4], np.int32), np.array([True, False, True, True]))
    other = Example(np.array([5, 6], np.int32), np.array([True, True]))
    batch = collate_packed([one, other], PAD)
    no = NO_TARGET
    assert batch.segments.lengths == (4, 2)
    assert batch.tokens.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert batch.tokens.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.tokens.targets.tolist() == [[no, 3, 4, no, 6, no]]  # 5 is no target of 4
    assert {t.dtype for t in (batch.tokens.input_ids, batch.tokens.position_ids, batch.tokens.targets)} == {
        torch.int64
    }


def test_an_empty_micro_batch_has_no_target() -> None:
    batch = collate_packed([], PAD)
    assert (batch.segments.lengths, batch.tokens.input_ids.tolist()) == ((2,), [[PAD, PAD]])
    assert batch.tokens.position_ids.tolist() == [[0, 1]] and batch.tokens.targets.tolist() == [
        [NO_TARGET] * 2
    ]


def segments(batches: tuple[MicroBatch, ...]) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of every segment with a token of an example, in the order of their tokens."""
    found = []
    for batch in batches:
        ids, targets = (
            t[0].split(batch.segments.lengths) for t in (batch.tokens.input_ids, batch.tokens.targets)
        )
        found += [(i.tolist(), t.tolist()) for i, t in zip(ids, targets, strict=True) if i[0] != PAD]
    return sorted(found)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_step_is_the_same_packed_and_padded(lengths: list[int], micro: int, ranks: int) -> None:
    data = dataset(lengths)
    for index in range(2):
        steps = {}
        for budget in (None, 20, 47):
            sizes = BatchSizes(micro * ranks, micro, 1, ranks, budget)
            steps[budget] = [TrainSteps(data, sizes, rank, 5, PAD).step(index) for rank in range(ranks)]
        padded = steps.pop(None)
        rows = sorted(
            (row[: end + 2].tolist(), target[: end + 1].tolist())
            for step in padded
            for batch in step.micro_batches
            for row, target in zip(batch.tokens.input_ids, batch.tokens.targets, strict=True)
            if row[0] != PAD and (end := int((row != PAD).nonzero().max()) - 1) >= 0
        )
        for packed in steps.values():
            assert packed[0].counts == padded[0].counts
            assert packed[0].num_tokens == padded[0].num_tokens
            assert packed[0].example_ids == padded[0].example_ids
            found = segments(tuple(batch for step in packed for batch in step.micro_batches))
            assert [(ids, targets[: len(ids) - 1]) for ids, targets in found] == rows
            assert len({len(step.micro_batches) for step in packed}) == 1


def test_evaluation_is_packed_too() -> None:
    data = dataset([5, 9, 3, 3, 8, 12, 2])
    sizes = BatchSizes(2, 1, 1, 2, 14)
    assigned = [evaluation(data, sizes, rank, PAD) for rank in (0, 1)]
    found = segments(tuple(batch for batches, _ in assigned for batch in batches))
    assert [ids for ids, _ in found] == [e.input_ids.tolist() for e in data]
    tokens = int(data.target_counts.sum())
    assert assigned[0][1] == {"examples": 7, "tokens": tokens, "chosen_tokens": tokens, "sequences": 7}
    assert len(assigned[0][0]) == len(assigned[1][0])


def test_rows_that_are_cut_otherwise_are_other_data() -> None:
    ids, trained = np.arange(8, dtype=np.int32), np.ones(8, dtype=bool)
    cuts = (None, (8,), (3, 5), (5, 3))
    prints = {dataset_of([Example(ids, trained, cut)]).fingerprint for cut in cuts}
    assert len(prints) == 4


@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(20, 90),
)
@settings(max_examples=60, deadline=None)
def test_no_micro_batch_is_larger_than_the_memory_probes(
    lengths: list[int], examples: int, ranks: int, budget: int
) -> None:
    data, sizes = dataset(lengths), BatchSizes(examples * ranks, examples, 1, ranks, budget)
    steps = TrainSteps(data, sizes, 0, 5, PAD)
    total = 2 * steps.steps_per_epoch
    largest = max(batch.shape.numel() for i in range(total) for batch in steps.step(i).micro_batches)
    probed = longest_micro_batch(data, sizes, PAD, 5, total)
    assert probed.tokens.input_ids.numel() == largest
    bound = longest_micro_batch(data, sizes, PAD, 5, SEARCH_LIMIT + 1)  # too many steps to lay each
    for found in (probed, bound):
        assert (
            sum(found.segments.lengths)
            == found.tokens.targets.numel()
            == found.tokens.input_ids.numel()
            <= budget
        )
    assert largest <= bound.tokens.input_ids.numel()
