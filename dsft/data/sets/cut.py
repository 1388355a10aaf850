"""Cut the rows of a source to examples: whole rows, windows of rows, or pieces that join several rows.

Examples are computed from the lengths and target spans of the rows. Tokens are not read, except the first one
of some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import FIELDS, Records, TokenRows
from dsft.data.sets.dataset import Examples, Ids, digest_of
from dsft.data.sets.stream import Stream, best_windows

Mask = NDArray[np.bool_]
OnTooLong = Literal["error", "drop", "truncate", "split", "fill"]
"""How rows over max_length are treated. error: they are dropped, and a run refuses the data; fill, for packed
pretraining: no row is too long, all are concatenated and cut into examples of max_length tokens."""


@dataclass(frozen=True)
class CutOptions:
    """How rows are cut to examples.

    max_length     tokens of an example at most; for a pair, of each of its rows
    bos            the tokenizer's beginning-of-text id, kept in front of a truncated row; None: it has none
    share_prompts  the prompt of a pair is computed once for both answers
    labels         number of labels that the task uses, which are then a part of what identifies the examples
    fields         other fields of rows that the task uses; those that some row has are a part of it, too
    pad_id         as in Examples
    """

    max_length: int
    how: OnTooLong
    bos: int | None
    share_prompts: bool = False
    labels: int = 0
    fields: tuple[str, ...] = ()
    pad_id: int | None = None


@dataclass(frozen=True, eq=False)
class CutRows:
    """The examples that records are cut to, and what became of the records.

    left_out          reason, a field of Ledger -> records left out for it
    noted             "truncated", "split", "without_end", "prompt_cut" -> records that this applies to
    truncated_tokens  number of tokens cut off, including pieces without a target
    """

    examples: Examples
    left_out: Mapping[str, Ids] = field(default_factory=dict)
    noted: Mapping[str, Ids] = field(default_factory=dict)
    truncated_tokens: int = 0


def cut_rows(records: Records, ids: Ids, options: CutOptions) -> CutRows:
    """Cut the records `ids` (k,), ascending and of one row each, to examples of at most `max_length` tokens.
    Each of the rows must have a target."""
    return _CUTS[options.how](records.rows, ids, options)


def _whole(rows: TokenRows, ids: Ids, options: CutOptions) -> CutRows:
    too_long = rows.lengths[ids] > options.max_length
    dropped, ids = ids[too_long], ids[~too_long]
    start = np.broadcast_to(np.int32(0), (len(ids),))  # takes no memory
    examples = _pieces(rows, ids, start, small(rows.lengths[ids]), small(rows.trained[ids]), options, None)
    return CutRows(examples, {"dropped": dropped}, {"without_end": ids[~rows.ended[ids]]})


_AT_ONCE = 100_000  # rows whose windows are computed together: about 50 MB


def _truncated(rows: TokenRows, ids: Ids, options: CutOptions) -> CutRows:
    size, lengths, targets = options.max_length, small(rows.lengths[ids]), small(rows.trained[ids])
    too_long = lengths > size
    if not too_long.any():
        return _whole(rows, ids, options)
    start, headed, ended = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.bool_), rows.ended[ids]
    prompt_cut = headed.copy()
    texts = too_long & (targets == lengths - 1)  # then the first window is a best one
    targets[texts], ended[texts] = size - 1, False
    others = np.flatnonzero(too_long & ~texts)
    for some in np.split(others, range(_AT_ONCE, len(others), _AT_ONCE)):
        start[some], headed[some], targets[some], is_whole, prompt_cut[some] = best_windows(
            rows, ids[some], size, options.bos
        )
        ended[some] &= is_whole
    kept = targets > 0
    noted = {"truncated": too_long, "without_end": ~ended & kept, "prompt_cut": prompt_cut & kept}
    sizes, head = np.minimum(lengths, np.int32(size)), headed[kept] if headed.any() else None
    return CutRows(
        _pieces(rows, ids[kept], start[kept], sizes[kept], targets[kept], options, head),
        {"without_target": ids[~kept]},
        {name: ids[mask] for name, mask in noted.items()},
        int((lengths - sizes).sum(dtype=np.int64)),
    )


def _split(rows: TokenRows, ids: Ids, options: CutOptions) -> CutRows:
    """Split rows into pieces that overlap by one token, so that every target of a row is one exactly once."""
    size, lengths = options.max_length, rows.lengths[ids]
    numbers = small(np.maximum(1, -((1 - lengths) // (size - 1))))
    of_row = np.repeat(np.arange(len(ids), dtype=np.int32), numbers)
    start = _counted(numbers) * np.int32(size - 1)
    sizes = np.minimum(size, small(lengths)[of_row] - start)
    targets = sizes - 1
    if (rows.trained[ids] != lengths - 1).any():  # else every token but the first is a target
        stream = Stream(rows, ids)
        places = stream.firsts[of_row] + start
        targets = small(stream.between(places, places + sizes))
    kept = targets > 0
    return CutRows(
        _pieces(rows, ids[of_row[kept]], start[kept], sizes[kept], targets[kept], options, None),
        noted={"without_end": ids[~rows.ended[ids]], "split": ids[numbers > 1]},
        truncated_tokens=int(sizes[~kept].sum(dtype=np.int64)),
    )


def _filled(rows: TokenRows, ids: Ids, options: CutOptions) -> CutRows:
    """Join all rows and cut them into examples of `max_length` tokens, the last one shorter. No tokens
    repeat."""
    size, stream = options.max_length, Stream(rows, ids)
    firsts, ends = stream.firsts, stream.firsts + stream.lengths
    places = np.arange(0, int(stream.lengths.sum()), size)
    stops = np.minimum(places + size, ends[-1:])
    targets = small(stream.between(places, stops))
    kept = targets > 0
    noted = {"without_end": ids[~rows.ended[ids]], "split": ids[firsts // size != (ends - 1) // size]}
    lost = int((stops - places)[~kept].sum())
    places, stops, targets = places[kept], stops[kept], targets[kept]
    # An example has the rest of its first row, `at`, whole rows, and the beginning of its last one, `to`.
    at, to = (small(np.searchsorted(ends, place, side="right")) for place in (places, stops - 1))
    numbers = to - at + 1
    segments = np.concatenate([np.zeros(1, np.int32), np.cumsum(numbers, dtype=np.int32)])
    row = ids[np.repeat(at, numbers) + _counted(numbers)]
    start = np.zeros(len(row), np.int32)
    start[segments[:-1]] = places - firsts[at]
    length = small(rows.lengths[row]) - start
    length[segments[1:] - 1] -= small(ends[to] - stops)
    own = used_values(rows, ids, options)
    digest = digest_of(rows, ids, small(places - firsts[at]), small(stops - places), None, at, *own)
    return CutRows(
        Examples(rows, row, start, length, None, targets[:, None], digest, segments), {}, noted, lost
    )


def _pieces(
    rows: TokenRows, ids: Ids, start: Ids, length: Ids, targets: Ids, options: CutOptions, headed: Mask | None
) -> Examples:
    """Return examples of one segment each: see `spans_of`."""
    digest = digest_of(rows, ids, start, length, headed, None, *used_values(rows, ids, options))
    return Examples(rows, *spans_of(ids, start, length, headed), targets[:, None], digest)


def used_values(rows: TokenRows, ids: Ids, options: CutOptions) -> list[NDArray[Any]]:
    """Return the numbers of the rows `ids` that the task uses, for `digest_of`: their labels, and each other
    field that one of them has."""
    fields = {name: rows.values[name][ids] for name in options.fields}
    used = [one for name, one in fields.items() if (one != FIELDS[name].missing).any()]
    if options.labels:  # first, in the bytes of earlier versions
        used.insert(0, rows.values["label"][ids].astype(np.min_scalar_type(options.labels - 1)))
    return used


def spans_of(row: Ids, start: Ids, length: Ids, headed: Mask | None) -> tuple[Ids, Ids, Ids, Ids | None]:
    """Return `row`, `start`, `length` and `spans` of Examples whose S segments have `length` tokens of `row`,
    from `start` on, (S,) each. headed: (S,) the row's first token is put in front of them, as one of
    `length`; None: in no segment."""
    if headed is None or not headed.any():
        return row, start, length, None
    numbers = np.int32(1) + headed
    spans = np.concatenate([np.zeros(1, np.int32), np.cumsum(numbers, dtype=np.int32)])
    row, start, length = (np.repeat(column, numbers) for column in (row, start, length - headed))
    start[spans[:-1][headed]], length[spans[:-1][headed]] = 0, 1
    return row, start, length, spans


def _counted(numbers: Ids) -> Ids:
    """Return 0, 1, … for each of the numbers (k,): below the first, then below the second, …"""
    ends = np.cumsum(numbers, dtype=np.int32)
    counted: Ids = np.arange(numbers.sum(), dtype=np.int32) - np.repeat(ends - numbers, numbers)
    return counted


def small(numbers: NDArray[np.int64]) -> Ids:
    return numbers.astype(np.int32)


_CUTS: Mapping[OnTooLong, Callable[[TokenRows, Ids, CutOptions], CutRows]] = {
    "error": _whole, "drop": _whole, "truncate": _truncated, "split": _split, "fill": _filled,
}  # fmt: skip
