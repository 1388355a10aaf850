"""Steps: the order of an epoch, the dealing to ranks, the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.sets.order import epoch_order
from dsft.data.steps.batch import NO_TARGET, GlobalStep, MicroBatch
from dsft.data.steps.collate import collate_packed, collate_padded
from dsft.data.steps.pack import assign_padded
from dsft.data.steps.split import part_of
from dsft.data.steps.steps import TrainSteps, evaluation
from dsft.spec.batch import BatchSizes
from tests.examples import dataset_of
from tests.make import make_micro_batch

PAD = 7


def sizes_of(total: int, micro: int, ranks: int, budget: int | None = None) -> BatchSizes:
    return BatchSizes(total, micro, 1, ranks, budget)


def dataset(count: int) -> Dataset:
    """Example i: 2 to 6 tokens, all of them i + 100, of which the last third to all are trained on."""
    examples = []
    for i in range(count):
        length = 2 + (i * 7) % 5
        trained = np.arange(length) >= (i % 3) * length // 3
        examples.append(Example(np.full(length, i + 100, dtype=np.int32), trained))
    return dataset_of(examples)


def members(micro_batch: MicroBatch) -> list[int]:
    """The examples of a micro-batch, by their tokens."""
    return [int(row[0]) - 100 for row in micro_batch.tokens.input_ids if int(row[0]) != PAD]


def targets(micro_batches: Sequence[MicroBatch]) -> int:
    return sum(int((m.tokens.targets != NO_TARGET).sum()) for m in micro_batches)


layouts = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))  # micro, accumulation, ranks


@given(st.integers(1, 60), layouts, st.integers(0, 2**64 - 1), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_every_example_once_an_epoch(count: int, layout: tuple[int, int, int], seed: int, epoch: int) -> None:
    micro, accumulation, ranks = layout
    sizes = sizes_of(micro * accumulation * ranks, micro, ranks)
    data = dataset(count)
    plans = [TrainSteps(data, sizes, rank, seed, PAD) for rank in range(ranks)]
    per_epoch = plans[0].steps_per_epoch
    assert per_epoch == -(-count // sizes.global_batch_size)
    seen: list[int] = []
    for index in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        steps = [plan.step(index) for plan in plans]
        assigned = [i for step in steps for m in step.micro_batches for i in members(m)]
        assert sorted(assigned) == sorted(steps[0].example_ids)
        assert len({len(step.micro_batches) for step in steps}) == 1
        assert len(steps[0].micro_batches) == -(-len(assigned) // (micro * ranks)) <= accumulation
        assert all(len(m.tokens.input_ids) <= micro for step in steps for m in step.micro_batches)
        assert sum(targets(step.micro_batches) for step in steps) == steps[0].counts["tokens"]
        assert steps[0].num_tokens == sum(data.lengths[i] for i in assigned)
        assert all(same_plan(step, steps[0]) for step in steps)
        seen += assigned
    assert sorted(seen) == list(range(count))
    assert steps[0].epoch == epoch + 1


def same_plan(one: GlobalStep, other: GlobalStep) -> bool:
    """What all ranks must agree on."""
    return (one.counts, one.num_tokens, one.epoch, one.example_ids) == (
        other.counts,
        other.num_tokens,
        other.epoch,
        other.example_ids,
    )


@given(st.integers(1, 80), st.integers(0, 20), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_a_step_does_not_depend_on_how_it_is_cut(count: int, index: int, seed: int) -> None:
    data = dataset(count)
    cuts = [(1, 1), (12, 1), (2, 3), (3, 4), (1, 12), (6, 2)]  # micro-batch, ranks; the rest accumulates
    steps = [TrainSteps(data, sizes_of(12, *cut), 0, seed, PAD).step(index) for cut in cuts]
    assert all(same_plan(step, steps[0]) for step in steps)


def test_orders_of_seeds_and_epochs_differ() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert epoch_order(12, -1, 0).tolist() == epoch_order(12, 2**64 - 1, 0).tolist()


def test_where_an_example_falls_is_even() -> None:
    """2,000 epochs: each of 10 examples is first about 200 times (chi-squared, 9 degrees, p = 1e-4)."""
    first = np.bincount([int(epoch_order(10, 3, epoch)[0]) for epoch in range(2000)], minlength=10)
    assert ((first - 200.0) ** 2 / 200).sum() < 33.7


@given(st.lists(st.integers(2, 50), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_micro_batches_computed_together_are_alike(lengths: list[int], micro: int, ranks: int) -> None:
    """No example of a later micro-batch, on any rank, is longer than one of an earlier."""
    array = np.array(lengths)
    hands = [assign_padded(array, micro, ranks, rank) for rank in range(ranks)]
    together = [np.concatenate(column) for column in zip(*hands, strict=True)]
    for earlier, later in pairwise(together):
        assert array[earlier].min() >= array[later].max()
    # balanced: no rank has two rows more than another
    assert all(np.ptp([len(hand) for hand in column]) <= 1 for column in zip(*hands, strict=True))


@given(st.integers(1, 40), layouts)
@settings(max_examples=60, deadline=None)
def test_evaluation_holds_every_example_once(count: int, layout: tuple[int, int, int]) -> None:
    micro, accumulation, ranks = layout
    data = dataset(count)
    sizes = sizes_of(micro * accumulation * ranks, micro, ranks)
    assigned = [evaluation(data, sizes, rank, PAD) for rank in range(ranks)]
    assert sorted(i for batches, _ in assigned for m in batches for i in members(m)) == list(range(count))
    assert len({len(batches) for batches, _ in assigned}) == 1
    assert (
        sum(targets(batches) for batches, _ in assigned)
        == assigned[0][1]["tokens"]
        == data.target_counts.sum()
    )


def test_tensors_of_a_micro_batch() -> None:
    long = Example(np.array([1, 2, 3, 4], np.int32), np.array([True, False, True, True]))
    short = Example(np.array([5, 6], np.int32), np.array([False, True]))
    batch = collate_padded([long, short], PAD)
    no = NO_TARGET
    assert batch.tokens.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, PAD, PAD]]
    assert batch.tokens.targets.tolist() == [[no, 3, 4, no], [6, no, no, no]]
    assert batch.tokens.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert {t.dtype for t in (batch.tokens.input_ids, batch.tokens.targets, batch.tokens.position_ids)} == {
        torch.int64
    }
    assert all(
        t.is_contiguous() for t in (batch.tokens.input_ids, batch.tokens.targets, batch.tokens.position_ids)
    )


def test_parts_of_a_micro_batch_know_its_padding_and_their_own() -> None:
    """Two rows of 3 and 2 tokens in 4 parts of 2: the last two places fill up the last part."""
    is_padding = torch.tensor([[False, False, False], [False, False, True]])
    ids = torch.arange(6).view(2, 3)
    batch = make_micro_batch(ids, torch.arange(3).repeat(2, 1), ids, is_padding=is_padding).to(
        torch.device("cpu")
    )
    for whole, expected in (
        (batch, is_padding.flatten().tolist()),
        (replace(batch, tokens=batch.tokens._replace(is_padding=None)), [False] * 6),
    ):
        parts = [part_of(whole, number, 4).tokens.is_padding for number in range(4)]
        assert torch.cat([p for p in parts if p is not None], 1).tolist() == [[*expected, True, True]]
    assert (
        part_of(replace(batch, tokens=batch.tokens._replace(is_padding=None)), 0, 3).tokens.is_padding is None
    )


def test_noise_goes_by_an_examples_own_length_padded_or_packed() -> None:
    long = Example(np.array([1, 2, 3, 4], np.int32), np.array([True, False, True, True]))
    short = Example(np.array([5, 6], np.int32), np.array([False, True]))
    padded = collate_padded([long, short], PAD, 6.0).tokens.noise_scale
    packed = collate_packed([long, short], PAD, 6.0).tokens.noise_scale
    assert padded is not None and packed is not None
    small = 6 / 2**0.5
    torch.testing.assert_close(padded, torch.tensor([[3.0, 3, 3, 3], [small, small, 0, 0]]))
    torch.testing.assert_close(packed, torch.tensor([[3.0, 3, 3, 3, small, small]]))
    step = TrainSteps(dataset(5), sizes_of(4, 2, 2), 0, 0, PAD, 6.0).step(0)
    assert all(batch.tokens.noise_scale is not None for batch in step.micro_batches)
    assert all(
        batch.tokens.noise_scale is None for batch in evaluation(dataset(5), sizes_of(4, 2, 2), 0, PAD)[0]
    )


def test_an_empty_micro_batch_is_a_row_without_targets() -> None:
    steps = [TrainSteps(dataset(5), sizes_of(4, 1, 4), rank, 0, PAD).step(1) for rank in range(4)]
    assert [len(members(step.micro_batches[0])) for step in steps] == [1, 0, 0, 0]
    empty = steps[1].micro_batches[0]
    assert empty.shape == empty.tokens.targets.shape == empty.tokens.position_ids.shape == (1, 2)
    assert targets(steps[1].micro_batches) == 0
    assert steps[1].counts["tokens"] == targets(steps[0].micro_batches)


@pytest.mark.parametrize(("index", "epoch"), [(0, 4 / 10), (1, 8 / 10), (2, 1.0), (3, 1 + 4 / 10)])
def test_epochs_seen(index: int, epoch: float) -> None:
    assert TrainSteps(dataset(10), sizes_of(4, 2, 1), 0, 0, PAD).step(index).epoch == epoch
