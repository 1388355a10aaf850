"""Load the data of a run: the training set, the evaluation sets, the account of every row, and the reasons
for which a run would refuse the data.

Reads the data files, or their cached tokens. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dsft.data.cache.store import IN_MEMORY, Cache, tokenized_rows
from dsft.data.render.renderer import Renderer
from dsft.data.rows import MAX_SHOWN, PLACES, Account, Records, data_error
from dsft.data.sets.answers import cut_answers
from dsft.data.sets.cut import CutOptions, CutRows, OnTooLong, cut_rows
from dsft.data.sets.dataset import Dataset, Ids
from dsft.data.sets.ledger import Ledger, table, total
from dsft.data.sets.order import shares_text
from dsft.data.sets.selection import FEW, TRAIN, SourceData, cut_with, divide
from dsft.data.tokenizer.load import pad_id
from dsft.errors import DataError, Problem
from dsft.spec.preferences import shares_prompts
from dsft.spec.schema import Data, Source, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOutSet:
    """An evaluation set and its name in metrics; None if it has no name of its own."""

    name: str | None
    data: Dataset


@dataclass(frozen=True)
class RunData:
    """The data of a run. Rows that a run refuses are left out.

    lines       messages about the data, each prefixed with the section of the spec
    tables      those of them that are lines of a table of a set's sources
    account     the same for data.json
    identity    per source, what a resumed run must find unchanged
    sources     each source of each set
    refusal     the error with which a run refuses the data; None: it does not
    """

    train: Dataset
    held_out: tuple[HeldOutSet, ...]
    lines: tuple[str, ...]
    tables: frozenset[str]
    account: Mapping[str, Any]
    identity: Mapping[str, Mapping[str, Any]]
    sources: tuple[SourceData, ...] = ()
    refusal: DataError | None = None

    @property
    def summary(self) -> dict[str, float]:
        """Counts of data.train, as metrics."""
        return {f"data/{name}": figure for name, figure in self.account["train"]["total"].items()}


def load_data(
    spec: Spec, tokenizer: PreTrainedTokenizerBase, cache: Cache = IN_MEMORY, *, refuse: bool = True
) -> RunData:
    """Read and tokenize all rows, divide them into sets and cut them to examples, with the tokenizer's
    template.

    Bad rows, rows that are too long, sets without examples and losses over the spec's limits raise one
    DataError or, without `refuse`, are returned as `refusal`. Raises MissingInputError for a missing file,
    and DataError if no row can be tokenized, such as without a chat template.
    """
    data, share_prompts, kind = spec.data, shares_prompts(spec), spec.task_kind
    bos, pad = tokenizer.bos_token_id, pad_id(tokenizer) if kind.head == "score" else None
    own = len(spec.labels), kind.fields, pad
    options = CutOptions(data.max_length, on_too_long(spec), bos, share_prompts, *own)
    sets = _sets(spec, tokenizer, cache, options)
    weights = tuple(source.weight for source in data.train if source.weight is not None) or None
    how = kind.whole, spec.labels, kind.fields
    train, *held_out = (
        Dataset(tuple(one.examples for one in sources), None, tuple(one.name for one in sources), *how)
        for sources in sets
    )
    train = replace(train, weights=weights)
    stops = {"bad": data.on_bad_row, "dropped": options.how}
    refused = [name for name, what in stops.items() if what == "error"]
    lines = [line for sources in sets for line in _lines(sources, refused)]
    lines += [f"{TRAIN}: {line}" for line in (*shares_text(train), *_labels(train))]
    if share_prompts:
        key = spec.own_key("share_prompts")
        lines.append(f"data: the prompt of a {kind.unit} is computed once for both answers ({key})")
    accounts = [_account(*of) for of in zip(sets, (train, *held_out), strict=True)]
    names = [sources[0].set_name for sources in sets[1:]]
    account = {
        "train": accounts[0],
        "held_out": {name or "eval": mine for name, mine in zip(names, accounts[1:], strict=True)},
        "settings": {
            "on_too_long": options.how,
            "max_length": options.max_length,
            "share_prompts": share_prompts,
        }
        | data.model_dump(mode="json", include=_SETTINGS),
    }
    identity = {
        one.shown_as: {key: mine["sources"][one.name][key] for key in ("rows", "tokens", "fingerprint")}
        for sources, mine in zip(sets, accounts, strict=True)
        for one in sources
    }
    run_data = RunData(
        train,
        tuple(HeldOutSet(*of) for of in zip(names, held_out, strict=True)),
        tuple(lines),
        frozenset(line for sources in sets for line in _table(sources)),
        account,
        identity,
        sources=tuple(one for sources in sets for one in sources),
        refusal=_refusal(spec, sets, options),
    )
    if refuse and run_data.refusal is not None:
        raise run_data.refusal
    return run_data


def _sets(
    spec: Spec, tokenizer: PreTrainedTokenizerBase, cache: Cache, options: CutOptions
) -> list[list[SourceData]]:
    """Return the sets, the training set first, with their rows cut to examples."""
    data, kind = spec.data, spec.task_kind
    train_on = kind.train_on or data.train_on
    renderer = Renderer(tokenizer, train_on=train_on, name=data.chat_template, thinking=data.thinking)

    def records_of(source: Source) -> Records:
        most = None if source.max_rows is None else kind.rows * source.max_rows
        rows = tokenized_rows(
            source, renderer, cache=cache, max_rows=most, task=spec.task, labels=spec.labels
        )
        return Records(rows, kind.rows, kind.unit)

    read = [[records_of(one) for one in sources] for sources in (data.train, data.eval)]
    divided, cut = divide(data, *read, labels=kind.label != "none"), CUTS[kind.cut]
    return [[cut_with(cut, one, options) for one in sources] for sources in divided]


CUTS: dict[str, Callable[[Records, Ids, CutOptions], CutRows]] = {"rows": cut_rows, "answers": cut_answers}
"""What cuts records to examples, by `TaskFacts.cut`."""

_SETTINGS = {
    "on_bad_row", "packing", "train_on", "chat_template", "thinking", "eval_fraction", "eval_count",
    "max_dropped_fraction", "max_truncated_fraction", "max_duplicate_fraction",
}  # fmt: skip


def on_too_long(spec: Spec) -> OnTooLong:
    """Return how rows over max_length are treated: "fill" for packed pretraining, else data.on_too_long."""
    return "fill" if spec.data.packing and not spec.task_kind.answers else spec.data.on_too_long


def _unit(sources: Sequence[SourceData]) -> str:
    """Return what the ledgers of a set count, such as "row" or "pair"."""
    return sources[0].records.unit


def _total(sources: Sequence[SourceData]) -> Ledger:
    return total([one.ledger for one in sources])


# --- the account of a set ---------------------------------------------------------------------------------


def _lines(sources: Sequence[SourceData], refused: Sequence[str]) -> Iterator[str]:
    """Yield the messages about a set. refused: as in `Ledger.text`."""
    unit, sums, what = _unit(sources), _total(sources), sources[0].what
    lines = [note for one in sources for note in _notes(one.account)]
    bad = [] if "bad" in refused else [place for one in sources for place in one.account.bad]
    lines += [f"dropped {place}: {reason}" for place, reason in bad[:MAX_SHOWN]]
    identical = _first_places(sources, [one.of("identical") for one in sources])
    lines += [f"left out {place}: both answers are truncated to the same tokens" for place in identical]
    if len(sources) == 1:
        lines.append(sums.text(unit, refused))
    yield from (f"{what}: {line}" for line in lines)
    yield from _table(sources)
    for one in sources:
        if one.also_in_train is not None and len(one.also_in_train):
            rows = f"{len(one.also_in_train):,} of {sums.rows:,} {unit}s"
            first = ", ".join(one.places(one.also_in_train[:FEW]))
            yield f"{what}: {rows} are also in data.train; the first: {first}"


def _table(sources: Sequence[SourceData]) -> list[str]:
    """Return the lines of a table with a row per source of a set; none for one source, which has a
    sentence."""
    ledgers = {one.name: one.ledger for one in sources}
    lines = table(ledgers, _unit(sources)) if len(sources) > 1 else []
    return [f"{sources[0].what}: {line}" for line in lines]


def _notes(account: Account) -> Iterator[str]:
    """Yield the account's notes, with one note for more than FEW files of the same format and reason."""
    files: dict[str, list[str]] = {}
    for file, _, reason in account.formats:
        files.setdefault(reason, []).append(file)
    many = {reason: names for reason, names in files.items() if len(names) > FEW}
    merged = {f"{file}: {reason}" for reason, names in many.items() for file in names}
    yield from (note for note in account.notes if note not in merged)
    yield from (f"{names[0]} and {len(names) - 1:,} more files: {reason}" for reason, names in many.items())


def _labels(data: Dataset) -> Iterator[str]:
    if data.labels:
        counts = data.count()
        yield ", ".join(f"{counts[name]:,} {name}" for name in data.labels)


def _first_places(sources: Sequence[SourceData], rows: Sequence[Ids]) -> tuple[str, ...]:
    """Return the places of the first FEW of the rows, over all sources."""
    places: list[str] = []
    for one, mine in zip(sources, rows, strict=True):
        places += one.places(mine[: FEW - len(places)])
    return tuple(places)


def _account(sources: Sequence[SourceData], data: Dataset) -> dict[str, Any]:
    """Return one set's part of data.json."""
    account: dict[str, Any] = {
        "fingerprint": data.fingerprint,
        "total": _total(sources).figures(),
        "sources": {one.name: _source_account(one) for one in sources},
    }
    if sources[0].also_in_train is not None:
        account["also_in_train"] = len(sources[0].also_in_train)
    return account


def _source_account(one: SourceData) -> dict[str, Any]:
    read = one.records.rows.account
    return (
        one.ledger.figures()
        | {
            "fingerprint": one.examples.digest,
            "path": one.source.path,
            "weight": one.source.weight,
            "notes": list(read.notes),  # with a hub's revision among them
            "files": [{"file": file, "format": name, "reason": why} for file, name, why in read.formats],
            "bad_rows": [{"source": place, "reason": why} for place, why in read.bad[:MAX_SHOWN]],
            "identical_pairs": one.places(one.of("identical")[:MAX_SHOWN]),
        }
    )


# --- why a run refuses the data ---------------------------------------------------------------------------


def _refusal(spec: Spec, sets: Sequence[Sequence[SourceData]], options: CutOptions) -> DataError | None:
    """Return all reasons as one error: bad rows and rows that are too long; only if there are none, sets
    without examples, losses over the spec's limits and prompts that are all cut, since such rows would count
    as losses."""
    data = spec.data
    every = [one for sources in sets for one in sources]
    errors = [error for error in (_bad(data, every), _too_long(spec, every)) if error is not None]
    if not errors:
        train = _total(sets[0])
        for sources in sets:
            if not _total(sources).examples and (train.examples or not sources[0].is_split):
                errors.append(_nothing(data, sources, train))
        problems = list(_over_limits(data, sets[0], train)) if train.examples else []
        errors += [DataError("data.train is over the spec's limits:", problems)] if problems else []
        if 0 < train.used == train.prompt_cut:
            errors.append(_no_whole_prompt(data, sets[0]))
    if len(errors) < 2:
        return errors[0] if errors else None
    title = ", ".join(error.title.removesuffix(":") for error in errors)
    return DataError(f"{title}:", [problem for error in errors for problem in error.problems])


def _bad(data: Data, read: Sequence[SourceData]) -> DataError | None:
    """Return the error for bad rows; if these are dropped, for files of which no row can be read."""
    accounts = [one.account for one in read]
    if data.on_bad_row == "error":
        bad = [problem for one in accounts for problem in one.bad]
        count = sum(one.bad_rows for one in accounts)
    else:
        bad = [problem for one in accounts for problem in one.unread]
        count = len(bad)
    if not bad:
        return None
    title = f"{count:,} mistake{'s' * (count > 1)} in the data:"
    if not any(one.unread for one in accounts):  # else only the first rows of a file are read
        rows = sum(one.ledger.rows for one in read if not one.is_split)
        title = f"{count:,} of {rows:,} row{'s' * (rows > 1)} cannot be used:"
    return data_error([Problem(*problem) for problem in bad], title, count)


def _too_long(spec: Spec, read: Sequence[SourceData]) -> DataError | None:
    """Return the error for rows over max_length, of all sets: which lengths would keep how many of them."""
    count = sum(len(one.of("dropped")) for one in read)
    if on_too_long(spec) != "error" or not count:
        return None
    limit, unit = spec.data.max_length, _unit(read)
    lengths = np.concatenate([one.records.longest[: one.count] for one in read if not one.is_split])
    longest = int(lengths.max())
    fits = [
        f"{length:,} fits {np.count_nonzero(lengths <= length):,} of {len(lengths):,} {unit}s"
        for length in (limit * 3 // 2, limit * 2, limit * 4)
        if length < longest
    ]
    other = "data.on_too_long: drop or truncate"
    if not spec.task_kind.answers:
        other = "data.packing: true, or data.on_too_long: split"
    rule = f"{', '.join([*fits, f'{longest:,} fits all'])}; raise it, or set {other}"
    places = [
        Problem(one.records.source(row), f"{one.records.longest[row]:,} tokens")
        for one in read
        for row in one.of("dropped")[:PLACES].tolist()
    ]
    verb = "is" if count == 1 else "are"
    title = f"{count:,} of {len(lengths):,} {unit}s {verb} longer than data.max_length {limit:,}:"
    return DataError(title, [Problem("data.max_length", rule), *places[:PLACES]])


def _no_whole_prompt(data: Data, train: Sequence[SourceData]) -> DataError:
    """Return the error for prompts that have all lost their beginning by truncation."""
    longest = max(int(one.records.longest[one.ids].max(initial=0)) for one in train)
    rule = f"{data.max_length} is too short for the prompts and answers together; raise it (the longest "
    rule += f"{_unit(train)} has {longest:,} tokens)"
    title = f"the prompts of all {_total(train).used:,} {_unit(train)}s would lose their beginning:"
    return DataError(title, [Problem("data.max_length", rule)])


def _nothing(data: Data, sources: Sequence[SourceData], train: Ledger) -> DataError:
    """Return the error for a set without examples. train: the ledger of data.train."""
    sums, first, unit = _total(sources), sources[0], _unit(sources)
    use = "train on" if first.what == TRAIN else "evaluate"
    if sums.rows:
        read = f"1 {unit} was read" if sums.rows == 1 else f"{sums.rows:,} {unit}s were read"
        rule = f"change the keys that leave them out, or check the {unit}s"
        found = f"{read}. {' '.join(sums.outcomes(unit))}"
        bad = [Problem(*place) for one in sources for place in one.records.rows.account.bad][:FEW]
        return DataError(f"no rows are left to {use}:", [Problem(first.what, f"{found[:-1]}; {rule}"), *bad])
    if first.is_split:
        key = "data.eval_count" if data.eval_fraction is None else "data.eval_fraction"
        share = data.eval_count if data.eval_fraction is None else data.eval_fraction
        rule = f"{share:g} of {train.used:,} rows holds out none; raise it, or name a file in data.eval"
        return DataError("no rows to evaluate:", [Problem(key, rule)])
    names = ", ".join(one.source.path for one in sources)
    return DataError(f"no rows to {use}:", [Problem(names, "has no rows; name a file with rows")])


def _over_limits(data: Data, train: Sequence[SourceData], sums: Ledger) -> Iterator[Problem]:
    """Yield a problem for each of the spec's limits on dropped, truncated and duplicate rows that data.train
    exceeds."""
    lost = ("dropped", "without_target", "empty", "identical")
    left_out = [np.sort(np.concatenate([one.of(reason) for reason in lost])) for one in train]
    truncated, duplicate = ([one.of(name) for one in train] for name in ("truncated", "duplicate"))
    limits = (
        ("max_dropped_fraction", data.max_dropped_fraction, sums.left_out, "left out", left_out),
        ("max_truncated_fraction", data.max_truncated_fraction, sums.truncated, "truncated", truncated),
        ("max_duplicate_fraction", data.max_duplicate_fraction, sums.duplicate, "duplicates", duplicate),
    )
    for key, limit, count, what, rows in limits:
        if limit is None or count <= limit * sums.rows:
            continue
        bad = [place for one in train for place, _ in one.account.bad] if rows is left_out else []
        places = ", ".join([*bad, *_first_places(train, rows)][:FEW])
        found = f"{count:,} of {sums.rows:,} {_unit(train)}s ({count / sums.rows:.3g}) are {what}"
        yield Problem(f"data.{key}", f"{found}, the limit is {limit:g}; the first: {places}")
