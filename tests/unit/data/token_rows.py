"""Rows of a source without a file: takes tokens and masks, gives TokenRows that count what is read, and cuts
all of them to examples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Account, Records, Rendered
from dsft.data.sets.answers import cut_answers
from dsft.data.sets.cut import CutOptions, CutRows, cut_rows
from dsft.spec.schema import Data, Spec

Given = tuple[Sequence[int], Sequence[bool]]


def spec_of(task: str, data: Data) -> Spec:
    """A spec of which nothing else is read."""
    return Spec.model_construct(task=task, data=data)


def cut_all(rows: FakeRows, options: CutOptions) -> CutRows:
    """Cut every row, each of which has a target."""
    return cut_rows(Records(rows, 1), np.arange(len(rows.given), dtype=np.int32), options)


def cut_all_pairs(rows: FakeRows, options: CutOptions) -> CutRows:
    return cut_answers(Records(rows, 2), np.arange(len(rows.given) // 2, dtype=np.int32), options)


@dataclass(eq=False)
class FakeRows:
    """places: of each row; by default a:0, a:1, …; reads: the row of every `read`."""

    given: Sequence[Given]
    unended: frozenset[int] = frozenset()
    account: Account = field(default_factory=Account)
    hashes: Sequence[int] | None = None
    undesirable: frozenset[int] = frozenset()
    places: Sequence[str] | None = None
    reads: list[int] = field(default_factory=list)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(ids) for ids, _ in self.given], dtype=np.int64)

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        return np.array([sum(trained[1:]) for _, trained in self.given], dtype=np.int64)

    @property
    def ended(self) -> NDArray[np.bool_]:
        return np.array([i not in self.unended for i in range(len(self.given))], dtype=np.bool_)

    @property
    def content(self) -> NDArray[np.uint64]:
        found = (
            self.hashes if self.hashes is not None else [hash(tuple(ids)) % 2**64 for ids, _ in self.given]
        )
        return np.array(found, dtype=np.uint64)

    @property
    def values(self) -> dict[str, NDArray[np.int32]]:
        labels = [i not in self.undesirable for i in range(len(self.given))]
        return {"label": np.array(labels, dtype=np.int32)}

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.given).encode()).hexdigest()

    def source(self, row: int) -> str:
        return f"a:{row}" if self.places is None else self.places[row]

    def spans(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        masks = [np.array([False, *self.given[row][1], False], np.int8) for row in rows]
        found = [np.flatnonzero(np.diff(mask)).reshape(-1, 2) for mask in masks]
        counts = np.array([len(spans) for spans in found], dtype=np.int64)
        return counts, np.concatenate([np.zeros((0, 2), np.int64), *found])

    def first_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.array([self.given[int(row)][0][0] for row in rows], dtype=np.int64)

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Rendered:
        self.reads.append(row)
        ids, trained = (np.array(column)[start:stop] for column in self.given[row])
        return Rendered(ids.astype(np.int32), trained.astype(np.bool_), row not in self.unended)
