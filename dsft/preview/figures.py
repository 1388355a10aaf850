"""Compute statistics on lengths, steps and padding from the lengths of the examples and the batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset
from dsft.data.sets.order import Order
from dsft.data.steps.pack import assign
from dsft.plan.schedule import total_steps
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Spec

BINS = 12
SAMPLE_SIZE = 20_000  # examples assigned to micro-batches to estimate the padding: about a second


@dataclass(frozen=True)
class LengthStats:
    """Statistics on lengths, in tokens. A percentile is a length that occurs. bins: (first length, last
    length, examples)."""

    p50: int
    p95: int
    p99: int
    longest: int
    mean: float
    max_length: int
    bins: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class StepStats:
    """Statistics on steps.

    per_epoch    number of steps of an epoch
    total        number of steps of the run
    mean_tokens  tokens of a step on average
    most_tokens  tokens of the largest step
    padding      "packed" or "padded" -> share of the micro-batches' positions that are padding
    idle         the same, including the positions for which a rank waits while another has more of them
    of_steps     number of first steps of an epoch that tokens and padding are computed from
    """

    per_epoch: int
    total: int
    mean_tokens: float
    most_tokens: int
    padding: Mapping[str, float]
    idle: Mapping[str, float]
    of_steps: int


def length_stats(lengths: NDArray[np.integer], max_length: int) -> LengthStats:
    """Return the statistics on lengths (n,), n ≥ 1."""
    p50, p95, p99 = np.percentile(lengths, [50, 95, 99], method="inverted_cdf").tolist()
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // BINS)
    counts = np.bincount((lengths - shortest) // width).tolist()
    bins = tuple(
        (shortest + i * width, shortest + (i + 1) * width - 1, count) for i, count in enumerate(counts)
    )
    return LengthStats(int(p50), int(p95), int(p99), longest, float(lengths.mean()), max_length, bins)


def step_stats(data: Dataset, spec: Spec, batch: BatchSizes, most: int = SAMPLE_SIZE) -> StepStats:
    """Return the statistics on the steps of a dataset that has examples, of which about `most` are looked at
    for tokens and padding. They compare packing and padding,
    except for pairs, where only the run's own way is computed: with shared prompts, pairs have other tokens
    if they are padded."""
    order = Order(data, batch.global_batch_size, spec.train.seed)
    num_steps = max(1, most // (batch.global_batch_size * batch.data_parallel))
    steps = [order.step(index).ids for index in range(min(order.steps_per_epoch, num_steps))]
    sums = [int(data.lengths[step].sum(dtype=np.int64)) for step in steps]
    longest = batch.micro_batch_size * spec.longest_example
    packed = replace(batch, tokens_per_micro_batch=batch.tokens_per_micro_batch or longest)
    ways = {"padded": replace(batch, tokens_per_micro_batch=None), "packed": packed}
    if data.answers > 1:
        ways = {"padded" if batch.tokens_per_micro_batch is None else "packed": batch}
    positions = {way: _positions(data, steps, sizes) for way, sizes in ways.items()}
    return StepStats(
        per_epoch=order.steps_per_epoch,
        total=total_steps(spec.train, len(data), batch.global_batch_size),
        mean_tokens=sum(sums) / len(sums),
        most_tokens=max(sums),
        padding={way: 1 - sum(sums) / filled for way, (filled, _) in positions.items()},
        idle={way: 1 - sum(sums) / waited for way, (_, waited) in positions.items()},
        of_steps=len(steps),
    )


def _positions(data: Dataset, steps: Sequence[NDArray[np.int64]], batch: BatchSizes) -> tuple[int, int]:
    """Return the number of positions of all ranks' micro-batches, and the number if all ranks had as many as
    the fullest."""
    filled = waited = 0
    packed, rows_each = batch.tokens_per_micro_batch is not None, data.answers

    def size(members: NDArray[np.int64]) -> int:
        if packed:
            return int(data.lengths[members].sum(dtype=np.int64))
        return rows_each * len(members) * int(data.widths[members].max(initial=0))

    for step in steps:
        ranks = [
            [size(members) for members in assign(data, step, batch, rank)]
            for rank in range(batch.data_parallel)
        ]
        filled += sum(map(sum, ranks))
        waited += sum(max(together) for together in zip(*ranks, strict=True)) * batch.data_parallel
    return filled, waited
