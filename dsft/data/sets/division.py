"""Which rows go to which set: to train on, to evaluate, held out; and which to none, by what they say.

Takes the rows of sources. Gives, of each source and set, the numbers of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows
from dsft.data.sets.held_out import also_in, held_out_below, is_below, is_duplicate
from dsft.data.sets.ledger import Ledger
from dsft.data.sets.pairs import PairRows
from dsft.data.sets.pieces import NONE, Ids
from dsft.spec.held_out import split_sets
from dsft.spec.schema import Data, Source

TRAIN = "data.train"
FEW = 5  # places named after a figure


@dataclass(frozen=True)
class Read:
    """A source and its rows, or its pairs, which are rows to all here. what: the section of the spec, in
    messages."""

    what: str
    name: str
    source: Source
    rows: TokenRows | PairRows

    @property
    def count(self) -> int:
        """Rows that are looked at."""
        there = len(self.rows.lengths)
        return there if self.source.max_rows is None else min(there, self.source.max_rows)

    @property
    def content(self) -> NDArray[np.uint64]:
        return self.rows.content[: self.count]


def places_of(read: Read, rows: Ids) -> tuple[str, ...]:
    """Where they stand, "file:line"."""
    return tuple(read.rows.source(int(row)) for row in rows)


@dataclass(frozen=True)
class Chosen:
    """Rows (k,) of a source that go into a set, each with a target; ledger: of those that do not."""

    read: Read
    rows: Ids
    ledger: Ledger
    without_target: Ids
    empty: Ids
    duplicate: Ids

    @property
    def content(self) -> NDArray[np.uint64]:
        return self.read.rows.content[self.rows]


def _chosen(read: Read, duplicate: NDArray[np.bool_]) -> Chosen:
    rows, count = read.rows, read.count
    lengths, targets = rows.lengths[:count], rows.trained[:count]
    empty = lengths <= 1
    undesirable = ~rows.desirable[:count] & ~empty
    without = (targets == 0) & ~empty & ~undesirable
    ledger = Ledger(
        rows=count + rows.account.bad_rows,
        bad=rows.account.bad_rows,
        empty=int(np.count_nonzero(empty)),
        undesirable=int(np.count_nonzero(undesirable)),
        duplicate=int(np.count_nonzero(duplicate)),
        tokens=int(lengths.sum()),
        blank_lines=rows.account.blank_lines,
    )
    usable = ~(empty | undesirable | without)
    return Chosen(read, _ids(usable), ledger, _ids(without), _ids(empty), _ids(duplicate))


def _ids(mask: NDArray[np.bool_]) -> Ids:
    return np.flatnonzero(mask).astype(np.int32)


def _all_chosen(read: Sequence[Read]) -> list[Chosen]:
    """Duplicates are counted over all of them."""
    duplicate = is_duplicate(np.concatenate([one.content for one in read]))
    borders = np.cumsum([one.count for one in read])[:-1]
    return [_chosen(one, mine) for one, mine in zip(read, np.split(duplicate, borders), strict=True)]


@dataclass(frozen=True)
class RowSet:
    """Rows that make a dataset. what: in messages; name: in metrics; is_split: held out of data.train;
    also_in_train: how many of its rows say what one says that is trained on, and where the first stand."""

    what: str
    name: str | None
    chosen: Sequence[Chosen]
    is_split: bool = False
    also_in_train: tuple[int, tuple[str, ...]] | None = None


def divide(
    data: Data, train: Sequence[Read], held_out: Sequence[Read], eval_names: Sequence[str | None]
) -> list[RowSet]:
    """The rows to train on first, then the sets of data.eval, then those held out of data.train that have
    rows, or one that has none."""
    chosen = _all_chosen(train)
    splits = split_sets(data)
    kept, held = list(chosen), list(chosen)
    if splits:
        pool = np.concatenate([one.content for one in chosen])
        border = held_out_below(pool, data.eval_fraction, data.eval_count)
        divided = [_divided(one, border) for one in chosen]
        kept, held = [one for one, _ in divided], [one for _, one in divided]
    sets = [RowSet(TRAIN, None, kept)]
    for name, one in zip(eval_names, held_out, strict=True):
        mine = _all_chosen([one])
        found = mine[0].rows[also_in(mine[0].content, [trained.content for trained in kept])]
        places = places_of(one, found[:FEW])
        sets.append(RowSet(one.what, name, mine, also_in_train=(len(found), places)))
    divided_sets = [
        RowSet(f"held out {name}" if name else "held out", name, [held[i] for i in members], is_split=True)
        for name, members in splits
    ]
    with_rows = [one for one in divided_sets if any(len(chosen.rows) for chosen in one.chosen)]
    return [*sets, *(with_rows or divided_sets[:1])]


def _divided(chosen: Chosen, border: int) -> tuple[Chosen, Chosen]:
    """What is trained on, and what is held out."""
    is_held = is_below(chosen.content, border)
    held = chosen.rows[is_held]
    tokens = int(chosen.read.rows.lengths[held].sum())
    kept = replace(chosen, rows=chosen.rows[~is_held], ledger=replace(chosen.ledger, held_out=len(held)))
    return kept, Chosen(chosen.read, held, Ledger(rows=len(held), tokens=tokens), NONE, NONE, NONE)
