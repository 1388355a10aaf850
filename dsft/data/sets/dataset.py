"""The examples of a run, as an index into the stored rows of its sources. Tokens are read on access.

Examples are those of one source, a Dataset those of all; an Example is one of them with its tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows, joined

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Example:
    """One example, or one preference pair.

    input_ids  (T,) int32
    trained    (T,) bool: the mask. Token 0 is never a target
    segments   length of each segment, which attends only to itself: the documents of a joined example (whose
               first tokens are no targets), or the two answers of a pair (chosen, rejected); None: one
               segment
    starts     position id at which each segment begins, as in MicroBatch; None: 0
    scored     the mask marks tokens with a score at their own position; otherwise tokens that are predicted
    """

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    segments: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    scored: bool = False

    @property
    def target_count(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return self.segments or (len(self.input_ids),)

    @property
    def segment_starts(self) -> tuple[int, ...]:
        return self.starts or (0,) * len(self.segment_lengths)


@dataclass(frozen=True, eq=False)
class Examples:
    """The m examples of one source, as spans of its stored rows. An example has k answers: the 2 of a
    preference pair, else 1. An answer is one segment or, if examples join rows, a segment for each of them. A
    segment is one span of a row or several, of one row or of different ones, such as the row's first token
    (bos) and a later span. Segments and spans are in the order of the examples.

    rows       the source's rows
    row        (P,) the row of each span
    start      (P,) the token of its row at which each span starts
    length     (P,) tokens of each span
    spans      (S + 1,) cumulative number of spans of the segments; None: one span per segment
    targets    (m, k) targets of each answer
    digest     sha256 that identifies tokens and masks of the examples: see `digest_of`
    segments   (m + 1,) cumulative number of segments of the examples; None: one segment per answer
    positions  (m, k) position id of the first token of each answer; None: 0. An answer that begins at p > 0
               continues the first p tokens of the answer before it
    prompts    (m,) tokens of each example's prompt; None: the examples are not answers to prompts
    pad_id     the one target of an answer is its last token that is not this one, which has a score; None:
               the targets are tokens that are predicted
    """

    rows: TokenRows
    row: Ids
    start: Ids
    length: Ids
    spans: Ids | None
    targets: Ids
    digest: str
    segments: Ids | None = None
    positions: Ids | None = None
    prompts: Ids | None = None
    pad_id: int | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def sizes(self) -> Ids:
        """(m, k) tokens of each answer."""
        sizes = self.length
        for borders in (self.spans, self.segments):
            if borders is not None:
                sizes = np.add.reduceat(sizes, borders[:-1], dtype=np.int32)
        return sizes.reshape(self.targets.shape)

    @cached_property
    def seen(self) -> Ids:
        """(m, k) tokens of each answer with those that it continues."""
        return self.sizes if self.positions is None else self.sizes + self.positions

    @cached_property
    def lengths(self) -> Ids:
        """(m,) tokens of each example."""
        return joined(np.add, self.sizes)

    @cached_property
    def target_counts(self) -> Ids:
        """(m,) targets of each example."""
        return joined(np.add, self.targets)

    @property
    def widths(self) -> Ids:
        """(m,) tokens of each example's row in a padded batch; for a pair, of its longer row."""
        return joined(np.maximum, self.seen)

    @property
    def squares(self) -> NDArray[np.int64]:
        """(m,) the attention cost of each example: Σ length² over its answers. A shared prompt is computed
        once; the rejected answer only attends to it."""
        return joined(np.add, np.multiply(self.sizes, self.seen, dtype=np.int64))

    @property
    def counts(self) -> Mapping[str, Ids]:
        """The counts that losses are normalized by, name -> (m,) of each example: "examples", "tokens", those
        of the first answer ("chosen_tokens"), and "sequences", of which each segment is one."""
        answers = self.targets.shape[1]
        ones, each = (np.broadcast_to(np.int32(n), (len(self),)) for n in (1, answers))  # take no memory
        sequences = each if self.segments is None else np.diff(self.segments)
        return {
            "examples": ones,
            "tokens": self.target_counts,
            "chosen_tokens": self.targets[:, 0],
            "sequences": sequences,
        }

    @cached_property
    def row_ids(self) -> Ids:
        """(m,) the row in which each example begins."""
        first = slice(None, None, self.targets.shape[1]) if self.segments is None else self.segments[:-1]
        return self._segment_rows[first]

    @property
    def _segment_rows(self) -> Ids:
        return self.row if self.spans is None else self.row[self.spans[:-1]]

    @property
    def lost(self) -> NDArray[np.int64]:
        """(m,) how many more tokens its rows have than each example; 0 if examples join rows."""
        if self.segments is not None:
            return np.zeros(len(self), np.int64)
        return joined(np.add, self.rows.lengths[self._segment_rows].reshape(self.sizes.shape) - self.seen)

    def source(self, index: int) -> str:
        """Return the place where an example begins, "file:line"."""
        return self.rows.source(int(self.row_ids[index]))

    def extent(self, index: int) -> str:
        """Return in words which tokens of its rows an example has; "" if all."""
        segments = self._segments(index)
        begin = f"token {self.start[segments[0][-1]]:,}"
        if self.segments is not None:
            return f"begins at {begin} of {self.source(index)}" if self.start[segments[0][0]] else ""
        rows = self.row[[spans[0] for spans in segments]]
        kept, whole = int(self.seen[index].sum()), int(self.rows.lengths[rows].sum())
        first = "token 0 and those " if len(segments[0]) > 1 else ""
        return f"{kept:,} of {whole:,} tokens kept, {first}from {begin} on" if kept < whole else ""

    def _segments(self, index: int) -> list[range]:
        """Return the spans of each segment of an example."""
        answers = self.targets.shape[1]
        segments = range(answers * index, answers * (index + 1))
        if self.segments is not None:
            segments = range(*self.segments[index : index + 2].tolist())
        if self.spans is None:
            return [range(number, number + 1) for number in segments]
        return [range(*self.spans[number : number + 2].tolist()) for number in segments]

    def read(self, index: int) -> Example:
        """Return an example, reading its tokens. The first token of each span is no target."""
        ids, masks, sizes, firsts, size = list[Ids](), list[NDArray[np.bool_]](), list[int](), list[int](), 0
        for spans in self._segments(index):
            before = size
            for span in spans:
                row, start, length = (int(column[span]) for column in (self.row, self.start, self.length))
                read = self.rows.read(row, start, start + length)
                ids.append(read.input_ids)
                masks.append(read.trained)
                firsts.append(size)
                size += length
            sizes.append(size - before)
        tokens, trained = np.concatenate(ids), np.concatenate(masks)
        trained[firsts] = False
        if self.pad_id is not None:
            trained[:] = False
            for end, length in zip(np.cumsum(sizes), sizes, strict=True):
                padding = int(np.argmax(tokens[end - length : end][::-1] != self.pad_id))
                trained[end - 1 - padding] = True
        segments = None if self.segments is None and len(sizes) == 1 else tuple(sizes)
        positions = None if self.positions is None else tuple(self.positions[index].tolist())
        return Example(tokens, trained, segments, positions, self.pad_id is not None)


def digest_of(rows: TokenRows, *columns: NDArray[Any] | None) -> str:
    """Return a sha256 that identifies examples by their rows and by the numbers that decide which tokens and
    targets of them the examples have. Resumed runs and stored references compare it with that of earlier
    versions, so what a kind of examples passes must stay the same."""
    digest = hashlib.sha256(rows.digest.encode())
    for column in columns:
        digest.update(b"|")
        if column is not None:
            digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """The n examples of all sources, numbered source after source.

    parts    the examples of each source
    weights  the weight of each source; None: an epoch has every example once
    names    the name of each source in metrics; needed if there are several
    whole    whether whole answers are compared
    labels   names of the classes that the loss uses, by their number; (): it uses none
    fields   names of other fields of rows that the loss uses
    """

    parts: tuple[Examples, ...]
    weights: tuple[float, ...] | None = None
    names: tuple[str, ...] = ()
    whole: bool = False
    labels: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Example:
        """Return an example, reading its tokens."""
        part, own = self._place(index)
        return part.read(own)

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def source(self, index: int) -> str:
        """Return the place where an example begins, "file:line", without reading it."""
        part, own = self._place(index)
        return part.source(own)

    def extent(self, index: int) -> str:
        """Return in words which tokens of its row an example has; "" if all."""
        part, own = self._place(index)
        return part.extent(own)

    def _place(self, index: int) -> tuple[Examples, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect_right(self.ends, index)
        return self.parts[which], int(index) - (self.ends[which - 1] if which else 0)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each source."""
        return tuple(len(part) for part in self.parts)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """For each source, the index after its last example."""
        return tuple(np.cumsum(self.sizes).tolist()) or (0,)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """(n,) tokens of each example."""
        return _joined([part.lengths for part in self.parts])

    @cached_property
    def widths(self) -> NDArray[np.int32]:
        """(n,) tokens of each example's row in a padded batch; for a pair, of its longer row."""
        return _joined([part.widths for part in self.parts])

    @cached_property
    def target_counts(self) -> NDArray[np.int32]:
        """(n,) targets of each example."""
        return _joined([part.target_counts for part in self.parts])

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        """(n,) the attention cost of each example."""
        return np.concatenate([np.zeros(0, np.int64), *(part.squares for part in self.parts)])

    @cached_property
    def counts(self) -> Mapping[str, NDArray[np.int32]]:
        """The counts that losses are normalized by, name -> (n,) of each example."""
        names = self.parts[0].counts if self.parts else ()
        counts = {name: _joined([part.counts[name] for part in self.parts]) for name in names}
        return counts

    @property
    def answers(self) -> int:
        """Number of answers of each example: 2 for preference pairs, else 1."""
        return self.parts[0].targets.shape[1] if self.parts else 1

    def count(self, ids: NDArray[np.int64] | None = None) -> Mapping[str, int]:
        """Return the counts that losses are normalized by, of the examples `ids` or of all: those of
        `counts`, and by name the number of examples of each label."""
        chosen = slice(None) if ids is None else ids
        found = {name: int(each[chosen].sum()) for name, each in self.counts.items()}
        if not self.labels:
            return found
        of_labels = np.bincount(self.values["label"][chosen], minlength=len(self.labels)).tolist()
        return dict(zip(self.labels, of_labels, strict=True)) | found

    @cached_property
    def values(self) -> Mapping[str, NDArray[Any]]:
        """The fields of rows that the loss uses, name -> (n,) of the row in which each example begins."""
        names = (*(("label",) if self.labels else ()), *self.fields)
        return {
            name: _joined([part.rows.values[name][part.row_ids] for part in self.parts]) for name in names
        }

    def rows_of(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], Mapping[str, NDArray[Any]]]:
        """Return the example's number, and `values`, of each of the examples `ids`; of each row of those that
        join rows."""
        if not len(ids) or all(part.segments is None for part in self.parts):
            return ids, {name: column[ids] for name, column in self.values.items()}
        joined = [
            (part.rows, part.row[slice(*part.segments[own : own + 2].tolist())])
            for part, own in map(self._place, ids.tolist())
            if part.segments is not None
        ]
        values = {
            name: np.concatenate([rows.values[name][row] for rows, row in joined]) for name in self.values
        }
        return np.repeat(ids, [len(row) for _, row in joined]), values

    @cached_property
    def prompts(self) -> NDArray[np.int32]:
        """(n,) tokens of each example's prompt, where examples are answers to prompts."""
        return _joined([part.prompts for part in self.parts if part.prompts is not None])

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that identifies the tokens and masks of all examples, in order, computed without reading
        them. A resumed run must find it unchanged."""
        return hashlib.sha256("".join(part.digest for part in self.parts).encode()).hexdigest()


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays or [np.zeros(0, np.int32)])
