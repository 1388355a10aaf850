"""The examples of a run, as an index: which piece of which row each one is. Tokens are read when asked for.

Takes the examples of each source as a Part. Gives a Dataset.
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
class Dataset:
    """Examples by number: those of the first source, then those of the next. weights: of each source, or
    None, where an epoch has every example once."""

    parts: tuple[Part, ...]
    weights: tuple[float, ...] | None = None

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
