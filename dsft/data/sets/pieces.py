"""Which tokens of which rows make an example: whole rows, windows of them, or pieces that go over rows.

Takes a Selection, and reads the lengths and trained spans of its rows. Gives it with its examples: an index
of a few numbers each, made without reading a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Rendered, TokenRows
from dsft.data.sets.dataset import Example
from dsft.data.sets.selection import NONE, Cutting, Ids, PairRows, Selection
from dsft.data.sets.windows import Stream, windows


@dataclass(frozen=True, eq=False)
class RowPart:
    """The m examples that are cut from a source's rows.

    name           of the source, in metrics
    rows           the source's
    ids            which of its rows; (m,) the row of each example, or, where examples go on over the ends of
                   rows, (k,) all rows in order
    begin          (m,) the token of the row with which an example begins
    lengths        (m,) tokens
    target_counts  (m,) targets
    headed         (m,) the row's first token comes before `begin`; None: of no example
    at             (m,) the position in `ids` of the row where an example begins, where they go on over ends
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
        return {"tokens": self.target_counts}

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.rows.digest.encode())
        for numbers in (self.ids, self.begin, self.lengths, self.headed, self.at):
            digest.update(b"|")
            if numbers is not None:
                digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    def row_of(self, index: int) -> int:
        """The source's row in which an example begins."""
        return int(self.ids[index if self.at is None else self.at[index]])

    def source(self, index: int) -> str:
        return self.rows.source(self.row_of(index))

    def example(self, index: int) -> Example:
        """Reads its tokens. Where it goes over ends its segments are the rows' parts. The first token of each
        part is not trained."""
        row, begin, length = self.row_of(index), int(self.begin[index]), int(self.lengths[index])
        segments = None
        if self.at is not None:
            ids, trained, segments = self._over_ends(int(self.at[index]), begin, length)
        elif self.headed is not None and self.headed[index]:
            read, body = self.rows.read(row), slice(begin, begin + length - 1)
            ids = np.concatenate([read.input_ids[:1], read.input_ids[body]])
            trained = np.concatenate([[False], read.trained[body]])  # a best window begins with none trained
        else:
            found = _read(self.rows, row, begin, length)
            ids, trained = found.input_ids, found.trained
        return Example(ids, trained, self.rows.source(row), segments)

    def _over_ends(
        self, at: int, begin: int, length: int
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], tuple[int, ...]]:
        parts, left = [], length
        while left:
            row = _read(self.rows, int(self.ids[at]), begin, left)
            parts.append((row.input_ids, row.trained))
            at, begin, left = at + 1, 0, left - len(row.input_ids)
        ids, trained = (np.concatenate(part) for part in zip(*parts, strict=True))
        return ids, trained, tuple(len(part) for part, _ in parts)


def _read(source: TokenRows, row: int, begin: int, length: int) -> Rendered:
    """Up to `length` tokens of a row from `begin` on. The first is not trained."""
    stop = min(begin + length, int(source.lengths[row]))
    part = source.read_part(row, begin, stop) if stop - begin < source.lengths[row] else source.read(row)
    trained = part.trained.copy()
    trained[:1] = False
    return Rendered(part.input_ids, trained, part.ended)


_AT_ONCE = 100_000  # rows whose windows are looked for together: about 50 MB


def cut(chosen: Selection, cutting: Cutting) -> Selection:
    """The selection with its chosen rows, each of which has a target, as examples of at most `max_length`
    tokens."""
    source, rows, size = chosen.rows, chosen.chosen, cutting.max_length
    assert not isinstance(source, PairRows)
    lengths = source.lengths[rows]
    too_long = lengths > size
    if cutting.how == "fill":
        return _filled(chosen, source, size)
    if cutting.how == "split":
        return _split(chosen, source, lengths, size)
    if cutting.how == "truncate" and too_long.any():
        return _truncated(chosen, source, too_long, cutting)
    dropped = NONE
    if cutting.how in ("drop", "error"):
        dropped, rows = rows[too_long], rows[~too_long]
    return replace(
        chosen,
        part=_whole(chosen.name, source, rows),
        left_out={**chosen.left_out, "dropped": dropped},
        noted={**chosen.noted, "without_end": rows[~source.ended[rows]]},
    )


def _whole(name: str, source: TokenRows, rows: Ids) -> RowPart:
    begin = np.broadcast_to(np.int32(0), (len(rows),))  # takes no memory
    return RowPart(name, source, rows, begin, _small(source.lengths[rows]), _small(source.trained[rows]))


def _truncated(
    chosen: Selection, source: TokenRows, too_long: NDArray[np.bool_], cutting: Cutting
) -> Selection:
    rows, size = chosen.chosen, cutting.max_length
    whole = _whole(chosen.name, source, rows)
    begin, headed, ended = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_), source.ended[rows]
    lost = int(whole.lengths[too_long].sum(dtype=np.int64)) - size * int(np.count_nonzero(too_long))
    texts = too_long & (whole.target_counts == whole.lengths - 1)  # no window has more than the first
    targets = np.where(texts, np.int32(size - 1), whole.target_counts)
    ended[texts] = False
    others = np.flatnonzero(too_long & ~texts)
    for some in np.split(others, range(_AT_ONCE, len(others), _AT_ONCE)):
        found = windows(source, rows[some], size, cutting.bos)
        begin[some], headed[some], targets[some] = found.begin, found.headed, found.num_targets
        ended[some] &= found.ended
    lengths = np.minimum(whole.lengths, np.int32(size))
    kept = targets > 0
    part = RowPart(chosen.name, source, rows, begin, lengths, targets, headed if headed.any() else None)
    without = np.concatenate([chosen.of("without_target"), rows[~kept]])
    return replace(
        chosen,
        part=_take(part, kept),
        left_out={**chosen.left_out, "without_target": without},
        noted={**chosen.noted, "truncated": rows[too_long], "without_end": rows[~ended & kept]},
        truncated_tokens=lost,
    )


def _split(chosen: Selection, source: TokenRows, lengths: NDArray[np.int64], size: int) -> Selection:
    """Pieces that overlap by one token, so that every token but the first is a target exactly once."""
    rows = chosen.chosen
    numbers = _small(np.maximum(1, -((1 - lengths) // (size - 1))))
    of_row = np.repeat(np.arange(len(rows), dtype=np.int32), numbers)
    number = _small(np.arange(len(of_row)) - np.repeat(np.cumsum(numbers) - numbers, numbers))
    begin = number * np.int32(size - 1)
    pieces = np.minimum(size, _small(lengths)[of_row] - begin)
    targets = pieces - 1
    if (source.trained[rows] != lengths - 1).any():  # else all but the first token are targets
        stream = Stream(source, rows)
        starts = stream.firsts[of_row] + begin
        targets = _small(stream.between(starts, starts + pieces))
    part = RowPart(chosen.name, source, rows[of_row], begin, pieces, targets)
    return _with_targets(chosen, part, int(np.count_nonzero(numbers > 1)))


def _filled(chosen: Selection, source: TokenRows, size: int) -> Selection:
    """Examples of `size` tokens, the last one of what is left, every token once."""
    stream = Stream(source, chosen.chosen)
    lengths, ends = stream.lengths, stream.firsts + stream.lengths
    total = int(ends[-1]) if len(ends) else 0
    starts = np.arange(0, total, size)
    stops = np.minimum(starts + size, total)
    at = np.searchsorted(ends, starts, side="right")
    begin = _small(starts - (ends - lengths)[at])
    targets = _small(stream.between(starts, stops))
    part = RowPart(chosen.name, source, chosen.chosen, begin, _small(stops - starts), targets, at=_small(at))
    return _with_targets(chosen, part, int(np.count_nonzero((ends - lengths) // size != (ends - 1) // size)))


def _with_targets(chosen: Selection, part: RowPart, num_split: int) -> Selection:
    """Leave out the pieces without a target."""
    kept = part.target_counts > 0
    rows = chosen.chosen
    return replace(
        chosen,
        part=_take(part, kept),
        noted={**chosen.noted, "without_end": rows[~part.rows.ended[rows]]},
        split=num_split,
        truncated_tokens=int(part.lengths[~kept].sum(dtype=np.int64)),
    )


def _take(part: RowPart, kept: NDArray[np.bool_]) -> RowPart:
    """The examples of a mask (m,)."""
    if kept.all():
        return part
    return replace(
        part,
        ids=part.ids[kept] if part.at is None else part.ids,
        begin=part.begin[kept],
        lengths=part.lengths[kept],
        target_counts=part.target_counts[kept],
        headed=None if part.headed is None else part.headed[kept],
        at=None if part.at is None else part.at[kept],
    )


def _small(numbers: NDArray[np.int64]) -> Ids:
    return numbers.astype(np.int32)
