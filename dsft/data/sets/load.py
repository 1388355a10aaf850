"""All rows of a run: takes a spec and a tokenizer, gives what is trained on, what is held out, and the
account of every row. Reads the data files, or the tokens that were made of them before; needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dsft.data.cache.store import IN_MEMORY, Cache, tokenised
from dsft.data.render.renderer import Renderer
from dsft.data.rows import TokenRows, data_error
from dsft.data.sets.booking import Booked, Cutting, book, refuse_loss, refuse_too_long
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.division import Read, divide
from dsft.data.sets.mixture import shares_text
from dsft.data.sets.pairs import PairRows
from dsft.data.sets.pieces import OnTooLong
from dsft.errors import Problem
from dsft.spec.held_out import set_names, train_names
from dsft.spec.schema import Data, Source
from dsft.spec.task import TASKS

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
    data.json; identity: of each source what a resumed run must find unchanged."""

    train: Dataset
    held_out: tuple[HeldOut, ...]
    lines: tuple[str, ...]
    account: Mapping[str, Any]
    identity: Mapping[str, Mapping[str, Any]]

    @property
    def summary(self) -> dict[str, float]:
        """Figures of data.train, as metrics."""
        return {f"data/{name}": figure for name, figure in self.account["train"]["total"].items()}


def load_data(
    spec: Wanted,
    tokenizer: PreTrainedTokenizerBase,
    cache: Cache = IN_MEMORY,
    *,
    share_prompts: bool = False,
) -> Loaded:
    """Read, check, render, divide and cut all rows, with the tokenizer's template. Of task dpo each example
    is a pair; share_prompts: laid so that its prompt is computed once.

    Raises MissingInputError for a file that is not there; DataError with every bad or too long row, where
    nothing is left to train on or to evaluate, and where more was lost than the spec allows.
    """
    data = spec.data
    renderer = Renderer(tokenizer, train_on=data.train_on, name=data.chat_template)

    def read(what: str, name: str, source: Source) -> Read:
        return Read(what, name, source, rows_of(source, renderer, spec.task, cache))

    names = train_names(data.train)
    train = [read("data.train", *of) for of in zip(names, data.train, strict=True)]
    eval_names = set_names(data)
    held_out = [
        read(f"data.eval {name}" if name else "data.eval", name or "eval", source)
        for name, source in zip(eval_names, data.eval, strict=True)
    ]
    _refuse_bad([*train, *held_out], data)
    cutting = Cutting(data.max_length, on_too_long(spec), tokenizer.bos_token_id, share_prompts)
    sets = divide(data, train, held_out, eval_names)
    refuse_too_long(sets, cutting)
    booked = [book(one, cutting) for one in sets]
    for one in booked:
        one.refuse_nothing(data, booked[0].total)
    refuse_loss(data, booked[0])
    return _loaded(data, booked, cutting)


def rows_of(source: Source, renderer: Renderer, task: str, cache: Cache) -> TokenRows | PairRows:
    """A source's rows, or its pairs where the task is trained on pairs, up to its max_rows."""
    if TASKS[task].unit == "row":
        return tokenised(source, renderer, task=task, cache=cache, max_rows=source.max_rows)
    most = None if source.max_rows is None else 2 * source.max_rows
    return PairRows(tokenised(source, renderer, task=task, cache=cache, max_rows=most))


def on_too_long(spec: Wanted) -> OnTooLong:
    """Packed pretraining has no row that is too long."""
    return "fill" if spec.data.packing and not TASKS[spec.task].answers else spec.data.on_too_long


def _refuse_bad(read: Sequence[Read], data: Data) -> None:
    """Raises DataError with every bad row, or, where these are dropped, with the files that none is read
    of."""
    accounts = [one.rows.account for one in read]
    if data.on_bad_row == "error":
        bad, count = (
            [problem for one in accounts for problem in one.bad],
            sum(one.bad_rows for one in accounts),
        )
    else:
        bad = [problem for one in accounts for problem in one.unread]
        count = len(bad)
    if bad:
        problems = [Problem(*problem) for problem in bad]
        raise data_error(problems, "mistake in the data", "mistakes in the data", count)


def _loaded(data: Data, booked: Sequence[Booked], cutting: Cutting) -> Loaded:
    weights = tuple(source.weight for source in data.train if source.weight is not None) or None
    train = booked[0].dataset(weights)
    held_out = tuple(HeldOut(one.of.name, one.dataset()) for one in booked[1:])
    lines = [line for one in booked for line in one.lines()]
    lines += [f"data.train: {line}" for line in shares_text(booked[0].names, train)]
    if train.is_pairs and cutting.share_prompts:
        lines.append("data: the prompt of a pair is computed once for both answers (dpo.share_prompts)")
    datasets = (train, *(one.data for one in held_out))
    sets = [one.account(made) for one, made in zip(booked, datasets, strict=True)]
    account = {
        "train": sets[0],
        "held_out": {one.of.name or "eval": mine for one, mine in zip(booked[1:], sets[1:], strict=True)},
        "settings": {
            "on_too_long": cutting.how,
            "max_length": cutting.max_length,
            "share_prompts": cutting.share_prompts,
        }
        | data.model_dump(mode="json", include=_SETTINGS),
    }
    identity = {
        one.label(name): {key: source[key] for key in ("rows", "tokens", "fingerprint")}
        for one, mine in zip(booked, sets, strict=True)
        for name, source in mine["sources"].items()
    }
    return Loaded(train, held_out, tuple(lines), account, identity)


_SETTINGS = {
    "on_bad_row", "packing", "train_on", "chat_template", "eval_fraction", "eval_count",
    "max_dropped_fraction", "max_truncated_fraction", "max_duplicate_fraction",
}  # fmt: skip
