"""Rows of a source without a file: takes tokens and masks, gives TokenRows that count what is read, and a
Selection of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Account, Rendered, TokenRows
from dsft.data.sets.selection import PairRows, Selection
from dsft.spec.schema import Data, Source, Spec

Given = tuple[Sequence[int], Sequence[bool]]


def spec_of(task: str, data: Data) -> Spec:
    """A spec of which nothing else is read."""
    return Spec.model_construct(task=task, data=data)


def all_of(rows: TokenRows | PairRows, name: str = "a") -> Selection:
    """Every row of a source, to train on; each has a target."""
    which = np.arange(len(rows.lengths), dtype=np.int32)
    return Selection("data.train", None, name, Source(path="a.jsonl"), rows, len(which), which)


@dataclass(eq=False)
class FakeRows:
    """reads: the row of every `read`."""

    given: Sequence[Given]
    unended: frozenset[int] = frozenset()
    account: Account = field(default_factory=Account)
    said: Sequence[int] | None = None
    undesirable: frozenset[int] = frozenset()
    reads: list[int] = field(default_factory=list)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(ids) for ids, _ in self.given], dtype=np.int64)

    @property
    def trained(self) -> NDArray[np.int64]:
        return np.array([sum(trained[1:]) for _, trained in self.given], dtype=np.int64)

    @property
    def ended(self) -> NDArray[np.bool_]:
        return np.array([i not in self.unended for i in range(len(self.given))], dtype=np.bool_)

    @property
    def content(self) -> NDArray[np.uint64]:
        said = self.said if self.said is not None else [hash(tuple(ids)) % 2**64 for ids, _ in self.given]
        return np.array(said, dtype=np.uint64)

    @property
    def desirable(self) -> NDArray[np.bool_]:
        return np.array([i not in self.undesirable for i in range(len(self.given))], dtype=np.bool_)

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.given).encode()).hexdigest()

    def source(self, row: int) -> str:
        return f"a:{row}"

    def spans(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        masks = [np.array([False, *self.given[row][1], False], np.int8) for row in rows]
        found = [np.flatnonzero(np.diff(mask)).reshape(-1, 2) for mask in masks]
        counts = np.array([len(spans) for spans in found], dtype=np.int64)
        return counts, np.concatenate([np.zeros((0, 2), np.int64), *found])

    def first_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.array([self.given[int(row)][0][0] for row in rows], dtype=np.int64)

    def read(self, row: int) -> Rendered:
        self.reads.append(row)
        ids, trained = self.given[row]
        return Rendered(np.array(ids, np.int32), np.array(trained, np.bool_), row not in self.unended)

    def read_part(self, row: int, start: int, stop: int) -> Rendered:
        whole = self.read(row)
        return Rendered(whole.input_ids[start:stop], whole.trained[start:stop], whole.ended)
