"""The examples of a run, as an index: which piece of which row each one is. Tokens are read when asked for.

Takes the rows of sources and the pieces that they are cut into. Gives a Dataset.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows
from dsft.data.sets.pieces import Pieces


@dataclass(frozen=True, eq=False)
class Example:
    """input_ids (T,) int32; trained (T,) bool: token t is to be predicted (never so for t = 0, which has
    nothing before it); source "file:line"; segments: tokens of each piece that sees only itself, in a row of
    several documents (whose first tokens are not trained either), or of a preference pair (chosen, rejected);
    starts: the position at which each segment begins, None: 0, as in MicroBatch."""

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    source: str
    segments: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None

    @property
    def target_count(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return self.segments or (len(self.input_ids),)

    @property
    def segment_starts(self) -> tuple[int, ...]:
        return self.starts or (0,) * len(self.segment_lengths)


class Part(Protocol):
    """The examples of one source. name: in metrics."""

    @property
    def name(self) -> str | None: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def widths(self) -> NDArray[np.int32]:
        """(n,) tokens of each example's row where rows are padded; of a pair, of the longer one."""

    @property
    def target_counts(self) -> NDArray[np.int32]: ...
    @property
    def squares(self) -> NDArray[np.int64]:
        """(n,) what the attention of each example grows with: length², of a pair Σ length² of its rows."""

    @property
    def counts(self) -> Mapping[str, NDArray[np.int32]]:
        """What a step counts, by name: (n,) of each example."""

    @property
    def digest(self) -> str:
        """sha256: equal where the examples are."""

    def source(self, index: int) -> str:
        """Where an example begins: "file:line"."""

    def example(self, index: int) -> Example: ...


@dataclass(frozen=True, eq=False)
class RowPart:
    """Pieces of a source's rows."""

    name: str | None
    rows: TokenRows
    pieces: Pieces

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.pieces.lengths

    @property
    def widths(self) -> NDArray[np.int32]:
        return self.lengths

    @property
    def squares(self) -> NDArray[np.int64]:
        return self.lengths.astype(np.int64) ** 2

    @property
    def target_counts(self) -> NDArray[np.int32]:
        return self.pieces.target_counts

    @property
    def counts(self) -> Mapping[str, NDArray[np.int32]]:
        return {"tokens": self.target_counts}

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.rows.digest.encode())
        pieces = self.pieces
        for numbers in (pieces.rows, pieces.begin, pieces.lengths, pieces.headed, pieces.at):
            digest.update(b"|")
            if numbers is not None:
                digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    def source(self, index: int) -> str:
        return self.rows.source(self.pieces.row_of(index))

    def example(self, index: int) -> Example:
        found, row, segments = self.pieces.read(self.rows, index)
        return Example(found.input_ids, found.trained, self.rows.source(row), segments)


@dataclass(frozen=True, eq=False)
class ExamplePart:
    """Examples that are there already. pairs: each is a preference pair."""

    examples: tuple[Example, ...]
    name: str | None = None
    pairs: bool = False

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([len(example.input_ids) for example in self.examples], dtype=np.int32)

    @cached_property
    def widths(self) -> NDArray[np.int32]:
        if not self.pairs:
            return self.lengths
        return np.array([max(example.segment_lengths) for example in self.examples], dtype=np.int32)

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        if not self.pairs:
            return self.lengths.astype(np.int64) ** 2
        segments = [zip(one.segment_lengths, one.segment_starts, strict=True) for one in self.examples]
        return np.array([sum(n * (n + start) for n, start in one) for one in segments], dtype=np.int64)

    @cached_property
    def target_counts(self) -> NDArray[np.int32]:
        return np.array([example.target_count for example in self.examples], dtype=np.int32)

    @cached_property
    def counts(self) -> Mapping[str, NDArray[np.int32]]:
        if not self.pairs:
            return {"tokens": self.target_counts}
        chosen = [np.count_nonzero(one.trained[1 : one.segment_lengths[0]]) for one in self.examples]
        return {
            "pairs": np.ones(len(self.examples), np.int32),
            "chosen_tokens": np.array(chosen, dtype=np.int32),
        }

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for example in self.examples:
            digest.update(example.input_ids.astype("<i4").tobytes())
            digest.update(example.trained.tobytes())
            for numbers in (example.segments, example.starts):
                if numbers is not None:
                    digest.update(np.array(numbers, dtype="<i8").tobytes())
        return digest.hexdigest()

    def source(self, index: int) -> str:
        return self.examples[index].source

    def example(self, index: int) -> Example:
        return self.examples[index]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples by number: those of the first source, then those of the next. weights: of each source, or
    None, where an epoch has every example once."""

    parts: tuple[Part, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def of(cls, examples: Sequence[Example], *, pairs: bool = False) -> Dataset:
        return cls((ExamplePart(tuple(examples), pairs=pairs),))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Example:
        """Reads its tokens."""
        part, own = self._place(index)
        return part.example(own)

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def source(self, index: int) -> str:
        """Where the example begins, "file:line", without reading it."""
        part, own = self._place(index)
        return part.source(own)

    def _place(self, index: int) -> tuple[Part, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect_right(self.ends, index)
        return self.parts[which], int(index) - (self.ends[which - 1] if which else 0)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each source."""
        return tuple(len(part.lengths) for part in self.parts)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Of each source the number behind its last example."""
        return tuple(np.cumsum(self.sizes).tolist()) or (0,)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """(n,) tokens of each example."""
        return _joined([part.lengths for part in self.parts])

    @cached_property
    def widths(self) -> NDArray[np.int32]:
        """(n,) tokens of each example's row where rows are padded; of a pair, of the longer one."""
        return _joined([part.widths for part in self.parts])

    @cached_property
    def target_counts(self) -> NDArray[np.int32]:
        """(n,) targets of each example."""
        return _joined([part.target_counts for part in self.parts])

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        """(n,) what the attention of each example grows with."""
        return np.concatenate([np.zeros(0, np.int64), *(part.squares for part in self.parts)])

    @cached_property
    def counts(self) -> Mapping[str, NDArray[np.int32]]:
        """What a step counts, by name, (n,) of each example: {"tokens"}, or of pairs {"pairs",
        "chosen_tokens"}."""
        names = self.parts[0].counts if self.parts else ()
        return {name: _joined([part.counts[name] for part in self.parts]) for name in names}

    @property
    def is_pairs(self) -> bool:
        return "pairs" in self.counts

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of which tokens and masks the examples have, in order, that reads none of them: what a
        resumed run must find unchanged."""
        return hashlib.sha256("".join(part.digest for part in self.parts).encode()).hexdigest()


def _joined(arrays: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.zeros(0, np.int32)])
