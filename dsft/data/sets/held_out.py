"""Which rows stand where by what they say: those held out, and those that say what another one says.

Takes the 64-bit hashes of rows' contents; pure. A row's place hangs on its own hash, so a duplicate never
stands on both sides, and rows that are added move none that were there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def held_out_below(pool: Hashes, fraction: float | None, count: int | None) -> int:
    """The hash, up to 2^64, below which a row of the `pool` (n,) is held out: so that `fraction` of all that
    rows can say is, or `count` rows are, with those that say the same as the last of them."""
    if fraction is not None:
        return int(fraction * 2**64)
    if count is None or not len(pool):
        return 0
    last = min(count, len(pool)) - 1
    return int(np.partition(pool, last)[last]) + 1


def is_below(content: Hashes, border: int) -> NDArray[np.bool_]:
    if border >= 2**64:
        return np.ones(len(content), np.bool_)
    return content < np.uint64(border)


def is_duplicate(content: Hashes) -> NDArray[np.bool_]:
    """(n,): an earlier row says the same."""
    found = np.zeros(len(content), np.bool_)
    ordered = np.sort(content)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    rows = np.flatnonzero(_is_one_of(content, twice))
    _, first = np.unique(content[rows], return_index=True)
    found[np.delete(rows, first)] = True
    return found


def also_in(content: Hashes, others: Sequence[Hashes]) -> NDArray[np.bool_]:
    """(n,): a row of the `others` says the same. Those may be many more than `content`."""
    known = np.unique(content)
    found = [other[_is_one_of(other, known)] for other in others]
    return _is_one_of(content, np.unique(np.concatenate([*found, np.zeros(0, np.uint64)])))


def _is_one_of(content: Hashes, ordered: Hashes) -> NDArray[np.bool_]:
    """(n,): stands in `ordered` (m,), sorted; quick where that is short."""
    if not len(ordered):
        return np.zeros(len(content), np.bool_)
    at = np.minimum(np.searchsorted(ordered, content), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[at] == content
    return found
