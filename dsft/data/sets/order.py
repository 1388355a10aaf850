"""Choose the examples of each step: a pure function of (sizes and weights of the sources, seed, step),
without torch.

An epoch of the mixture has as many slots as there are examples, in shuffled order. Without weights, slot i is
example i. With weights, each source has its share of the slots; over the run, the n-th slot of a source takes
the n-th example of that source's own sequence, which repeats its examples in shuffled epochs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepSample:
    """The examples of a step.

    ids    (b,) in order
    taken  (s,) examples of each source that the run has taken after this step
    epoch  epochs of the mixture after this step
    """

    ids: Ids
    taken: Ids
    epoch: float


class Order:
    """The examples of every step of a run, by random access."""

    def __init__(self, data: Dataset, global_batch_size: int, seed: int) -> None:
        self._sizes, self._size, self._seed = np.array(data.sizes, dtype=np.int64), global_batch_size, seed
        self.slots = quotas(data.sizes, data.weights)
        self._mixes = data.weights is not None
        self._count = sum(self.slots)
        self._ends, self._firsts = np.cumsum(self.slots), np.cumsum(self._sizes) - self._sizes
        self._after = (0, 0, np.zeros(len(self.slots), dtype=np.int64))
        self.steps_per_epoch = -(-self._count // global_batch_size)

    def step(self, index: int) -> StepSample:
        """Return the examples of step `index` of the run, from 0, over any number of epochs."""
        epoch, position = divmod(index, self.steps_per_epoch)
        start, stop = position * self._size, min((position + 1) * self._size, self._count)
        slots = epoch_order(self._count, self._seed, epoch)[start:stop].astype(np.int64)
        source = np.searchsorted(self._ends, slots, side="right")
        before = self._taken(epoch, start) + epoch * np.array(self.slots)
        here = np.bincount(source, minlength=len(self.slots))
        self._after = (epoch, stop, before - epoch * np.array(self.slots) + here)
        ids = self._mixed(source, before) if self._mixes else slots
        return StepSample(ids, before + here, epoch + stop / self._count)

    def _taken(self, epoch: int, slots: int) -> Ids:
        """Return how many of the first `slots` slots of an epoch belong to each source, (s,). For consecutive
        steps the counts of the previous step are reused."""
        done_epoch, done, counts = self._after
        if slots == 0:
            return np.zeros(len(self.slots), dtype=np.int64)
        if (done_epoch, done) != (epoch, slots):
            order = epoch_order(self._count, self._seed, epoch)[:slots]
            counts = np.bincount(np.searchsorted(self._ends, order, side="right"), minlength=len(self.slots))
        return counts

    def _mixed(self, source: Ids, before: Ids) -> Ids:
        ids = np.zeros(len(source), dtype=np.int64)
        for which in np.unique(source):
            at = np.flatnonzero(source == which)
            own_epochs, places = np.divmod(before[which] + np.arange(len(at)), self._sizes[which])
            for own in np.unique(own_epochs):
                order = epoch_order(int(self._sizes[which]), _source_seed(self._seed, int(which)), int(own))
                ids[at[own_epochs == own]] = self._firsts[which] + order[places[own_epochs == own]]
        return ids


def quotas(sizes: Sequence[int], weights: Sequence[float] | None) -> tuple[int, ...]:
    """Return the number of slots of each source in an epoch, by weight, the largest remainders rounded up,
    of equal ones the first. Their sum is the number of examples. In fractions: Python 3.12 rounds a sum of
    floats in another way than 3.11."""
    if weights is None:
        return tuple(sizes)
    parts = [Fraction(str(weight) if size else 0) for weight, size in zip(weights, sizes, strict=True)]
    whole, total = sum(sizes), sum(parts)
    exact = [part / total * whole for part in parts]
    given = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (given[i] - exact[i], i))
    for i in by_remainder[: whole - sum(given)]:
        given[i] += 1
    return tuple(given)


def shares_text(data: Dataset) -> Iterator[str]:
    """Yield a sentence per source on how often an epoch repeats it; nothing without weights or examples."""
    if data.weights is None or not sum(data.sizes):
        return
    slots = quotas(data.sizes, data.weights)
    for name, size, weight, taken in zip(data.names, data.sizes, data.weights, slots, strict=True):
        share = weight / sum(data.weights)
        times = taken / size if size else 0
        yield (
            f"{name}: {size:,} examples, weight {share:.3g}: {taken:,} examples per epoch, "
            f"{times:.3g} times each"
        )


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """Return a permutation of range(count), (count,), that does not depend on any library's version.

    The examples are sorted by a hash of (seed, epoch, index); the sort is stable.
    """
    latest = _latest(count, seed)
    if epoch not in latest:
        order = _sorted_by_hash(count, seed, epoch)
        while len(latest) > 1:  # keep two: a step may span two epochs, and a thread prefetches the next step
            latest.pop(next(iter(latest)), None)
        latest[epoch] = order
        return order
    return latest[epoch]


@lru_cache(maxsize=64)
def _latest(count: int, seed: int) -> dict[int, NDArray[np.int32]]:
    """Return the mutable cache of the last two epochs' orders: epoch -> order."""
    return {}


def _sorted_by_hash(count: int, seed: int, epoch: int) -> NDArray[np.int32]:
    key: NDArray[np.uint64] = _splitmix64(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(epoch)
    number: NDArray[np.uint64] = np.arange(count, dtype=np.uint64)
    key = _splitmix64(key) + number
    for start in range(0, count, _CHUNK):  # in place, so that temporary arrays stay small
        key[start : start + _CHUNK] = _splitmix64(key[start : start + _CHUNK])
    order = np.argsort(key, kind="stable").astype(np.int32)
    order.flags.writeable = False  # shared by all callers
    return order


_CHUNK = 1 << 16


def _source_seed(seed: int, source: int) -> int:
    """Return a seed for one source, so that sources of equal size have different orders."""
    return int(_splitmix64(np.array([(seed + source + 1) % 2**64], dtype=np.uint64))[0])


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output of the SplitMix64 generator (Steele, Lea and Flood 2014) for each state, mod 2^64."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
