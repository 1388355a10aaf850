"""Build the steps of training and the micro-batches of evaluation, for one data-parallel rank.

A step is a pure function of (data, seed, step), so that any step can be built at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset
from dsft.data.sets.order import Order, StepSample
from dsft.data.steps.batch import GlobalStep, LazyMicroBatches, MicroBatch, SourceShare
from dsft.data.steps.collate import AnswerIds, collate_packed, collate_padded
from dsft.data.steps.pack import assign
from dsft.spec.batch import BatchSizes


class TrainSteps:
    """The steps of training, for one data-parallel rank.

    An epoch has as many examples as the dataset (without weights, each of them once) in
    ceil(examples ÷ global_batch_size) steps, of which the last may be shorter. In each step, every rank has
    the same number of micro-batches.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: BatchSizes,
        data_rank: int,
        seed: int,
        pad_id: int,
        neftune_alpha: float | None = None,
    ) -> None:
        self._neftune_alpha = neftune_alpha
        self._dataset, self._batch = dataset, batch
        self._data_rank, self._pad_id = data_rank, pad_id
        self._order = Order(dataset, batch.global_batch_size, seed)
        self.steps_per_epoch = self._order.steps_per_epoch

    def step(self, index: int, without: Collection[int] = ()) -> GlobalStep:
        """Return step `index` of the run, from 0, over any number of epochs. without: examples to leave
        out."""
        sample, data = self._order.step(index), self._dataset
        first = int(sample.taken.sum()) - len(sample.ids)
        if without:
            sample = replace(sample, ids=sample.ids[~np.isin(sample.ids, list(without))])
        assigned = assign(data, sample.ids, self._batch, self._data_rank)
        return GlobalStep(
            micro_batches=tuple(
                _read(data, ids, self._batch, self._pad_id, self._neftune_alpha) for ids in assigned
            ),
            counts=data.count(sample.ids),
            num_tokens=int(data.lengths[sample.ids].sum(dtype=np.int64)),
            epoch=sample.epoch,
            example_ids=tuple(sample.ids.tolist()),
            squared_lengths=int(data.squares[sample.ids].sum()),
            sources=self._sources(sample),
            assigned_ids=tuple(tuple(ids.tolist()) for ids in assigned),
            examples_before=first,
        )

    def _sources(self, sample: StepSample) -> Mapping[str, SourceShare]:
        """Return the step's share of each source by name; empty if there is only one source."""
        names, ends = self._dataset.names, self._dataset.ends
        if len(ends) == 1:
            return {}
        source = np.searchsorted(ends, sample.ids, side="right")
        lengths = self._dataset.lengths[sample.ids]
        tokens = np.bincount(source, weights=lengths, minlength=len(ends)).astype(np.int64).tolist()
        examples = np.bincount(source, minlength=len(ends)).tolist()
        epochs = (sample.taken / np.maximum(1, self._dataset.sizes)).tolist()
        shares = map(SourceShare, examples, tokens, epochs)
        return dict(zip(names, shares, strict=True))


def evaluation(
    dataset: Dataset, batch: BatchSizes, data_rank: int, pad_id: int
) -> tuple[Sequence[MicroBatch], Mapping[str, int]]:
    """Return this rank's micro-batches of a held-out set, divided like one step, and the global counts."""
    ids = np.arange(len(dataset))
    return micro_batches_of(dataset, ids, batch, data_rank, pad_id), dataset.count(ids)


def micro_batches_of(
    dataset: Dataset, ids: NDArray[np.int64], batch: BatchSizes, data_rank: int, pad_id: int
) -> Sequence[MicroBatch]:
    """Return the micro-batches of one rank, divided like one step, each built on access."""
    assigned = assign(dataset, ids, batch, data_rank)
    return LazyMicroBatches(len(assigned), lambda number: _read(dataset, assigned[number], batch, pad_id))


def _read(
    dataset: Dataset, ids: NDArray[np.int64], batch: BatchSizes, pad_id: int, alpha: float | None = None
) -> MicroBatch:
    examples = [dataset[which] for which in ids.tolist()]
    collate = collate_padded if batch.tokens_per_micro_batch is None else collate_packed
    answers = None
    if dataset.whole or dataset.values:
        numbers, values = dataset.rows_of(ids)
        answers = AnswerIds(numbers, dataset.answers, values)
    return replace(collate(examples, pad_id, alpha, answers), ids=tuple(ids.tolist()))


# --- the micro-batch that takes the most memory ----------------------------------------------------------

SEARCH_LIMIT = 1_000_000  # examples of a run up to which all steps are searched for the largest pack: seconds


def longest_micro_batch(
    dataset: Dataset, batch: BatchSizes, pad_id: int, seed: int, total_steps: int
) -> MicroBatch:
    """Return a micro-batch of the largest size that a run has, to measure its peak memory.

    Padded: micro_batch_size rows (twice as many for pairs) of the longest example's length. Since a step's
    examples are sorted by length, the longest one is in a full micro-batch of this shape, unless the step has
    too few examples.

    Packed: the largest pack of all steps; in a run of more than SEARCH_LIMIT examples, an upper bound, made
    of the longest ones.
    """
    budget, size = batch.tokens_per_micro_batch, batch.global_batch_size
    if budget is not None:
        if total_steps * size > SEARCH_LIMIT:
            return _fullest_pack(dataset, batch, budget, pad_id)
        order = Order(dataset, size, seed)
        # A step's packs are assigned by size, so its largest is the first of rank 0.
        packs = (
            assign(dataset, order.step(index).ids, batch, data_rank=0)[0] for index in range(total_steps)
        )
        largest = max(packs, key=lambda members: int(dataset.lengths[members].sum()))
        return _read(dataset, largest, batch, pad_id)
    widest = np.full(min(batch.micro_batch_size, len(dataset)), np.argmax(dataset.widths))
    return _read(dataset, widest, batch, pad_id)


def _fullest_pack(dataset: Dataset, batch: BatchSizes, budget: int, pad_id: int) -> MicroBatch:
    """Return a micro-batch at least as large as any pack. Its number of tokens is the budget or, if that is
    smaller, a rank's share of the longest examples that a step can have, plus the longest one: packs differ
    by no more than that."""
    order = np.argsort(-dataset.lengths, kind="stable")[: batch.global_batch_size]
    ends = np.cumsum(dataset.lengths[order])
    total, longest = int(ends[-1]), int(ends[0])
    tokens = min(budget, total, -(-total // batch.data_parallel) + longest)
    taken = order[: np.searchsorted(ends, tokens) + 1]
    return _read(dataset, taken, batch, pad_id).first(tokens)
