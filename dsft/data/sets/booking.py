"""A set of rows cut into examples, with the account of each row: takes a set, gives its dataset, sentences
and JSON, and errors where too much was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsft.data.rows import MAX_SHOWN, Account, data_error
from dsft.data.sets.dataset import Dataset, Part, RowPart
from dsft.data.sets.division import FEW, TRAIN, Chosen, RowSet, places_of
from dsft.data.sets.ledger import Ledger, table, total
from dsft.data.sets.pairs import PairPart, PairRows, cut_pairs
from dsft.data.sets.pieces import Cut, Ids, OnTooLong, cut
from dsft.errors import DataError, Problem
from dsft.spec.schema import Data


@dataclass(frozen=True)
class Cutting:
    """How rows become examples. bos: the tokenizer's beginning of text, where it has one; share_prompts: of
    pairs, each is laid with its prompt once."""

    max_length: int
    how: OnTooLong
    bos: int | None
    share_prompts: bool = False


def refuse_too_long(sets: Sequence[RowSet], cutting: Cutting) -> None:
    """Raises DataError with every row that is longer than it may be, of all sets."""
    if cutting.how != "error":
        return
    problems: list[Problem] = []
    count = 0
    for chosen in (chosen for one in sets for chosen in one.chosen):
        source, rows = chosen.read.rows, chosen.rows
        lengths = source.longest if isinstance(source, PairRows) else source.lengths
        too_long = rows[lengths[rows] > cutting.max_length]
        count += len(too_long)
        for row in too_long[: MAX_SHOWN - len(problems)]:
            rule = f"data.max_length is {cutting.max_length}; raise it or set data.on_too_long"
            problems.append(Problem(source.source(int(row)), f"{lengths[row]} tokens, {rule}"))
    if problems:
        raise data_error(problems, "row is too long", "rows are too long", count)


@dataclass(frozen=True)
class Booked:
    """A set as examples, with a ledger for each of its sources."""

    of: RowSet
    cuts: Sequence[Cut[Any]]
    parts: Sequence[Part]
    ledgers: Sequence[Ledger]

    @property
    def total(self) -> Ledger:
        return total(self.ledgers)

    @property
    def unit(self) -> str:
        """What its ledgers count."""
        return "pair" if any(isinstance(chosen.read.rows, PairRows) for chosen in self.of.chosen) else "row"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chosen.read.name for chosen in self.of.chosen)

    def label(self, name: str) -> str:
        """What messages call the set's part of a source."""
        if self.of.is_split:
            return f"what is held out of {name}"
        return f"{TRAIN} {name}" if self.of.what == TRAIN else self.of.what

    def dataset(self, weights: tuple[float, ...] | None = None) -> Dataset:
        return Dataset(tuple(self.parts), weights)

    def first_places(self, rows_of: Callable[[Chosen, Cut[Any]], Ids]) -> tuple[str, ...]:
        """Where such rows stand, the first few."""
        places: list[str] = []
        for chosen, made in zip(self.of.chosen, self.cuts, strict=True):
            places += places_of(chosen.read, rows_of(chosen, made)[: FEW - len(places)])
        return tuple(places)

    def refuse_nothing(self, data: Data, train: Ledger) -> None:
        """Raises DataError where no example is left. train: the account of data.train."""
        sums = self.total
        if sums.examples:
            return
        to_what = "train on" if self.of.what == TRAIN else "evaluate"
        if not sums.rows and self.of.is_split:
            key = "data.eval_fraction" if data.eval_fraction is not None else "data.eval_count"
            share = data.eval_fraction if data.eval_fraction is not None else data.eval_count
            rule = f"{share:g} of {train.used:,} rows holds out none; raise it, or give data.eval a file"
            raise DataError("no rows to evaluate:", [Problem(key, rule)])
        if not sums.rows:
            names = ", ".join(chosen.read.source.path for chosen in self.of.chosen) or "no file given"
            raise DataError(f"no rows to {to_what}:", [Problem(names, "holds no row; give a file with rows")])
        bad = [place for chosen in self.of.chosen for place in chosen.read.rows.account.bad][:FEW]
        problems = [
            Problem(self.of.what, _nothing_left(sums, data, self.unit)),
            *(Problem(*place) for place in bad),
        ]
        raise DataError(f"no rows are left to {to_what}:", problems)

    def lines(self) -> list[str]:
        """What is told of it."""
        said = []
        if not self.of.is_split:  # else told of data.train
            said += [note for chosen in self.of.chosen for note in _notes(chosen.read.rows.account)]
            bad = [place for chosen in self.of.chosen for place in chosen.read.rows.account.bad]
            said += [f"dropped {place}: {reason}" for place, reason in bad[:MAX_SHOWN]]
        said += [
            f"left out {place}: both answers are cut to the same tokens"
            for place in self.first_places(_identical)
        ]
        if len(self.ledgers) == 1:
            said.append(self.total.text(self.unit))
        else:
            said += table(dict(zip(self.names, self.ledgers, strict=True)), self.unit)
        count, first = self.of.also_in_train or (0, ())
        if count:
            rows = f"{count:,} of {self.total.rows:,} {self.unit}s"
            said.append(f"{rows} say what a {self.unit} of data.train says; the first: {', '.join(first)}")
        return [f"{self.of.what}: {line}" for line in said]

    def account(self, dataset: Dataset) -> dict[str, Any]:
        """One set's share of data.json."""
        account: dict[str, Any] = {
            "fingerprint": dataset.fingerprint,
            "total": self.total.figures(),
            "sources": {
                chosen.read.name: ledger.figures()
                | {
                    "fingerprint": part.digest,
                    "path": chosen.read.source.path,
                    "weight": chosen.read.source.weight,
                    "notes": list(chosen.read.rows.account.notes),  # with a hub's revision among them
                    "files": [
                        {"file": file, "format": name, "reason": reason}
                        for file, name, reason in chosen.read.rows.account.formats
                    ],
                    "bad_rows": [
                        {"source": place, "reason": reason}
                        for place, reason in chosen.read.rows.account.bad[:MAX_SHOWN]
                    ],
                    "identical_pairs": places_of(chosen.read, made.identical[:MAX_SHOWN]),
                }
                for chosen, made, ledger, part in zip(
                    self.of.chosen, self.cuts, self.ledgers, dataset.parts, strict=True
                )
            },
        }
        if self.of.also_in_train is not None:
            account["also_in_train"] = self.of.also_in_train[0]
        return account


def _notes(account: Account) -> Iterator[str]:
    """Its notes; of many files that are read alike one for all."""
    alike = Counter(reason for _, _, reason in account.formats)
    told = {f"{file}: {reason}" for file, _, reason in account.formats if alike[reason] > FEW}
    yield from (note for note in account.notes if note not in told)
    for reason, count in alike.items():
        if count > FEW:
            first = next(file for file, _, mine in account.formats if mine == reason)
            yield f"{first} and {count - 1:,} more files: {reason}"


def _nothing_left(ledger: Ledger, data: Data, what: str) -> str:
    left_out = (
        (ledger.held_out, "held out"),
        (ledger.bad, "dropped as bad"),
        (ledger.empty, "empty"),
        (ledger.undesirable, "labelled undesirable"),
        (ledger.dropped, f"dropped as longer than data.max_length ({data.max_length} tokens)"),
        (ledger.identical, "left out with two answers cut to the same tokens"),
        (ledger.without_target, f"left out with nothing to train on ({ledger.truncated} truncated)"),
    )
    figures = ", ".join(f"{count:,} {what}" for count, what in left_out if count)
    read = f"1 {what} was read" if ledger.rows == 1 else f"{ledger.rows:,} {what}s were read"
    return f"{read}: {figures}; change what leaves them out, or look at the {what}s"


def book(one: RowSet, cutting: Cutting) -> Booked:
    made = [_cut(chosen, cutting) for chosen in one.chosen]
    cuts, parts = [cut for cut, _ in made], [part for _, part in made]
    ledgers = [_ledger(*of) for of in zip(one.chosen, cuts, parts, strict=True)]
    return Booked(one, cuts, parts, ledgers)


def _cut(chosen: Chosen, cutting: Cutting) -> tuple[Cut[Any], Part]:
    rows, name, how = chosen.read.rows, chosen.read.name, (cutting.max_length, cutting.how, cutting.bos)
    if isinstance(rows, PairRows):
        pairs = cut_pairs(rows, chosen.rows, *how)
        return pairs, PairPart(name, rows, pairs.pieces, cutting.share_prompts)
    made = cut(rows, chosen.rows, *how)
    return made, RowPart(name, rows, made.pieces)


def _ledger(chosen: Chosen, made: Cut[Any], part: Part) -> Ledger:
    lengths = chosen.read.rows.lengths
    return replace(
        chosen.ledger,
        used=len(chosen.rows) - len(made.dropped) - len(made.without_target) - len(made.identical),
        dropped=len(made.dropped),
        without_target=len(chosen.without_target) + len(made.without_target),
        truncated=len(made.truncated),
        split=made.num_split,
        without_end=len(made.unended),
        identical=len(made.identical),
        examples=len(part.lengths),
        example_tokens=int(part.lengths.sum(dtype=np.int64)),
        trained_tokens=int(part.target_counts.sum(dtype=np.int64)),
        dropped_tokens=int(lengths[made.dropped].sum()),
        truncated_tokens=made.truncated_tokens,
    )


def refuse_loss(data: Data, train: Booked) -> None:
    """Raises DataError where more of data.train was lost, or stands twice, than the spec allows."""
    sums, problems = train.total, []
    limits = (
        ("max_dropped_fraction", data.max_dropped_fraction, sums.left_out, "left out", _left_out),
        ("max_truncated_fraction", data.max_truncated_fraction, sums.truncated, "truncated", _truncated),
        ("max_duplicate_fraction", data.max_duplicate_fraction, sums.duplicate, "duplicates", _duplicate),
    )
    for key, limit, count, what, rows_of in limits:
        if limit is None or count <= limit * sums.rows:
            continue
        bad = [place for one in train.of.chosen for place, _ in one.read.rows.account.bad]
        places = [*(bad if rows_of is _left_out else ()), *train.first_places(rows_of)][:FEW]
        found = f"{count:,} of {sums.rows:,} {train.unit}s ({count / sums.rows:.3g}) are {what}"
        rule = f"the limit is {limit:g}; the first: {', '.join(places)}"
        problems.append(Problem(f"data.{key}", f"{found}, {rule}"))
    if problems:
        raise DataError("data.train is over the spec's limits:", problems)


def _left_out(chosen: Chosen, made: Cut[Any]) -> Ids:
    parts = [made.dropped, made.without_target, chosen.without_target, chosen.empty]
    return np.sort(np.concatenate([*parts, made.identical]))


def _identical(chosen: Chosen, made: Cut[Any]) -> Ids:
    return made.identical


def _truncated(chosen: Chosen, made: Cut[Any]) -> Ids:
    return made.truncated


def _duplicate(chosen: Chosen, made: Cut[Any]) -> Ids:
    return chosen.duplicate
