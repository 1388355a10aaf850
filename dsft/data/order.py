"""Which examples a step holds: a pure function of (their number, seed, step), without torch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def examples_of(index: int, count: int, global_batch_size: int, seed: int) -> NDArray[np.int64]:
    """Which of `count` examples step `index` of a run holds, from 0, through any number of epochs."""
    epoch, position = divmod(index, -(-count // global_batch_size))
    start = position * global_batch_size
    return epoch_order(count, seed, epoch)[start : start + global_batch_size]


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
