"""Lengths, steps and padding: takes the lengths of the examples and the batch sizes, gives numbers; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset
from dsft.data.sets.order import Order
from dsft.data.steps.pack import micro_batches_of
from dsft.plan.batch import BatchSizes
from dsft.plan.schedule import total_steps
from dsft.spec.schema import Spec

BINS = 12
LAID = 20_000  # examples that are dealt to the ranks to tell the padding: about a second


@dataclass(frozen=True)
class Lengths:
    """In tokens; a percentile is a length that occurs. bins: (from, up to and with, examples)."""

    p50: int
    p95: int
    p99: int
    longest: int
    mean: float
    max_length: int
    bins: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Steps:
    """per_epoch and total: optimizer steps; mean_tokens and most_tokens: of a step; of_steps: the first steps
    of an epoch, by which tokens and padding are told.

    padding  way -> share of the micro-batches' places that hold no token
    idle     way -> the same with the places that a rank waits for, while another has more of them
    """

    per_epoch: int
    total: int
    mean_tokens: float
    most_tokens: int
    padding: Mapping[str, float]
    idle: Mapping[str, float]
    of_steps: int


def lengths_of(lengths: NDArray[np.integer], max_length: int) -> Lengths:
    """lengths (n,), of at least one example."""
    p50, p95, p99 = np.percentile(lengths, [50, 95, 99], method="inverted_cdf").tolist()
    longest = int(lengths.max())
    width = max(1, -(-longest // BINS))
    counts = np.bincount((lengths - 1) // width).tolist()
    bins = tuple((i * width + 1, (i + 1) * width, count) for i, count in enumerate(counts))
    return Lengths(int(p50), int(p95), int(p99), longest, float(lengths.mean()), max_length, bins)


def steps_of(data: Dataset, spec: Spec, batch: BatchSizes) -> Steps:
    """Of a dataset with examples. Pairs are told of as they are laid, and in no other way: where they share
    their prompts, they have other tokens padded."""
    order = Order(data, batch.global_batch_size, spec.train.seed)
    dealt = max(1, LAID // (batch.global_batch_size * batch.data_parallel))
    steps = [order.step(index).ids for index in range(min(order.steps_per_epoch, dealt))]
    sums = [int(data.lengths[step].sum(dtype=np.int64)) for step in steps]
    longest = batch.micro_batch_size * spec.longest_example
    packed = replace(batch, tokens_per_micro_batch=batch.tokens_per_micro_batch or longest)
    ways = {"padded": replace(batch, tokens_per_micro_batch=None), "packed": packed}
    if data.is_pairs:
        ways = {"padded" if batch.tokens_per_micro_batch is None else "packed": batch}
    laid = {way: _laid(data, steps, sizes) for way, sizes in ways.items()}
    return Steps(
        per_epoch=order.steps_per_epoch,
        total=total_steps(spec.train, len(data), batch.global_batch_size),
        mean_tokens=sum(sums) / len(sums),
        most_tokens=max(sums),
        padding={way: 1 - sum(sums) / places for way, (places, _) in laid.items()},
        idle={way: 1 - sum(sums) / places for way, (_, places) in laid.items()},
        of_steps=len(steps),
    )


def _laid(data: Dataset, steps: Sequence[NDArray[np.int64]], batch: BatchSizes) -> tuple[int, int]:
    """Places of all ranks' micro-batches: those that are there, and those where all ranks had the largest."""
    there = waited = 0
    packed, rows_each = batch.tokens_per_micro_batch is not None, 2 if data.is_pairs else 1
    for step in steps:
        lengths = (data.lengths if packed else data.widths)[step].astype(np.int64)
        ranks = [
            [
                int(lengths[hand].sum()) if packed else rows_each * len(hand) * _widest(lengths[hand])
                for hand in micro_batches_of(lengths, batch, rank)
            ]
            for rank in range(batch.data_parallel)
        ]
        there += sum(map(sum, ranks))
        waited += sum(max(together) for together in zip(*ranks, strict=True)) * batch.data_parallel
    return there, waited


def _widest(lengths: NDArray[np.int64]) -> int:
    return int(lengths.max(initial=0))
