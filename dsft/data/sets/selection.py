"""Divide the records of the sources into sets (training, evaluation, held out), and record why others are not
in any.

What a set has of a source is Selected record numbers, which a cut makes SourceData. Tokens are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Account, Records
from dsft.data.sets.cut import CutOptions, CutRows, small
from dsft.data.sets.dataset import Examples, Ids
from dsft.data.sets.ledger import Ledger
from dsft.spec.held_out import set_names, split_sets, train_names
from dsft.spec.schema import Data, Source

TRAIN = "data.train"
FEW = 5  # places named after a count in a message

Hashes = NDArray[np.uint64]
NONE: Ids = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Selected:
    """The records of one source in one set: those that examples are cut from, and what became of the others.
    Records are given by their numbers in the source, ascending.

    what        the set's name in messages
    set_name    the set's name in metrics; None if it has no name of its own
    name        the source's name
    source      the source's entry in the spec
    records     all records of the source
    count       number of records that belong to the set, including those that are left out
    ids         (k,) records that examples are cut from
    left_out    reason, a field of Ledger -> records left out for it
    noted       another field of Ledger, such as "duplicate" -> records that it applies to
    is_split    whether the set is held out of data.train
    also_in_train  records of the set whose content is in data.train too; None: not computed
    """

    what: str
    set_name: str | None
    name: str
    source: Source
    records: Records
    count: int
    ids: Ids
    left_out: Mapping[str, Ids]
    noted: Mapping[str, Ids]
    is_split: bool = False
    also_in_train: Ids | None = None

    @property
    def account(self) -> Account:
        """The source's account; empty for a held-out split, so that nothing is counted twice."""
        return Account() if self.is_split else self.records.rows.account

    @property
    def shown_as(self) -> str:
        """Name of this source of this set in messages."""
        if self.is_split:
            return f"what is held out of {self.name}"
        return f"{TRAIN} {self.name}" if self.what == TRAIN else self.what

    @property
    def content(self) -> Hashes:
        """(k,) a hash of the content of each of `ids`."""
        return self.records.content[self.ids]

    def places(self, ids: Ids) -> tuple[str, ...]:
        """Return the places of records, "file:line"."""
        return tuple(self.records.source(int(record)) for record in ids)

    def of(self, name: str) -> Ids:
        """Return the records that `left_out` or `noted` has under a name."""
        return self.left_out.get(name, self.noted.get(name, NONE))


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceData(Selected):
    """Selected records and the examples that they are cut to.

    truncated_tokens  number of tokens cut off, including pieces without a target
    """

    examples: Examples
    truncated_tokens: int

    @cached_property
    def ledger(self) -> Ledger:
        lengths, examples = self.records.lengths, self.examples
        tokens = lengths[self.ids] if self.is_split else lengths[: self.count]
        counts = {name: len(ids) for name, ids in {**self.left_out, **self.noted}.items()}
        return Ledger(
            rows=self.count + self.account.bad_rows,
            used=self.count - sum(map(len, self.left_out.values())),
            bad=self.account.bad_rows,
            tokens=int(tokens.sum()),
            examples=len(examples),
            example_tokens=int(examples.lengths.sum(dtype=np.int64)),
            trained_tokens=int(examples.target_counts.sum(dtype=np.int64)),
            dropped_tokens=int(lengths[self.of("dropped")].sum()),
            truncated_tokens=self.truncated_tokens,
            blank_lines=self.account.blank_lines,
            **counts,
        )


def cut_with(
    cut: Callable[[Records, Ids, CutOptions], CutRows], selected: Selected, options: CutOptions
) -> SourceData:
    """Cut what is selected to examples, with one of `load.CUTS`."""
    made = cut(selected.records, selected.ids, options)
    before = selected.left_out
    left_out = {name: np.concatenate([before.get(name, NONE), ids]) for name, ids in made.left_out.items()}
    mine = vars(selected) | {"left_out": {**before, **left_out}, "noted": {**selected.noted, **made.noted}}
    return SourceData(**mine, examples=made.examples, truncated_tokens=made.truncated_tokens)


def divide(
    data: Data, train: Sequence[Records], evaluated: Sequence[Records], *, labels: bool = False
) -> list[list[Selected]]:
    """Return the sets: the training set, the sets of data.eval, then the held-out splits of data.train that
    have records (if none has, the first of them).

    train, evaluated: the records of each source of data.train and of data.eval; labels: the loss reads the
    labels, so that records of label 0, undesirable ones, are not left out.
    """
    select = partial(_select, labels=labels)
    trained = held_out = select(TRAIN, None, train_names(data.train), data.train, train)
    splits = split_sets(data)
    if splits:
        pool = np.concatenate([one.content for one in trained])
        border = held_out_below(pool, data.eval_fraction, data.eval_count)
        trained, held_out = map(list, zip(*(_divided(one, border) for one in trained), strict=True))
    sets = [trained]
    for name, source, records in zip(set_names(data), data.eval, evaluated, strict=True):
        what = f"data.eval {name}" if name else "data.eval"
        (one,) = select(what, name, [name or "eval"], [source], [records])
        repeated = one.ids[also_in(one.content, [other.content for other in trained])]
        sets.append([replace(one, also_in_train=repeated)])
    split = [
        [
            replace(held_out[i], what=f"held out {name}" if name else "held out", set_name=name)
            for i in members
        ]
        for name, members in splits
    ]
    with_records = [one for one in split if any(part.count for part in one)]
    return [*sets, *(with_records or split[:1])]


def _select(
    what: str,
    set_name: str | None,
    names: Sequence[str],
    sources: Sequence[Source],
    records: Sequence[Records],
    *,
    labels: bool,
) -> list[Selected]:
    """Select the records of a set that have targets. Duplicates are found across all of the sources."""
    counts = [len(one.content[: source.max_rows]) for one, source in zip(records, sources, strict=True)]
    content = [one.content[:count] for one, count in zip(records, counts, strict=True)]
    if labels:  # the two answers of a pair have its content
        labels_of = (one.values("label")[:count] for one, count in zip(records, counts, strict=True))
        content = [one ^ (label == 0) for one, label in zip(content, labels_of, strict=True)]
    duplicates = np.split(is_duplicate(np.concatenate(content)), np.cumsum(counts)[:-1])
    selected = []
    for name, source, one, count, duplicate in zip(names, sources, records, counts, duplicates, strict=True):
        empty = one.lengths[:count] <= 1
        undesirable = (one.values("label")[:count] == 0) & ~empty & (not labels)
        without = (one.trained[:count] == 0) & ~empty & ~undesirable
        left_out = {"empty": _ids(empty), "undesirable": _ids(undesirable), "without_target": _ids(without)}
        ids, noted = _ids(~(empty | undesirable | without)), {"duplicate": _ids(duplicate)}
        selected.append(Selected(what, set_name, name, source, one, count, ids, left_out, noted))
    return selected


def _divided(one: Selected, border: int) -> tuple[Selected, Selected]:
    """Return what is trained on and what is held out of a source."""
    is_held_out = is_below(one.content, border)
    held_out = one.ids[is_held_out]
    trained = replace(one, ids=one.ids[~is_held_out], left_out={**one.left_out, "held_out": held_out})
    return trained, replace(one, ids=held_out, count=len(held_out), left_out={}, noted={}, is_split=True)


def _ids(mask: NDArray[np.bool_]) -> Ids:
    return small(np.flatnonzero(mask))


# --- by content: a row's set depends only on its own hash, so that duplicates are never on both sides and
# added rows do not move others ------------------------------------------------------------------------------


def held_out_below(pool: Hashes, fraction: float | None, count: int | None) -> int:
    """Return the hash, up to 2^64, below which a row of the `pool` (n,) is held out: `fraction` of the range
    of hashes, or the value below which `count` rows are (and more if the last of them has duplicates)."""
    if fraction is not None:
        return int(fraction * 2**64)
    if count is None or not len(pool):
        return 0
    last = min(count, len(pool)) - 1
    return int(np.partition(pool, last)[last]) + 1


def is_below(content: Hashes, border: int) -> NDArray[np.bool_]:
    if border >= 2**64:
        return np.ones(len(content), np.bool_)
    return content < np.uint64(border)


def is_duplicate(content: Hashes) -> NDArray[np.bool_]:
    """Return a mask (n,) of the rows whose content an earlier row has."""
    found = np.zeros(len(content), np.bool_)
    ordered = np.sort(content)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    rows = np.flatnonzero(_is_one_of(content, twice))
    _, first = np.unique(content[rows], return_index=True)
    found[np.delete(rows, first)] = True
    return found


def also_in(content: Hashes, others: Sequence[Hashes]) -> NDArray[np.bool_]:
    """Return a mask (n,) of the rows whose content is in `others`, which may be much larger."""
    values = np.unique(content)
    found = [other[_is_one_of(other, values)] for other in others]
    return _is_one_of(content, np.unique(np.concatenate([*found, np.zeros(0, np.uint64)])))


def _is_one_of(content: Hashes, ordered: Hashes) -> NDArray[np.bool_]:
    """Return a mask (n,) of the hashes that are in `ordered`, sorted (m,); fast if m is small."""
    if not len(ordered):
        return np.zeros(len(content), np.bool_)
    at = np.minimum(np.searchsorted(ordered, content), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[at] == content
    return found
