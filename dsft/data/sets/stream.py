"""Count the targets of many rows at once, and find the windows of long rows that keep the most of them.

No tokens are read, except the first one of some rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows
from dsft.data.sets.dataset import Ids

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stream:
    """Rows (k,) of a source, concatenated. A place is an index of a token in the concatenation."""

    source: TokenRows
    rows: Ids

    @cached_property
    def lengths(self) -> Places:
        return self.source.lengths[self.rows]

    @cached_property
    def firsts(self) -> Places:
        """(k,) the place of each row's first token."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def first_targets(self) -> Places:
        """(k,) the place of each row's first target. Every row must have one."""
        counts, starts, _ = self.runs
        places: Places = starts[np.cumsum(counts) - counts]
        return places

    @cached_property
    def runs(self) -> tuple[Places, Places, Places]:
        """(k,) the number of runs of targets of each row, and the places at which each run starts and stops.
        A row's first token is no target."""
        if (self.source.trained[self.rows] == self.lengths - 1).all():
            return np.ones(len(self.rows), np.int64), self.firsts + 1, self.firsts + self.lengths
        counts, spans = self.source.spans(self.rows)
        of_row = np.repeat(np.arange(len(self.rows)), counts)
        spans = np.maximum(spans, 1)
        of_row, spans = of_row[spans[:, 1] > 1], spans[spans[:, 1] > 1]
        spans = spans + self.firsts[of_row][:, None]
        return np.bincount(of_row, minlength=len(self.rows)), spans[:, 0], spans[:, 1]

    @cached_property
    def _done(self) -> Places:
        _, starts, stops = self.runs
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])

    def before(self, places: Places) -> Places:
        """Return the number of targets before each place (n,), (n,)."""
        _, starts, stops = self.runs
        which = np.searchsorted(starts, places, side="right") - 1
        inside = np.minimum(places, stops[which]) - starts[which]
        found: Places = np.where(which < 0, 0, self._done[which] + inside)
        return found

    def between(self, starts: Places, stops: Places) -> Places:
        """Return the number of targets of each piece (n,), (n,). The first token of a piece is no target."""
        return self.before(stops) - self.before(starts + 1)

    def is_inside(self, places: Places) -> NDArray[np.bool_]:
        """Return a mask (n,): whether a run of targets continues across each place."""
        _, starts, stops = self.runs
        which = np.searchsorted(starts, places, side="left") - 1
        found: NDArray[np.bool_] = (which >= 0) & (places < stops[which])
        return found

    def is_stop(self, places: Places) -> NDArray[np.bool_]:
        """Return a mask (n,): whether a run of targets stops at each place."""
        return np.isin(places, self.runs[2])


def best_windows(
    source: TokenRows, rows: Ids, size: int, bos: int | None
) -> tuple[Places, NDArray[np.bool_], Places, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the best window of `size` tokens of each of the rows (k,), which are longer than that: the token
    at which it begins; whether the row's first token is put in front; its number of targets; whether it does
    not end within a run of targets; and whether it begins within a prompt. If a row begins with `bos`, a
    window that begins later keeps it in front and has `size` - 1 more tokens.

    A window begins at the start of the row, or before a run of targets, with the context between that run and
    the previous one, or with as much of it as fills a quarter of the window, so that no answer is without its
    question. The best window has the most targets; of equals, the earliest. The first token of a window, and
    the one after a `bos` put in front of it, are no targets. Every row must have a target."""
    stream = Stream(source, rows)
    begin, targets = _best(stream, size, 0)
    headed = np.zeros(len(rows), np.bool_)
    late = np.zeros(0, np.int64) if bos is None else np.flatnonzero(source.first_tokens(rows) == bos)
    if len(late):
        of_late = Stream(source, rows[late])
        begin[late], targets[late] = _best(of_late, size - 1, 1)
        at_start = of_late.between(of_late.firsts, of_late.firsts + size)
        headed[late] = targets[late] > at_start
        stay = late[~headed[late]]
        begin[stay], targets[stay] = 0, at_start[~headed[late]]
    is_whole = ~stream.is_inside(stream.firsts + begin + size - headed)
    return begin, headed, targets, is_whole, (begin > headed) & ~stream.is_stop(stream.firsts + begin)


def _best(stream: Stream, size: int, low: int) -> tuple[Places, Places]:
    """Return the begin, (k,), of each row's best window of `size` tokens that begins at `low` or later, the
    earliest of equals, and its number of targets, (k,).

    In the gap before a run, the number of targets grows with the begin. So the best begin is the latest that
    leaves the run its context, and the earliest one as good is where the window ends with the end of a run,
    or the gap's first place.
    """
    counts, starts, stops = stream.runs
    of_row = np.cumsum(counts) - counts
    per_run = np.repeat(np.arange(len(stream.rows)), counts)
    first, high = stream.firsts[per_run], (stream.lengths - size)[per_run]
    gaps = np.concatenate([starts[:1], stops[:-1]])
    gaps[of_row] = stream.firsts + low
    latest = starts - np.minimum(starts - gaps, max(1, size // 4))
    begins = np.stack([gaps, latest, stops - size], axis=1) - first[:, None]
    begins = np.clip(begins, low, high[:, None])
    places = begins + first[:, None]
    following = np.minimum(np.searchsorted(starts, places), len(starts) - 1)
    is_allowed = (gaps[following] <= places) & (places <= latest[following])
    targets = stream.between(places.ravel(), places.ravel() + size).reshape(begins.shape)
    found = np.where(is_allowed, targets, -1)
    at_low = stream.between(stream.firsts + low, stream.firsts + low + size)
    best = np.maximum(np.maximum.reduceat(found.max(axis=1), of_row), at_low)
    is_best = found == best[per_run][:, None]
    earliest = np.minimum.reduceat(np.where(is_best, begins, np.iinfo(np.int64).max).min(axis=1), of_row)
    return np.where(at_low == best, low, earliest), best
