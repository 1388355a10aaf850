"""The examples of a run, as an index into the rows of its sources. Tokens are read on access.

A SourceExamples has the examples of one source, a Dataset those of all.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dsft.data.rows import TokenRows
    from dsft.data.sets.selection import PairRows


@dataclass(frozen=True, eq=False)
class Example:
    """One example, or one preference pair.

    input_ids  (T,) int32
    trained    (T,) bool: the mask. Token 0 is never a target
    source     "file:line"
    segments   length of each segment, which attends only to itself: the documents of a joined example (whose
               first tokens are no targets), or the two answers of a pair (chosen, rejected); None: one
               segment
    starts     position id at which each segment begins, as in MicroBatch; None: 0
    """

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


class SourceExamples(Protocol):
    """The n examples of one source.

    name           the source's name in metrics
    lengths        (n,) tokens of each example
    widths         (n,) tokens of each example's row in a padded batch; for a pair, of its longer row
    target_counts  (n,) targets of each example
    squares        (n,) the attention cost of each example: length²; for a pair, Σ length² of its rows
    counts         the counts that losses are normalized by: name -> (n,) count of each example
    digest         sha256 that identifies the examples
    rows           the source's rows
    row_ids        (n,) the row in which each example begins, or the pair that it is
    lost           (n,) how many more tokens its row has than each example; 0 if examples span rows
    """

    @property
    def name(self) -> str | None: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def widths(self) -> NDArray[np.int32]: ...
    @property
    def target_counts(self) -> NDArray[np.int32]: ...
    @property
    def squares(self) -> NDArray[np.int64]: ...
    @property
    def counts(self) -> Mapping[str, NDArray[np.int32]]: ...
    @property
    def digest(self) -> str: ...
    @property
    def rows(self) -> TokenRows | PairRows: ...
    @property
    def row_ids(self) -> NDArray[np.int32]: ...
    @property
    def lost(self) -> NDArray[np.int64]: ...

    def source(self, index: int) -> str:
        """Return the place where an example begins, "file:line"."""

    def extent(self, index: int) -> str:
        """Return in words which tokens of its row an example has; "" if all."""

    def example(self, index: int) -> Example: ...


@dataclass(frozen=True, eq=False)
class Dataset:
    """The n examples of all sources, numbered source after source. weights: the weight of each source; None:
    an epoch has every example once."""

    parts: tuple[SourceExamples, ...]
    weights: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Example:
        """Return an example, reading its tokens."""
        part, own = self._place(index)
        return part.example(own)

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

    def _place(self, index: int) -> tuple[SourceExamples, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect_right(self.ends, index)
        return self.parts[which], int(index) - (self.ends[which - 1] if which else 0)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each source."""
        return tuple(len(part.lengths) for part in self.parts)

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
        """(n,) the attention cost of each example, as in SourceExamples."""
        return np.concatenate([np.zeros(0, np.int64), *(part.squares for part in self.parts)])

    @cached_property
    def counts(self) -> Mapping[str, NDArray[np.int32]]:
        """The counts that losses are normalized by, name -> (n,) of each example: {"tokens", "sequences"}, or
        for pairs {"pairs", "chosen_tokens", "sequences"}."""
        names = self.parts[0].counts if self.parts else ()
        return {name: _joined([part.counts[name] for part in self.parts]) for name in names}

    @property
    def is_pairs(self) -> bool:
        return "pairs" in self.counts

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that identifies the tokens and masks of all examples, in order, computed without reading
        them. A resumed run must find it unchanged."""
        return hashlib.sha256("".join(part.digest for part in self.parts).encode()).hexdigest()


def _joined(arrays: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.zeros(0, np.int32)])
