"""Targets counted over many rows at once, and the windows of long rows that keep the most of them.

Takes the lengths and trained spans of rows. Gives arrays; reads no token but the first of some rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stream:
    """Rows (k,) of a source laid end to end: places count from the first row's first token."""

    source: TokenRows
    rows: NDArray[np.int32]

    @cached_property
    def lengths(self) -> Places:
        return self.source.lengths[self.rows]

    @cached_property
    def firsts(self) -> Places:
        """(k,): the place of each row's first token."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def counts(self) -> Places:
        """(k,): runs of targets of each row."""
        return self._runs[0]

    @cached_property
    def runs(self) -> tuple[Places, Places]:
        """Where each run of targets starts and stops. A row's first token is none."""
        return self._runs[1:]

    @property
    def first_targets(self) -> Places:
        """(k,): the place of each row's first target; each has one."""
        places: Places = self.runs[0][np.cumsum(self.counts) - self.counts]
        return places

    @cached_property
    def _runs(self) -> tuple[Places, Places, Places]:
        if (self.source.trained[self.rows] == self.lengths - 1).all():
            return np.ones(len(self.rows), np.int64), self.firsts + 1, self.firsts + self.lengths
        counts, spans = self.source.spans_of(self.rows)
        of_row = np.repeat(np.arange(len(self.rows)), counts)
        spans = np.maximum(spans, 1)
        of_row, spans = of_row[spans[:, 1] > 1], spans[spans[:, 1] > 1]
        spans = spans + self.firsts[of_row][:, None]
        return np.bincount(of_row, minlength=len(self.rows)), spans[:, 0], spans[:, 1]

    @cached_property
    def _done(self) -> Places:
        starts, stops = self.runs
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])

    def before(self, places: Places) -> Places:
        """(n,): how many targets stand before each place (n,)."""
        starts, stops = self.runs
        which = np.searchsorted(starts, places, side="right") - 1
        inside = np.minimum(places, stops[which]) - starts[which]
        found: Places = np.where(which < 0, 0, self._done[which] + inside)
        return found

    def between(self, starts: Places, stops: Places) -> Places:
        """(n,): targets of pieces (n,). The first token of a piece is none."""
        return self.before(stops) - self.before(starts + 1)

    def is_inside(self, places: Places) -> NDArray[np.bool_]:
        """(n,): whether a run goes on over the place."""
        starts, stops = self.runs
        which = np.searchsorted(starts, places, side="left") - 1
        found: NDArray[np.bool_] = (which >= 0) & (places < stops[which])
        return found


@dataclass(frozen=True, eq=False)
class Windows:
    """Of rows (k,): each from `begin` on, behind the row's first token if `headed`. ended: the last part that
    is trained on and not cut off whole is there to its end."""

    begin: Places
    headed: NDArray[np.bool_]
    num_targets: Places
    ended: NDArray[np.bool_]


def windows(source: TokenRows, rows: NDArray[np.int32], size: int, bos: int | None) -> Windows:
    """`size` tokens of each of these longer rows; where a row begins with `bos`, this and `size` - 1 more.

    A window begins with the row, or before a run of targets: with all that stands between the run and the
    one before it, or as much of it as fills a quarter of the window, so that no answer stands without a
    question. Of these the one with the most targets, the earliest of equals. What stands first, or behind a
    beginning that it did not stand behind, is no target. Each row has a target."""
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
    ended = ~stream.is_inside(stream.firsts + begin + size - headed)
    return Windows(begin, headed, targets, ended)


def _best(stream: Stream, size: int, low: int) -> tuple[Places, Places]:
    """(k,), (k,): where the best `size` tokens from `low` on begin, the earliest of equals, and their
    targets.

    Before a run the number of targets grows with the begin, so the best is the latest that leaves the run its
    context, and the earliest as good as that is where the window ends with a run, or the gap's first place.
    """
    starts, stops = stream.runs
    of_row = np.cumsum(stream.counts) - stream.counts
    per_run = np.repeat(np.arange(len(stream.rows)), stream.counts)
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
