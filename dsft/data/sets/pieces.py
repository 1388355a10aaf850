"""Which tokens of which rows make an example: whole rows, windows of them, or pieces that go over rows.

Takes the lengths and trained spans of a source's rows. Gives an index of a few numbers an example, made
without reading a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Rendered, TokenRows
from dsft.data.sets.windows import Stream, windows

OnTooLong = Literal["error", "drop", "truncate", "split", "fill"]
"""What becomes of rows over max_length. fill, for packed pretraining: no row is too long, all are laid one
after the other into examples of exactly max_length tokens."""

Ids = NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Pieces:
    """m examples cut from rows.

    rows           which of the source's rows; (m,) the row of each example, or, where they go on over the
                   ends of rows, (k,) all rows in order
    begin          (m,) the token of the row with which an example begins
    lengths        (m,) tokens
    target_counts  (m,) targets
    headed         (m,) the row's first token stands before `begin`; None: nowhere
    at             (m,) the position in `rows` of the row where an example begins, where they go on over ends
    """

    rows: Ids
    begin: Ids
    lengths: Ids
    target_counts: Ids
    headed: NDArray[np.bool_] | None = None
    at: Ids | None = None

    def take(self, kept: NDArray[np.bool_]) -> Pieces:
        """The examples of a mask (m,)."""
        if kept.all():
            return self
        return Pieces(
            self.rows[kept] if self.at is None else self.rows,
            self.begin[kept],
            self.lengths[kept],
            self.target_counts[kept],
            None if self.headed is None else self.headed[kept],
            None if self.at is None else self.at[kept],
        )

    def row_of(self, example: int) -> int:
        """The source's row in which it begins."""
        return int(self.rows[example if self.at is None else self.at[example]])

    def read(self, source: TokenRows, example: int) -> tuple[Rendered, int, tuple[int, ...] | None]:
        """Its tokens, the row in which it begins, and the tokens of each row's part where they go over ends.
        No part's first token is trained."""
        begin, length = int(self.begin[example]), int(self.lengths[example])
        if self.at is not None:
            return self._over_ends(source, int(self.at[example]), begin, length)
        which = int(self.rows[example])
        if self.headed is not None and self.headed[example]:
            row, body = source.read(which), slice(begin, begin + length - 1)
            ids = np.concatenate([row.input_ids[:1], row.input_ids[body]])
            trained = np.concatenate([[False], row.trained[body]])  # a best window begins with none trained
        else:
            row = _part(source, which, begin, length)
            ids, trained = row.input_ids, row.trained
        return Rendered(ids, trained, row.ended), which, None

    def _over_ends(
        self, source: TokenRows, at: int, begin: int, length: int
    ) -> tuple[Rendered, int, tuple[int, ...]]:
        parts, which, left = [], int(self.rows[at]), length
        while left:
            row = _part(source, int(self.rows[at]), begin, left)
            parts.append((row.input_ids, row.trained))
            at, begin, left = at + 1, 0, left - len(row.input_ids)
        ids, trained = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Rendered(ids, trained), which, tuple(len(part) for part, _ in parts)


def _part(source: TokenRows, row: int, begin: int, length: int) -> Rendered:
    """Up to `length` tokens of the row; the first one is not trained."""
    stop = min(begin + length, int(source.lengths[row]))
    part = source.read_part(row, begin, stop) if stop - begin < source.lengths[row] else source.read(row)
    trained = part.trained.copy()
    trained[:1] = False
    return Rendered(part.input_ids, trained, part.ended)


@dataclass(frozen=True, eq=False)
class Cut(Generic[T]):
    """The pieces (Pieces, or of pairs PairPieces), and what became of rows, which are told by their numbers.

    dropped         longer than max_length, left out
    truncated       of which a window is kept, or would be if it had a target
    unended         kept, without the end of the turn (or text) that they end with
    without_target  left out, because nothing of what is kept is trained on
    num_split       rows of which several examples have a part
    truncated_tokens  cut off, and those of pieces in which nothing is trained on
    identical       pairs left out, because both answers are cut to the same tokens
    """

    pieces: T
    dropped: Ids
    truncated: Ids
    unended: Ids
    without_target: Ids
    num_split: int = 0
    truncated_tokens: int = 0
    identical: Ids = field(default_factory=lambda: NONE)


NONE: Ids = np.zeros(0, dtype=np.int32)
_AT_ONCE = 100_000  # rows whose windows are looked for together: about 50 MB


def cut(source: TokenRows, rows: Ids, max_length: int, how: OnTooLong, bos: int | None) -> Cut[Pieces]:
    """`rows` (k,) of the source, each with a target, as examples of at most `max_length` tokens. `bos`: the
    token that a window keeps in front where its row begins with it. With `error` all rows stay whole."""
    if how == "fill":
        return _filled(source, rows, max_length)
    lengths = source.lengths[rows]
    too_long = lengths > max_length
    if how == "split":
        return _split(source, rows, lengths, max_length)
    if how == "truncate" and too_long.any():
        return _truncated(source, rows, too_long, max_length, bos)
    dropped = NONE
    if how == "drop":
        dropped, rows = rows[too_long], rows[~too_long]
    return Cut(whole(source, rows), dropped, NONE, rows[~source.ended[rows]], NONE)


def whole(source: TokenRows, rows: Ids) -> Pieces:
    return Pieces(rows, _zeros(len(rows)), _small(source.lengths[rows]), _small(source.trained[rows]))


def _truncated(
    source: TokenRows, rows: Ids, too_long: NDArray[np.bool_], max_length: int, bos: int | None
) -> Cut[Pieces]:
    pieces = whole(source, rows)
    begin, headed, ended = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_), source.ended[rows]
    lost = int(pieces.lengths[too_long].sum(dtype=np.int64)) - max_length * int(np.count_nonzero(too_long))
    texts = too_long & (pieces.target_counts == pieces.lengths - 1)  # no window has more than the first
    targets = np.where(texts, np.int32(max_length - 1), pieces.target_counts)
    ended[texts] = False
    others = np.flatnonzero(too_long & ~texts)
    for some in np.split(others, range(_AT_ONCE, len(others), _AT_ONCE)):
        found = windows(source, rows[some], max_length, bos)
        begin[some], headed[some], targets[some] = found.begin, found.headed, found.num_targets
        ended[some] &= found.ended
    lengths = np.minimum(pieces.lengths, np.int32(max_length))
    kept = targets > 0
    made = Pieces(rows, begin, lengths, targets, headed if headed.any() else None)
    return Cut(made.take(kept), NONE, rows[too_long], rows[~ended & kept], rows[~kept], 0, lost)


def _split(source: TokenRows, rows: Ids, lengths: NDArray[np.int64], max_length: int) -> Cut[Pieces]:
    """Pieces that overlap by one token, so that every token but the first is a target exactly once."""
    numbers = _small(np.maximum(1, -((1 - lengths) // (max_length - 1))))
    of_row = np.repeat(np.arange(len(rows), dtype=np.int32), numbers)
    number = _small(np.arange(len(of_row)) - np.repeat(np.cumsum(numbers) - numbers, numbers))
    begin = number * np.int32(max_length - 1)
    pieces = np.minimum(max_length, _small(lengths)[of_row] - begin)
    targets = pieces - 1
    if (source.trained[rows] != lengths - 1).any():  # else all but the first token are targets
        stream = Stream(source, rows)
        starts = stream.firsts[of_row] + begin
        targets = _small(stream.between(starts, starts + pieces))
    made = Pieces(rows[of_row], begin, pieces, targets)
    return _with_targets(made, source, rows, int(np.count_nonzero(numbers > 1)))


def _filled(source: TokenRows, rows: Ids, size: int) -> Cut[Pieces]:
    """Examples of `size` tokens, the last one of what is left, every token once."""
    stream = Stream(source, rows)
    lengths, ends = stream.lengths, stream.firsts + stream.lengths
    total = int(ends[-1]) if len(ends) else 0
    starts = np.arange(0, total, size)
    stops = np.minimum(starts + size, total)
    at = np.searchsorted(ends, starts, side="right")
    begin = starts - (ends - lengths)[at]
    targets = stream.between(starts, stops)
    made = Pieces(rows, _small(begin), _small(stops - starts), _small(targets), at=_small(at))
    num_split = np.count_nonzero((ends - lengths) // size != (ends - 1) // size)
    return _with_targets(made, source, rows, int(num_split))


def _with_targets(pieces: Pieces, source: TokenRows, rows: Ids, num_split: int) -> Cut[Pieces]:
    kept = pieces.target_counts > 0
    lost = int(pieces.lengths[~kept].sum(dtype=np.int64))
    return Cut(pieces.take(kept), NONE, NONE, rows[~source.ended[rows]], NONE, num_split, lost)


def _small(numbers: NDArray[np.int64]) -> Ids:
    return numbers.astype(np.int32)


def _zeros(count: int) -> Ids:
    """(count,) without memory."""
    return np.broadcast_to(np.int32(0), (count,))
