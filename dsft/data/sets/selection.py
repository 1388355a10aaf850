"""Divide the rows of the sources into sets (training, evaluation, held out), and record why others are not
in any.

Each source of each set is a Selection of row numbers. Tokens are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Account, TokenRows
from dsft.data.sets.dataset import SourceExamples
from dsft.data.sets.ledger import Ledger
from dsft.spec.held_out import set_names, split_sets, train_names
from dsft.spec.schema import Data, Source

TRAIN = "data.train"
FEW = 5  # places named after a count in a message
OnTooLong = Literal["error", "drop", "truncate", "split", "fill"]
"""How rows over max_length are treated. error: they are dropped, and a run refuses the data; fill, for packed
pretraining: no row is too long, all are concatenated and cut into examples of max_length tokens."""

Ids = NDArray[np.int32]
Hashes = NDArray[np.uint64]
NONE: Ids = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class CutOptions:
    """How rows are cut to examples.

    max_length     tokens of an example at most; for a pair, of each of its rows
    bos            the tokenizer's beginning-of-text id, kept in front of a truncated row; None: it has none
    share_prompts  the prompt of a pair is computed once for both answers
    """

    max_length: int
    how: OnTooLong
    bos: int | None
    share_prompts: bool = False


@dataclass(frozen=True, eq=False)
class PairRows:
    """The rows of a source as n pairs: pair i is the rows 2i (chosen) and 2i + 1 (rejected)."""

    answers: TokenRows

    @property
    def account(self) -> Account:
        return self.answers.account

    @property
    def digest(self) -> str:
        return self.answers.digest

    @cached_property
    def row_lengths(self) -> NDArray[np.int64]:
        """(n, 2) tokens of each row: the prompt and an answer."""
        return self.answers.lengths.reshape(-1, 2)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of both rows."""
        lengths: NDArray[np.int64] = self.row_lengths.sum(axis=1)
        return lengths

    @cached_property
    def longer(self) -> NDArray[np.int64]:
        """(n,) tokens of each pair's longer row."""
        longer: NDArray[np.int64] = self.row_lengths.max(axis=1)
        return longer

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """(n,) targets of both answers; 0 if one answer has none, since then there is nothing to compare."""
        targets = self.answers.trained.reshape(-1, 2)
        return np.where(targets.all(axis=1), targets.sum(axis=1), 0)

    @cached_property
    def ended(self) -> NDArray[np.bool_]:
        ended = self.answers.ended
        return ended[::2] & ended[1::2]

    @property
    def content(self) -> Hashes:
        """(n,) a hash of the pair's content."""
        return self.answers.content[::2]

    @property
    def desirable(self) -> NDArray[np.bool_]:
        return self.answers.desirable[::2]

    def source(self, pair: int) -> str:
        """Return the pair's place, "file:line"."""
        return self.answers.source(2 * pair)


def limited_lengths(rows: TokenRows | PairRows) -> NDArray[np.int64]:
    """Return the lengths (n,) that data.max_length limits: of each row, or of each pair's longer row."""
    return rows.longer if isinstance(rows, PairRows) else rows.lengths


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of one source in one set: those that examples are cut from, and what became of the others. In
    tasks on pairs, a row is a pair. Rows are given by their numbers in the source, ascending.

    what        the set's name in messages
    set_name    the set's name in metrics; None if it has no name of its own
    name        the source's name
    source      the source's entry in the spec
    rows        all rows of the source
    count       number of rows that belong to the set, including those that are left out
    row_ids     (k,) rows that examples are cut from
    left_out    reason, a field of Ledger -> rows left out for it
    noted       "truncated", "without_end", "prompt_cut", "duplicate" -> rows that this applies to
    is_split    whether the set is held out of data.train
    also_in_train  rows of the set whose content is in data.train too; None: not computed
    part        the examples, once they are cut
    split       number of rows that several examples have a part of
    truncated_tokens  number of tokens cut off, including pieces without a target
    """

    what: str
    set_name: str | None
    name: str
    source: Source
    rows: TokenRows | PairRows
    count: int = 0
    row_ids: Ids = field(default_factory=lambda: NONE)
    left_out: Mapping[str, Ids] = field(default_factory=dict)
    noted: Mapping[str, Ids] = field(default_factory=dict)
    is_split: bool = False
    also_in_train: Ids | None = None
    part: SourceExamples | None = None
    split: int = 0
    truncated_tokens: int = 0

    @property
    def examples(self) -> SourceExamples:
        assert self.part is not None, "the rows are not cut yet"
        return self.part

    @property
    def account(self) -> Account:
        """The source's account; empty for a held-out split, so that nothing is counted twice."""
        return Account() if self.is_split else self.rows.account

    @property
    def label(self) -> str:
        """Name of the selection in messages."""
        if self.is_split:
            return f"what is held out of {self.name}"
        return f"{TRAIN} {self.name}" if self.what == TRAIN else self.what

    @property
    def content(self) -> Hashes:
        """(k,) a hash of each of these rows' content."""
        return self.rows.content[self.row_ids]

    def places(self, rows: Ids) -> tuple[str, ...]:
        """Return the places of rows, "file:line"."""
        return tuple(self.rows.source(int(row)) for row in rows)

    def of(self, name: str) -> Ids:
        """Return the rows that `left_out` or `noted` has under a name."""
        return self.left_out.get(name, self.noted.get(name, NONE))

    @cached_property
    def ledger(self) -> Ledger:
        lengths, part = self.rows.lengths, self.examples
        tokens = lengths[self.row_ids] if self.is_split else lengths[: self.count]
        counts = {name: len(rows) for name, rows in {**self.left_out, **self.noted}.items()}
        return Ledger(
            rows=self.count + self.account.bad_rows,
            used=self.count - sum(map(len, self.left_out.values())),
            bad=self.account.bad_rows,
            split=self.split,
            tokens=int(tokens.sum()),
            examples=len(part.lengths),
            example_tokens=int(part.lengths.sum(dtype=np.int64)),
            trained_tokens=int(part.target_counts.sum(dtype=np.int64)),
            dropped_tokens=int(lengths[self.of("dropped")].sum()),
            truncated_tokens=self.truncated_tokens,
            blank_lines=self.account.blank_lines,
            **counts,
        )


def divide(
    data: Data, train: Sequence[TokenRows | PairRows], evaluated: Sequence[TokenRows | PairRows]
) -> list[list[Selection]]:
    """Return the sets: the training set, the sets of data.eval, then the held-out splits of data.train that
    have rows (if none has, the first of them).

    train, evaluated: the rows of each source of data.train and of data.eval.
    """
    sources = zip(train_names(data.train), data.train, train, strict=True)
    trained = held_out = _select([Selection(TRAIN, None, *of) for of in sources])
    splits = split_sets(data)
    if splits:
        pool = np.concatenate([one.content for one in trained])
        border = held_out_below(pool, data.eval_fraction, data.eval_count)
        divided = [_divided(one, border) for one in trained]
        trained, held_out = [one for one, _ in divided], [one for _, one in divided]
    sets = [trained]
    for name, source, rows in zip(set_names(data), data.eval, evaluated, strict=True):
        what = f"data.eval {name}" if name else "data.eval"
        (one,) = _select([Selection(what, name, name or "eval", source, rows)])
        repeated = one.row_ids[also_in(one.content, [other.content for other in trained])]
        sets.append([replace(one, also_in_train=repeated)])
    split = [
        [
            replace(held_out[i], what=f"held out {name}" if name else "held out", set_name=name)
            for i in members
        ]
        for name, members in splits
    ]
    with_rows = [one for one in split if any(part.count for part in one)]
    return [*sets, *(with_rows or split[:1])]


def _select(sources: Sequence[Selection]) -> list[Selection]:
    """Choose the rows that have targets. Duplicates are found across all of the sources."""
    counts = [min(len(one.rows.lengths), one.source.max_rows or len(one.rows.lengths)) for one in sources]
    content = [one.rows.content[:count] for one, count in zip(sources, counts, strict=True)]
    duplicate = np.split(is_duplicate(np.concatenate(content)), np.cumsum(counts)[:-1])
    return [_selected(*of) for of in zip(sources, counts, duplicate, strict=True)]


def _selected(one: Selection, count: int, duplicate: NDArray[np.bool_]) -> Selection:
    rows = one.rows
    empty = rows.lengths[:count] <= 1
    undesirable = ~rows.desirable[:count] & ~empty
    without = (rows.trained[:count] == 0) & ~empty & ~undesirable
    left_out = {"empty": _ids(empty), "undesirable": _ids(undesirable), "without_target": _ids(without)}
    row_ids = _ids(~(empty | undesirable | without))
    return replace(one, count=count, row_ids=row_ids, left_out=left_out, noted={"duplicate": _ids(duplicate)})


def _divided(one: Selection, border: int) -> tuple[Selection, Selection]:
    """Return the selections of the rows that are trained on and of those that are held out."""
    is_held_out = is_below(one.content, border)
    held_out = one.row_ids[is_held_out]
    trained = replace(one, row_ids=one.row_ids[~is_held_out], left_out={**one.left_out, "held_out": held_out})
    return trained, replace(one, row_ids=held_out, count=len(held_out), left_out={}, noted={}, is_split=True)


def _ids(mask: NDArray[np.bool_]) -> Ids:
    return small(np.flatnonzero(mask))


def small(numbers: NDArray[np.int64]) -> Ids:
    return numbers.astype(np.int32)


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
