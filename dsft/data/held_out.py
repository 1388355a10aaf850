"""Which rows stand where by what they say: those held out, and those that say what another one says.

Takes the 64-bit hashes of rows' contents; pure. A row's place hangs on its own hash, so a duplicate never
stands on both sides, and rows that are added move none that were there.
"""

from __future__ import annotations

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
    order = np.argsort(content, kind="stable")
    ordered = content[order]
    found = np.zeros(len(content), np.bool_)
    found[order[1:]] = ordered[1:] == ordered[:-1]
    return found


def also_in(content: Hashes, other: Hashes) -> NDArray[np.bool_]:
    """(n,): a row of `other` says the same."""
    known = np.sort(other)
    at = np.searchsorted(known, content)
    found = at < len(known)
    found[found] = known[at[found]] == content[found]
    return found
