"""Which examples a step holds, and which of them a rank computes.

Takes a dataset, the batch sizes, a data-parallel rank and a seed. Gives steps of micro-batches. Touches
nothing: a step is a pure function of (data, seed, epoch, step), so any of them can be made at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dsft.data.batch import NO_TARGET, GlobalStep, MicroBatch
from dsft.data.dataset import Dataset, Example
from dsft.data.pack import EMPTY_ROW_LENGTH, lay, noise_scales, pack, targets_of


class BatchSizes(Protocol):
    """What is read of the plan's batch sizes."""

    @property
    def global_batch_size(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def data_parallel(self) -> int: ...
    @property
    def tokens_per_micro_batch(self) -> int | None:
        """The budget of a packed micro-batch; None: rows are padded."""


class TrainSteps:
    """The steps of training, for one data-parallel rank.

    An epoch holds every example once: ceil(examples ÷ global_batch_size) steps, of which the last may be
    shorter. Every rank has the same number of micro-batches in a step.
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
        self._data_rank, self._seed, self._pad_id = data_rank, seed, pad_id
        self.steps_per_epoch = -(-len(dataset) // batch.global_batch_size)

    def step(self, index: int) -> GlobalStep:
        """Step `index` of the run, from 0, through any number of epochs."""
        epoch, position = divmod(index, self.steps_per_epoch)
        size, count = self._batch.global_batch_size, len(self._dataset)
        ids = examples_of(index, count, size, self._seed)
        return GlobalStep(
            micro_batches=_micro_batches(
                self._dataset, ids, self._batch, self._data_rank, self._pad_id, self._neftune_alpha
            ),
            counts=_counts(self._dataset, ids),
            num_tokens=int(self._dataset.lengths[ids].sum()),
            epoch=epoch + min((position + 1) * size, count) / count,
            example_ids=tuple(ids.tolist()),
            squared=int((self._dataset.lengths[ids] ** 2).sum()),
        )


def evaluation(
    dataset: Dataset, batch: BatchSizes, data_rank: int, pad_id: int
) -> tuple[tuple[MicroBatch, ...], Mapping[str, int]]:
    """The whole held-out set, dealt like one step: this rank's micro-batches and the global counts."""
    ids = np.arange(len(dataset))
    return _micro_batches(dataset, ids, batch, data_rank, pad_id), _counts(dataset, ids)


def examples_of(index: int, count: int, global_batch_size: int, seed: int) -> NDArray[np.int64]:
    """Which of `count` examples step `index` of a run holds, from 0, through any number of epochs."""
    epoch, position = divmod(index, -(-count // global_batch_size))
    start = position * global_batch_size
    return epoch_order(count, seed, epoch)[start : start + global_batch_size]


# --- the order of an epoch --------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(count), (count,), the same with every version of every library.

    The examples are sorted by a hash of (seed, epoch, index); equal hashes stay in order.
    """
    key: NDArray[np.uint64] = np.array([seed % 2**64], dtype=np.uint64)
    for number in (np.uint64(epoch), np.arange(count, dtype=np.uint64)):
        key = _splitmix64(key) + number
    order = np.argsort(_splitmix64(key), kind="stable")
    order.flags.writeable = False  # shared by all who ask
    return order


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output of the SplitMix64 generator for each state (Steele, Lea and Flood 2014), modulo 2^64."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# --- dealing ----------------------------------------------------------------------------------------------


def deal(
    lengths: NDArray[np.int64], micro_batch_size: int, data_parallel: int, data_rank: int
) -> list[NDArray[np.int64]]:
    """The positions in a step that each micro-batch of one rank holds; some are empty at the end.

    Longest first, so that the micro-batches that all ranks compute together hold rows of about one length:
    the n-th `data_parallel` × `micro_batch_size` of them make the n-th micro-batch, dealt like cards.
    """
    order = np.argsort(-lengths, kind="stable")
    together = data_parallel * micro_batch_size
    return [order[i : i + together][data_rank::data_parallel] for i in range(0, len(order), together)]


def _micro_batches(
    dataset: Dataset,
    ids: NDArray[np.int64],
    batch: BatchSizes,
    data_rank: int,
    pad_id: int,
    alpha: float | None = None,
) -> tuple[MicroBatch, ...]:
    lengths, budget = dataset.lengths[ids], batch.tokens_per_micro_batch
    if budget is not None:
        packs = pack(lengths, budget, batch.data_parallel, data_rank)
        return tuple(lay([dataset.examples[ids[i]] for i in members], pad_id, alpha) for members in packs)
    hands = deal(lengths, batch.micro_batch_size, batch.data_parallel, data_rank)
    return tuple(collate([dataset.examples[i] for i in ids[hand]], pad_id, alpha) for hand in hands)


def _counts(dataset: Dataset, ids: NDArray[np.int64]) -> Mapping[str, int]:
    return {"tokens": int(dataset.target_counts[ids].sum())}


def collate(examples: Sequence[Example], pad_id: int, neftune_alpha: float | None = None) -> MicroBatch:
    """Rows of the longest example's length, padded on the right; without examples one row without targets.

    neftune_alpha: with the scale of noise on the embeddings, by each segment's own length; 0 on padding."""
    rows = max(1, len(examples))
    length = max((len(example.input_ids) for example in examples), default=EMPTY_ROW_LENGTH)
    input_ids = np.full((rows, length), pad_id, dtype=np.int64)
    targets = np.full((rows, length), NO_TARGET, dtype=np.int64)
    noise_scale = None if neftune_alpha is None else torch.zeros(rows, length)
    for row, example in enumerate(examples):
        n = len(example.input_ids)
        input_ids[row, :n] = example.input_ids
        targets[row, :n] = targets_of(example)
        if noise_scale is not None and neftune_alpha is not None:
            noise_scale[row, :n] = noise_scales(example.segment_lengths, neftune_alpha)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.arange(length).repeat(rows, 1),
        targets=torch.from_numpy(targets),
        noise_scale=noise_scale,
    )
