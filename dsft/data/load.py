"""All rows of a run: takes a spec and a tokenizer, gives what is trained on, what is held out, and the
account of every row. Reads the data files, or the tokens that were made of them before; needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsft.data.dataset import Dataset, RowPart
from dsft.data.held_out import also_in, held_out_below, is_below, is_duplicate
from dsft.data.ledger import Ledger, table, total
from dsft.data.mixture import shares_text
from dsft.data.pieces import NONE, Cut, Ids, OnTooLong, cut
from dsft.data.render import Renderer
from dsft.data.rows import MAX_SHOWN, TokenRows, data_error
from dsft.data.store import IN_MEMORY, Cache, tokenised
from dsft.errors import DataError, Problem
from dsft.spec.held_out import set_names, split_sets, train_names
from dsft.spec.schema import Data, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Wanted(Protocol):
    """What is read of a spec."""

    @property
    def task(self) -> str: ...
    @property
    def data(self) -> Data: ...


@dataclass(frozen=True)
class HeldOut:
    """An evaluation set and its name in metrics, None where it has none of its own."""

    name: str | None
    data: Dataset


@dataclass(frozen=True)
class Loaded:
    """lines: what is to be told of it, each with the section of the spec in front; account: the same for
    data.json; identity: of each set and source what a resumed run must find unchanged."""

    train: Dataset
    held_out: tuple[HeldOut, ...]
    lines: tuple[str, ...]
    account: Mapping[str, Any]
    identity: Mapping[str, Mapping[str, Any]]

    @property
    def summary(self) -> dict[str, float]:
        """Figures of data.train, as metrics."""
        return {f"data/{name}": figure for name, figure in self.account["train"]["total"].items()}


def load_data(spec: Wanted, tokenizer: PreTrainedTokenizerBase, cache: Cache = IN_MEMORY) -> Loaded:
    """Read, check, render, divide and cut all rows, with the tokenizer's template.

    Raises MissingInputError for a file that is not there; DataError with every bad or too long row, where
    nothing is left to train on or to evaluate, and where more was lost than the spec allows.
    """
    data = spec.data
    renderer = Renderer(tokenizer, train_on=data.train_on)

    def read(what: str, name: str, source: Source) -> _Read:
        rows = tokenised(source, renderer, task=spec.task, cache=cache, max_rows=source.max_rows)
        return _Read(what, name, source, rows)

    names = train_names(data.train)
    train = [read("data.train", *of) for of in zip(names, data.train, strict=True)]
    eval_names = set_names(data)
    held_out = [
        read(f"data.eval {name}" if name else "data.eval", name or "eval", source)
        for name, source in zip(eval_names, data.eval, strict=True)
    ]
    if data.on_bad_row == "error":
        _refuse_bad([*train, *held_out])
    cutting = _Cutting(data.max_length, on_too_long(spec), tokenizer.bos_token_id)
    sets = _sets(data, train, held_out, eval_names)
    _refuse_too_long(sets, cutting)
    booked = [_booked(one, cutting) for one in sets]
    for one in booked:
        one.refuse_nothing(data)
    _refuse_loss(data, booked[0])
    return _loaded(data, booked, cutting)


def on_too_long(spec: Wanted) -> OnTooLong:
    """Packed pretraining has no row that is too long."""
    return "fill" if spec.data.packing and spec.task == "pretrain" else spec.data.on_too_long


# --- what was read ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """A source and its rows. what: the section of the spec, in messages."""

    what: str
    name: str
    source: Source
    rows: TokenRows

    @property
    def count(self) -> int:
        """Rows that are looked at."""
        there = len(self.rows.lengths)
        return there if self.source.max_rows is None else min(there, self.source.max_rows)

    @property
    def content(self) -> NDArray[np.uint64]:
        return self.rows.content[: self.count]


def _refuse_bad(read: Sequence[_Read]) -> None:
    bad = [Problem(*problem) for one in read for problem in one.rows.account.bad]
    rest = sum(one.rows.account.bad_rows for one in read)
    if bad:
        raise data_error(bad, "mistake in the data", "mistakes in the data", rest)


@dataclass(frozen=True)
class _Chosen:
    """Rows (k,) of a source that go into a set, each with a target; ledger: of those that do not."""

    read: _Read
    rows: Ids
    ledger: Ledger
    without_target: Ids
    empty: Ids
    duplicate: Ids

    @property
    def content(self) -> NDArray[np.uint64]:
        return self.read.rows.content[self.rows]


def _chosen(read: _Read, duplicate: NDArray[np.bool_]) -> _Chosen:
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
    return _Chosen(read, _ids(usable), ledger, _ids(without), _ids(empty), _ids(duplicate))


def _ids(mask: NDArray[np.bool_]) -> Ids:
    return np.flatnonzero(mask).astype(np.int32)


def _all_chosen(read: Sequence[_Read]) -> list[_Chosen]:
    """Duplicates are counted over all of them."""
    duplicate = is_duplicate(np.concatenate([one.content for one in read])) if read else np.zeros(0, np.bool_)
    borders = np.cumsum([one.count for one in read])[:-1]
    return [_chosen(one, mine) for one, mine in zip(read, np.split(duplicate, borders), strict=True)]


# --- which set a row goes to ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Set:
    """Rows that make a dataset. what: in messages; name: in metrics."""

    what: str
    name: str | None
    chosen: Sequence[_Chosen]
    also_in_train: tuple[int, tuple[str, ...]] | None = None


def _sets(
    data: Data, train: Sequence[_Read], held_out: Sequence[_Read], eval_names: Sequence[str | None]
) -> list[_Set]:
    """The rows to train on first, then the sets of data.eval, then those held out of data.train."""
    chosen = _all_chosen(train)
    splits = split_sets(data)
    kept, held = list(chosen), list(chosen)
    if splits:
        pool = np.concatenate([one.content for one in chosen])
        border = held_out_below(pool, data.eval_fraction, data.eval_count)
        divided = [_divided(one, border) for one in chosen]
        kept, held = [one for one, _ in divided], [one for _, one in divided]
    trained = np.concatenate([one.content for one in kept])
    sets = [_Set("data.train", None, kept)]
    for name, one in zip(eval_names, held_out, strict=True):
        mine = _all_chosen([one])
        found = mine[0].rows[also_in(mine[0].content, trained)]
        sets.append(_Set(one.what, name, mine, (len(found), _places(one, found[:_FEW]))))
    for name, members in splits:
        sets.append(_Set(f"held out {name}" if name else "held out", name, [held[i] for i in members]))
    return sets


def _divided(chosen: _Chosen, border: int) -> tuple[_Chosen, _Chosen]:
    """What is trained on, and what is held out."""
    is_held = is_below(chosen.content, border)
    held = chosen.rows[is_held]
    tokens = int(chosen.read.rows.lengths[held].sum())
    kept = replace(chosen, rows=chosen.rows[~is_held], ledger=replace(chosen.ledger, held_out=len(held)))
    return kept, _Chosen(chosen.read, held, Ledger(rows=len(held), tokens=tokens), NONE, NONE, NONE)


def _places(read: _Read, rows: Ids) -> tuple[str, ...]:
    return tuple(read.rows.source(int(row)) for row in rows)


# --- cutting, and booking what became of each row ---------------------------------------------------------


@dataclass(frozen=True)
class _Cutting:
    max_length: int
    how: OnTooLong
    bos: int | None


def _refuse_too_long(sets: Sequence[_Set], cutting: _Cutting) -> None:
    if cutting.how != "error":
        return
    problems: list[Problem] = []
    count = 0
    for chosen in (chosen for one in sets for chosen in one.chosen):
        source, rows = chosen.read.rows, chosen.rows
        too_long = rows[source.lengths[rows] > cutting.max_length]
        count += len(too_long)
        for row in too_long[: MAX_SHOWN - len(problems)]:
            rule = f"data.max_length is {cutting.max_length}; raise it or set data.on_too_long"
            problems.append(Problem(source.source(int(row)), f"{source.lengths[row]} tokens, {rule}"))
    if problems:
        raise data_error(problems, "row is too long", "rows are too long", count)


@dataclass(frozen=True)
class _Booked:
    """A set as examples, with a ledger for each of its sources."""

    of: _Set
    cuts: Sequence[Cut]
    ledgers: Sequence[Ledger]

    @property
    def total(self) -> Ledger:
        return total(self.ledgers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chosen.read.name for chosen in self.of.chosen)

    def dataset(self, weights: tuple[float, ...] | None = None) -> Dataset:
        parts = tuple(
            RowPart(chosen.read.name, chosen.read.rows, made.pieces)
            for chosen, made in zip(self.of.chosen, self.cuts, strict=True)
        )
        return Dataset(parts, weights)

    def first_places(self, rows_of: Callable[[_Chosen, Cut], Ids]) -> tuple[str, ...]:
        """Where such rows stand, the first few."""
        places: list[str] = []
        for chosen, made in zip(self.of.chosen, self.cuts, strict=True):
            places += _places(chosen.read, rows_of(chosen, made)[: _FEW - len(places)])
        return tuple(places)

    def refuse_nothing(self, data: Data) -> None:
        """Raises DataError where no example is left."""
        sums = self.total
        if sums.examples:
            return
        to_what = "train on" if self.of.name is None and self.of.what == "data.train" else "evaluate"
        if not sums.rows and self.of.what.startswith("held out"):
            key = "data.eval_fraction" if data.eval_fraction is not None else "data.eval_count"
            rule = "no row of data.train is held out by it; raise it, or give data.eval a file"
            raise DataError("no rows to evaluate:", [Problem(key, rule)])
        if not sums.rows:
            names = ", ".join(chosen.read.source.path for chosen in self.of.chosen) or "no file given"
            raise DataError(f"no rows to {to_what}:", [Problem(names, "holds no row; give a file with rows")])
        raise DataError(f"no rows are left to {to_what}:", [Problem(self.of.what, _nothing_left(sums, data))])


_FEW = 5  # places named after a figure


def _nothing_left(ledger: Ledger, data: Data) -> str:
    left_out = (
        (ledger.held_out, "held out"),
        (ledger.bad, "dropped as bad"),
        (ledger.empty, "empty"),
        (ledger.undesirable, "labelled undesirable"),
        (ledger.dropped, f"dropped as longer than data.max_length ({data.max_length} tokens)"),
        (ledger.without_target, f"left out with nothing to train on ({ledger.truncated} truncated)"),
    )
    figures = ", ".join(f"{count:,} {what}" for count, what in left_out if count)
    return f"{ledger.rows:,} rows were read: {figures}; change what leaves them out, or look at the rows"


def _booked(one: _Set, cutting: _Cutting) -> _Booked:
    cuts = [
        cut(chosen.read.rows, chosen.rows, cutting.max_length, cutting.how, cutting.bos)
        for chosen in one.chosen
    ]
    return _Booked(one, cuts, [_ledger(*pair) for pair in zip(one.chosen, cuts, strict=True)])


def _ledger(chosen: _Chosen, made: Cut) -> Ledger:
    lengths, pieces = chosen.read.rows.lengths, made.pieces
    return replace(
        chosen.ledger,
        used=len(chosen.rows) - len(made.dropped) - len(made.without_target),
        dropped=len(made.dropped),
        without_target=len(chosen.without_target) + len(made.without_target),
        truncated=len(made.truncated),
        split=made.num_split,
        without_end=len(made.unended),
        examples=len(pieces.lengths),
        example_tokens=int(pieces.lengths.sum(dtype=np.int64)),
        trained_tokens=int(pieces.target_counts.sum(dtype=np.int64)),
        dropped_tokens=int(lengths[made.dropped].sum()),
        truncated_tokens=made.truncated_tokens,
    )


def _refuse_loss(data: Data, train: _Booked) -> None:
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
        places = [*(bad if rows_of is _left_out else ()), *train.first_places(rows_of)][:_FEW]
        found = (
            f"{count:,} of {sums.rows:,} rows ({count / sums.rows:.3g}) are {what}, the limit is {limit:g}"
        )
        problems.append(Problem(f"data.{key}", f"{found}; the first: {', '.join(places)}"))
    if problems:
        raise DataError("data.train is over the spec's limits:", problems)


def _left_out(chosen: _Chosen, made: Cut) -> Ids:
    parts = [made.dropped, made.without_target, chosen.without_target, chosen.empty]
    return np.sort(np.concatenate(parts))


def _truncated(chosen: _Chosen, made: Cut) -> Ids:
    return made.truncated


def _duplicate(chosen: _Chosen, made: Cut) -> Ids:
    return chosen.duplicate


# --- what is told -----------------------------------------------------------------------------------------


def _loaded(data: Data, booked: Sequence[_Booked], cutting: _Cutting) -> Loaded:
    weights = tuple(source.weight for source in data.train if source.weight is not None) or None
    train = booked[0].dataset(weights)
    held_out = tuple(HeldOut(one.of.name, one.dataset()) for one in booked[1:])
    lines = [line for one in booked for line in _lines(one)]
    lines += [f"data.train: {line}" for line in shares_text(booked[0].names, train)]
    sets = [
        _account(one, found) for one, found in zip(booked, (train, *(h.data for h in held_out)), strict=True)
    ]
    account = {
        "train": sets[0],
        "held_out": {one.of.name or "eval": mine for one, mine in zip(booked[1:], sets[1:], strict=True)},
        "settings": {"on_too_long": cutting.how, "max_length": cutting.max_length}
        | data.model_dump(mode="json", include=_SETTINGS),
    }
    identity = {
        one.of.what: {
            name: {key: source[key] for key in ("rows", "tokens", "fingerprint")}
            for name, source in mine["sources"].items()
        }
        for one, mine in zip(booked, sets, strict=True)
    }
    return Loaded(train, held_out, tuple(lines), account, identity)


_SETTINGS = {
    "on_bad_row", "packing", "train_on", "chat_template", "eval_fraction", "eval_count",
    "max_dropped_fraction", "max_truncated_fraction", "max_duplicate_fraction",
}  # fmt: skip


def _lines(one: _Booked) -> list[str]:
    said = []
    if not one.of.what.startswith("held out"):  # told of data.train
        said += [note for chosen in one.of.chosen for note in chosen.read.rows.account.notes]
        bad = [place for chosen in one.of.chosen for place in chosen.read.rows.account.bad]
        said += [f"dropped {place}: {reason}" for place, reason in bad[:MAX_SHOWN]]
    said += (
        [one.total.text()] if len(one.ledgers) == 1 else table(dict(zip(one.names, one.ledgers, strict=True)))
    )
    count, first = one.of.also_in_train or (0, ())
    if count:
        rows = f"{count:,} of {one.total.rows:,} rows"
        said.append(f"{rows} say what a row of data.train says; the first: {', '.join(first)}")
    return [f"{one.of.what}: {line}" for line in said]


def _account(one: _Booked, dataset: Dataset) -> dict[str, Any]:
    """One set's share of data.json."""
    account: dict[str, Any] = {
        "fingerprint": dataset.fingerprint,
        "total": one.total.figures(),
        "sources": {
            chosen.read.name: ledger.figures()
            | {
                "fingerprint": part.digest,
                "path": chosen.read.source.path,
                "weight": chosen.read.source.weight,
                "files": [
                    {"file": file, "format": name, "reason": reason}
                    for file, name, reason in chosen.read.rows.account.formats
                ],
                "bad_rows": [
                    {"source": place, "reason": reason}
                    for place, reason in chosen.read.rows.account.bad[:MAX_SHOWN]
                ],
            }
            for chosen, ledger, part in zip(one.of.chosen, one.ledgers, dataset.parts, strict=True)
        },
    }
    if one.of.also_in_train is not None:
        account["also_in_train"] = one.of.also_in_train[0]
    return account
