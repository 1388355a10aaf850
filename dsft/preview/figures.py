"""Lengths, steps and padding: takes the lengths of the examples and the batch sizes, gives numbers; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsft.data.dataset import Dataset
from dsft.data.order import Order
from dsft.data.pack import micro_batches_of
from dsft.plan.batch import BatchSizes
from dsft.plan.schedule import steps_per_epoch, total_steps
from dsft.spec.schema import Data, Train

BINS = 12
LAID = 20_000  # examples whose steps are dealt to tell the padding: about a second


@dataclass(frozen=True)
class Lengths:
    """In tokens. bins: (from, up to and with, examples)."""

    p50: int
    p95: int
    p99: int
    longest: int
    mean: float
    max_length: int
    bins: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Steps:
    """per_epoch and total: optimizer steps; tokens: of a step, on average and at most; of_steps: how many of
    an epoch's steps were dealt to tell the tokens and the padding.

    padding       {"padded": …, "packed": …}: share of a micro-batch's places that hold no token
    with_waiting  the same with the places that a rank waits for, while another has more tokens
    """

    per_epoch: int
    total: int
    mean_tokens: float
    most_tokens: int
    padding: dict[str, float]
    with_waiting: dict[str, float]
    of_steps: int


def lengths_of(lengths: NDArray[np.int32], max_length: int) -> Lengths:
    """Percentiles are lengths that occur: at least so many of the examples are no longer."""
    p50, p95, p99 = np.percentile(lengths, [50, 95, 99], method="inverted_cdf").tolist()
    longest = int(lengths.max())
    width = max(1, -(-longest // BINS))
    counts = np.bincount((lengths - 1) // width, minlength=1).tolist()
    bins = tuple((i * width + 1, (i + 1) * width, count) for i, count in enumerate(counts))
    return Lengths(int(p50), int(p95), int(p99), longest, float(lengths.mean()), max_length, bins)


def steps_of(dataset: Dataset, train: Train, data: Data, batch: BatchSizes) -> Steps:
    """What an epoch would be, told by its first steps where it is long."""
    lengths = dataset.lengths.astype(np.int64)
    count, size = len(lengths), batch.global_batch_size
    per_epoch = steps_per_epoch(count, size)
    looked_at = min(per_epoch, max(1, LAID // (size * batch.data_parallel)))
    order = Order(dataset, size, train.seed)
    steps = [lengths[order.step(index).ids] for index in range(looked_at)]
    tokens = [int(step.sum()) for step in steps]
    budget = batch.tokens_per_micro_batch or max(batch.micro_batch_size * data.max_length, int(lengths.max()))
    ways = {
        "padded": replace(batch, tokens_per_micro_batch=None),
        "packed": replace(batch, tokens_per_micro_batch=budget),
    }
    laid = {way: _laid(steps, sizes) for way, sizes in ways.items()}
    return Steps(
        per_epoch,
        total_steps(train, count, size),
        sum(tokens) / len(tokens),
        max(tokens),
        {way: 1 - sum(tokens) / places for way, (places, _) in laid.items()},
        {way: 1 - sum(tokens) / places for way, (_, places) in laid.items()},
        looked_at,
    )


def _laid(steps: Sequence[NDArray[np.int64]], batch: BatchSizes) -> tuple[int, int]:
    """Places of all ranks' micro-batches: those that are there, and those where all ranks had the largest."""
    there = waited = 0
    for lengths in steps:
        ranks = [
            [_places(lengths[hand], batch) for hand in micro_batches_of(lengths, batch, rank)]
            for rank in range(batch.data_parallel)
        ]
        there += sum(map(sum, ranks))
        waited += sum(max(together) for together in zip(*ranks, strict=True)) * batch.data_parallel
    return there, waited


def _places(lengths: NDArray[np.int64], batch: BatchSizes) -> int:
    if batch.tokens_per_micro_batch is not None:
        return int(lengths.sum())
    return len(lengths) * int(lengths.max(initial=0))
