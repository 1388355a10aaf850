"""Cut the rows of a Selection to examples: whole rows, windows of rows, or pieces that span several rows.

Examples are an index of a few numbers each, computed from the lengths and target spans of the rows. Tokens
are not read, except the first one of some rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Rendered, TokenRows
from dsft.data.sets.dataset import Example
from dsft.data.sets.selection import CutOptions, Ids, PairRows, Selection, small

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowExamples:
    """The m examples that are cut from a source's rows.

    name           the source's name in metrics
    rows           all rows of the source
    ids            (m,) the row of each example; if examples span rows, (k,) all their rows in order
    begin          (m,) index of the row's token at which an example begins
    lengths        (m,) tokens of each example
    target_counts  (m,) targets of each example
    headed         (m,) the row's first token (bos) is put before the token at `begin`; None: in no example
    at             (m,) if examples span rows: the position in `ids` of the row where an example begins
    """

    name: str | None
    rows: TokenRows
    ids: Ids
    begin: Ids
    lengths: Ids
    target_counts: Ids
    headed: NDArray[np.bool_] | None = None
    at: Ids | None = None

    @property
    def widths(self) -> Ids:
        return self.lengths

    @property
    def squares(self) -> NDArray[np.int64]:
        return self.lengths.astype(np.int64) ** 2

    @property
    def counts(self) -> Mapping[str, Ids]:
        return {"tokens": self.target_counts, "sequences": self._segment_counts}

    @cached_property
    def _segment_counts(self) -> Ids:
        """(m,) number of segments of each example."""
        if self.at is None:
            return np.broadcast_to(np.int32(1), (len(self.lengths),))  # takes no memory
        lengths = self.rows.lengths[self.ids]
        ends = np.cumsum(lengths, dtype=np.int64)
        last = ends[self.at] - lengths[self.at] + self.begin + self.lengths - 1
        return small(np.searchsorted(ends, last, side="right") - self.at + 1)

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.rows.digest.encode())
        for numbers in (self.ids, self.begin, self.lengths, self.headed, self.at):
            digest.update(b"|")
            if numbers is not None:
                digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    @property
    def row_ids(self) -> Ids:
        return self.ids if self.at is None else self.ids[self.at]

    @property
    def lost(self) -> Places:
        lost: Places = self.rows.lengths[self.row_ids] - self.lengths
        return lost if self.at is None else np.zeros_like(lost)

    def extent(self, index: int) -> str:
        begin, length, whole = int(self.begin[index]), int(self.lengths[index]), self.rows.lengths
        if self.at is not None:
            return f"begins at token {begin:,} of {self.source(index)}" if begin else ""
        if length == whole[self.ids[index]]:
            return ""
        first = "token 0 and those " if self.headed is not None and self.headed[index] else ""
        return f"{length:,} of {whole[self.ids[index]]:,} tokens kept, {first}from token {begin:,} on"

    def _row(self, index: int) -> int:
        return int(self.ids[index if self.at is None else self.at[index]])

    def source(self, index: int) -> str:
        return self.rows.source(self._row(index))

    def example(self, index: int) -> Example:
        """Return an example, reading its tokens. If it spans rows, each row's part is a segment. The first
        token of each part is no target."""
        row, begin, left = self._row(index), int(self.begin[index]), int(self.lengths[index])
        if self.headed is not None and self.headed[index]:
            read, body = self.rows.read(row), slice(begin, begin + left - 1)
            ids = np.concatenate([read.input_ids[:1], read.input_ids[body]])
            trained = np.concatenate([[False], read.trained[body]])  # a best window begins untrained
            return Example(ids, trained, self.rows.source(row))
        parts, at = list[Rendered](), index if self.at is None else int(self.at[index])
        while left:
            parts.append(_read(self.rows, int(self.ids[at]), begin, left))
            at, begin, left = at + 1, 0, left - len(parts[-1].input_ids)
        ids = np.concatenate([part.input_ids for part in parts])
        trained = np.concatenate([part.trained for part in parts])
        segments = None if self.at is None else tuple(len(part.input_ids) for part in parts)
        return Example(ids, trained, self.rows.source(row), segments)


def _read(source: TokenRows, row: int, begin: int, length: int) -> Rendered:
    """Return up to `length` tokens of a row from `begin` on, the first of them masked."""
    stop = min(begin + length, int(source.lengths[row]))
    part = source.read_part(row, begin, stop) if stop - begin < source.lengths[row] else source.read(row)
    trained = part.trained.copy()
    trained[:1] = False
    return Rendered(part.input_ids, trained, part.ended)


_AT_ONCE = 100_000  # rows whose windows are computed together: about 50 MB


def cut_rows(selection: Selection, options: CutOptions) -> Selection:
    """Return the selection with its rows cut to examples of at most `max_length` tokens. Each of the rows
    must have a target."""
    source, rows, size = selection.rows, selection.row_ids, options.max_length
    assert not isinstance(source, PairRows)
    lengths = source.lengths[rows]
    too_long = lengths > size
    if options.how == "fill":
        return _filled(selection, source, size)
    if options.how == "split":
        return _split(selection, source, lengths, size)
    if options.how == "truncate" and too_long.any():
        return _truncated(selection, source, too_long, options)
    dropped, rows = rows[too_long], rows[~too_long]  # with `truncate` none is too long
    return replace(
        selection,
        part=_whole(selection.name, source, rows),
        left_out={**selection.left_out, "dropped": dropped},
        noted={**selection.noted, "without_end": rows[~source.ended[rows]]},
    )


def _whole(name: str, source: TokenRows, rows: Ids) -> RowExamples:
    begin = np.broadcast_to(np.int32(0), (len(rows),))  # takes no memory
    return RowExamples(name, source, rows, begin, small(source.lengths[rows]), small(source.trained[rows]))


def _truncated(
    selection: Selection, source: TokenRows, too_long: NDArray[np.bool_], options: CutOptions
) -> Selection:
    name, rows, size = selection.name, selection.row_ids, options.max_length
    whole = _whole(name, source, rows)
    begin, headed, ended = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_), source.ended[rows]
    prompt_cut = headed.copy()
    lost = int(whole.lengths[too_long].sum(dtype=np.int64)) - size * int(np.count_nonzero(too_long))
    texts = too_long & (whole.target_counts == whole.lengths - 1)  # then the first window is a best one
    targets = np.where(texts, np.int32(size - 1), whole.target_counts)
    ended[texts] = False
    others = np.flatnonzero(too_long & ~texts)
    for some in np.split(others, range(_AT_ONCE, len(others), _AT_ONCE)):
        found = _windows(source, rows[some], size, options.bos)
        begin[some], headed[some], targets[some] = found[:3]
        ended[some] &= found[3]
        prompt_cut[some] = found[4]
    lengths = np.minimum(whole.lengths, np.int32(size))
    kept = targets > 0
    part = RowExamples(name, source, rows, begin, lengths, targets, headed if headed.any() else None)
    without = np.concatenate([selection.of("without_target"), rows[~kept]])
    return replace(
        selection,
        part=_take(part, kept),
        left_out={**selection.left_out, "without_target": without},
        noted={
            **selection.noted,
            "truncated": rows[too_long],
            "without_end": rows[~ended & kept],
            "prompt_cut": rows[prompt_cut & kept],
        },
        truncated_tokens=lost,
    )


def _split(selection: Selection, source: TokenRows, lengths: NDArray[np.int64], size: int) -> Selection:
    """Split rows into pieces that overlap by one token, so that every target of a row is one exactly once."""
    rows = selection.row_ids
    numbers = small(np.maximum(1, -((1 - lengths) // (size - 1))))
    of_row = np.repeat(np.arange(len(rows), dtype=np.int32), numbers)
    number = small(np.arange(len(of_row)) - np.repeat(np.cumsum(numbers) - numbers, numbers))
    begin = number * np.int32(size - 1)
    pieces = np.minimum(size, small(lengths)[of_row] - begin)
    targets = pieces - 1
    if (source.trained[rows] != lengths - 1).any():  # else every token but the first is a target
        stream = Stream(source, rows)
        starts = stream.firsts[of_row] + begin
        targets = small(stream.between(starts, starts + pieces))
    part = RowExamples(selection.name, source, rows[of_row], begin, pieces, targets)
    return _with_targets(selection, part, int(np.count_nonzero(numbers > 1)))


def _filled(selection: Selection, source: TokenRows, size: int) -> Selection:
    """Join all rows and cut them into examples of `size` tokens, the last one shorter. No tokens repeat."""
    name, rows, stream = selection.name, selection.row_ids, Stream(source, selection.row_ids)
    ends = stream.firsts + stream.lengths
    total = int(ends[-1]) if len(ends) else 0
    starts = np.arange(0, total, size)
    stops = np.minimum(starts + size, total)
    at = np.searchsorted(ends, starts, side="right")
    begin, lengths = small(starts - stream.firsts[at]), small(stops - starts)
    targets = small(stream.between(starts, stops))
    part = RowExamples(name, source, rows, begin, lengths, targets, at=small(at))
    return _with_targets(selection, part, int(np.count_nonzero(stream.firsts // size != (ends - 1) // size)))


def _with_targets(selection: Selection, part: RowExamples, num_split: int) -> Selection:
    """Leave out the pieces without a target."""
    kept = part.target_counts > 0
    rows = selection.row_ids
    return replace(
        selection,
        part=_take(part, kept),
        noted={**selection.noted, "without_end": rows[~part.rows.ended[rows]]},
        split=num_split,
        truncated_tokens=int(part.lengths[~kept].sum(dtype=np.int64)),
    )


def _take(part: RowExamples, kept: NDArray[np.bool_]) -> RowExamples:
    """Return the examples selected by a mask (m,)."""
    if kept.all():
        return part
    names = ["begin", "lengths", "target_counts", *(["headed"] if part.headed is not None else [])]
    columns: dict[str, Any] = {name: getattr(part, name)[kept] for name in names}
    per_example = "ids" if part.at is None else "at"
    return replace(part, **columns, **{per_example: getattr(part, per_example)[kept]})


# --- targets counted over many rows at once, and the windows of long rows that keep the most of them ------


@dataclass(frozen=True, eq=False)
class Stream:
    """Rows (k,) of a source, concatenated. A place is an index of a token in the concatenation."""

    source: TokenRows
    rows: NDArray[np.int32]

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


def _windows(
    source: TokenRows, rows: NDArray[np.int32], size: int, bos: int | None
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
