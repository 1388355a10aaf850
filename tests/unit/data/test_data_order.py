"""Which examples a step holds: mixtures, and the same steps however the run is cut (row 27 of the fault
matrix)."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.sets.cut import CutOptions
from dsft.data.sets.dataset import Dataset, Example
from dsft.data.sets.order import Order, quotas, shares_text
from dsft.data.steps.batch import GlobalStep
from dsft.data.steps.steps import TrainSteps, evaluation, longest_micro_batch
from dsft.spec.batch import BatchSizes
from tests.examples import examples_of
from tests.unit.data.token_rows import FakeRows, cut_all

PAD = 0


def mixed(sizes: tuple[int, ...], weights: tuple[float, ...] | None = None) -> Any:
    """What an order needs of a dataset."""
    return SimpleNamespace(sizes=sizes, weights=weights, names=("web", "books")[: len(sizes)])


mixtures = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 10)), min_size=1, max_size=4)


def sources(mixture: list[tuple[int, float]]) -> Any:
    return mixed(tuple(size for size, _ in mixture), tuple(weight for _, weight in mixture))


def test_without_weights_the_ids_are_pinned() -> None:
    """Whatever the number of sources: another order would break every run that is resumed."""
    pinned = [[3, 6, 8, 0, 4], [9, 7, 1, 2, 5], [11, 10], [8, 0, 1, 9, 6], [11, 5, 3, 10, 7], [4, 2]]
    for sizes in ((12,), (5, 7), (1, 1, 10)):
        order = Order(mixed(sizes), 5, 42)
        assert [order.step(index).ids.tolist() for index in range(6)] == pinned


def test_with_weights_the_ids_are_pinned() -> None:
    order = Order(mixed((6, 3), (1.0, 2.0)), 5, 42)
    assert [order.step(index).ids.tolist() for index in range(4)] == [
        [6, 7, 8, 2, 7],
        [8, 1, 0, 6],
        [6, 3, 4, 7, 8],
        [7, 6, 8, 5],
    ]


@given(mixtures, st.integers(1, 16), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_each_source_goes_round_in_epochs_of_its_own(
    mixture: list[tuple[int, float]], size: int, seed: int
) -> None:
    data = sources(mixture)
    order, total = Order(data, size, seed), sum(data.sizes)
    taken: list[int] = []
    for index in range(3 * order.steps_per_epoch):
        step = order.step(index)
        taken += step.ids.tolist()
        first = 0
        for source, count in enumerate(data.sizes):
            own = [i for i in taken if first <= i < first + count]
            assert len(own) == step.taken[source]
            whole, rest = divmod(len(own), count)
            rounds = [own[i * count : (i + 1) * count] for i in range(whole)]
            assert all(sorted(one) == list(range(first, first + count)) for one in rounds)
            assert len(set(own[whole * count :])) == rest
            first += count
        if (index + 1) % order.steps_per_epoch == 0:
            epochs = (index + 1) // order.steps_per_epoch
            assert step.taken.tolist() == [epochs * slots for slots in order.slots]
            assert step.epoch == epochs
    assert len(taken) == 3 * total


@given(mixtures)
def test_quotas_are_the_shares_of_an_epoch(mixture: list[tuple[int, float]]) -> None:
    data = sources(mixture)
    assert data.weights is not None
    whole, found = sum(data.sizes), quotas(data.sizes, data.weights)
    assert sum(found) == whole
    for slots, weight in zip(found, data.weights, strict=True):
        assert abs(slots - weight / sum(data.weights) * whole) < 1
    assert quotas((0, 5), (1.0, 1.0)) == (0, 5)  # nothing was left of the first one


def test_equal_remainders_are_rounded_alike_by_every_python() -> None:
    """In floats the first mixture went wrong on Python 3.11, the second from 3.12 on."""
    assert quotas((12, 3, 5), (0.5, 0.1, 0.8)) == (7, 2, 11)  # exactly 7 1/7, 1 3/7 and 11 3/7
    assert quotas((7, 7, 4), (0.7, 0.6, 0.2)) == (9, 7, 2)  # exactly 8 2/5, 7 1/5 and 2 2/5


@given(mixtures, st.integers(1, 16), st.data())
@settings(max_examples=30, deadline=None)
def test_a_step_depends_on_its_number_alone(
    mixture: list[tuple[int, float]], size: int, data: st.DataObject
) -> None:
    """After an interruption at any step the next ones are those of the run that was not interrupted."""
    given = sources(mixture)
    straight = Order(given, size, 7)
    steps = [straight.step(index) for index in range(3 * straight.steps_per_epoch)]
    at = data.draw(st.integers(0, len(steps) - 1))
    resumed = Order(given, size, 7)
    for index in range(at, len(steps)):
        step = resumed.step(index)
        assert step.ids.tolist() == steps[index].ids.tolist()
        assert (step.taken.tolist(), step.epoch) == (steps[index].taken.tolist(), steps[index].epoch)


def dataset(*sizes: int, weights: tuple[float, ...] | None = None) -> Dataset:
    """The examples of a source have lengths and tokens of their own."""
    parts = []
    for source, count in enumerate(sizes):
        draw = np.random.default_rng(source)
        examples = [
            Example(np.full(n, 100 * source + i + 1, np.int32), np.ones(n, np.bool_))
            for i, n in enumerate(draw.integers(2, 20, count))
        ]
        parts.append(examples_of(examples))
    return Dataset(tuple(parts), weights, tuple(f"s{source}" for source in range(len(sizes))))


@pytest.mark.parametrize("budget", [None, 48])
@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_global_batches_do_not_depend_on_the_ranks(
    weights: tuple[float, ...] | None, budget: int | None
) -> None:
    """Ids in order, and the tokens that all ranks together compute, for 1, 2, 3 and 4 ranks."""
    data = dataset(30, 7, weights=weights)
    by_ranks = {}
    for ranks in (1, 2, 3, 4):
        sizes = BatchSizes(12, 12 // ranks, 1, ranks, budget)
        plans = [TrainSteps(data, sizes, rank, 5, PAD) for rank in range(ranks)]
        by_ranks[ranks] = [together([plan.step(index) for plan in plans]) for index in range(8)]
    assert all(found == by_ranks[1] for found in by_ranks.values())


def together(steps: list[GlobalStep]) -> tuple[object, ...]:
    one = steps[0]
    assert all(step.example_ids == one.example_ids and step.sources == one.sources for step in steps)
    tokens = Counter(
        int(token)
        for step in steps
        for batch in step.micro_batches
        for token in batch.tokens.input_ids[batch.tokens.input_ids != PAD]
    )
    return one.example_ids, one.counts, one.num_tokens, one.epoch, one.sources, tokens


def test_what_a_step_has_of_each_source() -> None:
    data = dataset(30, 7, weights=(1.0, 3.0))
    steps = TrainSteps(data, BatchSizes(8, 8, 1, 1), 0, 5, PAD)
    seen: Counter[str] = Counter()
    for index in range(7):
        step = steps.step(index)
        assert sum(of.tokens for of in step.sources.values()) == step.num_tokens
        assert sum(of.examples for of in step.sources.values()) == len(step.example_ids)
        for name, of in step.sources.items():
            seen[name] += of.examples
            assert of.epoch == seen[name] / {"s0": 30, "s1": 7}[name]
    assert TrainSteps(dataset(30), BatchSizes(8, 8, 1, 1), 0, 5, PAD).step(0).sources == {}


def test_shares_are_described_in_rows_and_epochs() -> None:
    shown = list(shares_text(mixed((1000, 2333), (0.7, 0.3))))
    assert shown == [
        "web: 1,000 examples, weight 0.7: 2,333 examples per epoch, 2.33 times each",
        "books: 2,333 examples, weight 0.3: 1,000 examples per epoch, 0.429 times each",
    ]
    assert list(shares_text(mixed((5,)))) == []


# --- what is read -----------------------------------------------------------------------------------------


def rows_of(count: int) -> tuple[FakeRows, Dataset]:
    source = FakeRows([([i + 1] * (3 + i % 5), [True] * (3 + i % 5)) for i in range(count)])
    return source, Dataset((cut_all(source, CutOptions(8, "error", None)).examples,))


@pytest.mark.parametrize("budget", [None, 64])
def test_a_rank_reads_the_rows_that_it_computes_and_no_others(budget: int | None) -> None:
    """A run that goes on at step 60 has not read what was seen before it."""
    source, data = rows_of(1000)
    steps = TrainSteps(data, BatchSizes(16, 8, 1, 2, budget), 1, 5, PAD)
    for index in (60, 61):
        source.reads.clear()
        step = steps.step(index)
        mine = {
            int(i) - 1
            for batch in step.micro_batches
            for i in batch.tokens.input_ids[batch.tokens.input_ids != PAD]
        }
        assert sorted(source.reads) == sorted(mine) and mine < set(step.example_ids)


def test_held_out_rows_are_read_as_they_are_evaluated() -> None:
    source, data = rows_of(100)
    batches, counts = evaluation(data, BatchSizes(4, 4, 1, 2), 1, PAD)
    assert source.reads == [] and counts["tokens"] == int(data.target_counts.sum())
    assert len(batches) == 13 and len(batches[2:4]) == 2 and len(source.reads) == 8
    source.reads.clear()
    assert len(list(batches)) == 13 and len(source.reads) == 50


@pytest.mark.parametrize("budget", [None, 64])
def test_the_longest_micro_batch_is_found_by_lengths(budget: int | None) -> None:
    source, data = rows_of(1000)
    longest_micro_batch(data, BatchSizes(16, 8, 1, 2, budget), PAD, 5, 60)
    assert 1 <= len(source.reads) <= 64
