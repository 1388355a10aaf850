"""All that a preview shows, as one value that the terminal, the page and the JSON write each in its way.

Takes what was collected and what is asked for. Decodes the rows that are shown, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dsft.data.sets.dataset import Dataset, RowPart
from dsft.data.sets.order import Order
from dsft.data.steps.pack import micro_batches_of
from dsft.errors import Problem, SpecError
from dsft.preview.collect import Collected
from dsft.preview.figures import Lengths, Steps, lengths_of, steps_of
from dsft.preview.problems import Problems, Source, kinds_of, problems_of, row_of
from dsft.preview.tokens import Token, tokens_of
from dsft.preview.units import Units, units_of
from dsft.preview.worst import worst_of


@dataclass(frozen=True)
class ShownRow:
    """An example of the run, or a row that is left out.

    number    from 1, in the order of the files; None: left out
    segments  tokens of each piece that sees only itself
    happened  what became of the row that it is of; empty where it is whole
    why       it is shown
    answer    chosen or rejected, of a pair; prompt: tokens at its start that both have before the answer
    """

    number: int | None
    source: str
    tokens: tuple[Token, ...]
    segments: tuple[int, ...]
    happened: str = ""
    why: str = ""
    answer: str = ""
    prompt: int = 0

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)


@dataclass(frozen=True)
class ShownBatch:
    """The first micro-batch of rank 0 in step 1. width: places of each row; packed: all stand in one row."""

    packed: bool
    rows: tuple[ShownRow, ...]
    width: int


@dataclass(frozen=True)
class ShownWorst:
    title: str
    rows: tuple[ShownRow, ...]


@dataclass(frozen=True)
class View:
    """examples: of the run, of which `rows` are shown; told: what a run says of its data; ledgers: by source,
    as in data.json; refusal: title and problems for which a run would stop."""

    name: str
    task: str
    batch: str
    examples: int
    told: tuple[str, ...]
    ledgers: Mapping[str, Mapping[str, Any]]
    lengths: Lengths | None
    trained_share: float
    steps: Steps | None
    micro_batch: ShownBatch | None
    rows: tuple[ShownRow, ...]
    worst: tuple[ShownWorst, ...]
    problems: Problems
    refusal: tuple[str, tuple[Problem, ...]] | None


@dataclass(frozen=True)
class Wanted:
    """rows: how many, from the first (of task dpo: pairs); row: that one alone, by its number or file:line;
    problems: how many of each kind."""

    rows: int = 0
    row: str | None = None
    worst: bool = False
    micro_batch: bool = False
    problems: int = 0


def view(found: Collected, wanted: Wanted) -> View:
    """Raises SpecError where a row is asked for that is not there."""
    spec, show = found.spec, Shower(found)
    data, some = show.data, len(show.units.examples) > 0
    if wanted.row is not None:
        rows = show.named(wanted.row)
    else:
        rows = [show.row(index) for index in show.units.examples[: wanted.rows].ravel().tolist()]
    refusal = found.refusal
    return View(
        name=spec.name,
        task=spec.task,
        batch=found.batch.equation(),
        examples=len(data),
        told=found.told,
        ledgers=found.ledgers,
        lengths=lengths_of(data.lengths, spec.data.max_length) if some else None,
        trained_share=float(data.target_counts.sum() / max(1, data.lengths.sum())),
        steps=steps_of(data.lengths, show.units, spec, found.batch) if some else None,
        micro_batch=show.micro_batch() if some and wanted.micro_batch else None,
        rows=tuple(rows),
        worst=show.worst() if some and wanted.worst else (),
        problems=problems_of(found.sources, spec, wanted.problems),
        refusal=None if refusal is None else (refusal.title, refusal.problems),
    )


@dataclass(frozen=True)
class Shower:
    """Makes rows to show of examples, by their numbers from 0."""

    found: Collected

    @property
    def data(self) -> Dataset:
        return self.found.train

    @cached_property
    def units(self) -> Units:
        return units_of(self.data, self.found.spec.task)

    def row(self, index: int, why: str = "") -> ShownRow:
        example = self.data[index]
        tokens = tuple(tokens_of(example.input_ids, example.trained, self.found.tokenizer))
        answer, prompt = self._answer(index)
        happened = self._happened(index)
        return ShownRow(
            index + 1, example.source, tokens, example.segment_lengths, happened, why, answer, prompt
        )

    def micro_batch(self) -> ShownBatch:
        """Of pairs always padded: how they are packed is not built."""
        batch, units = self.found.batch, self.units.examples
        if units.shape[1] > 1:
            batch = replace(batch, tokens_per_micro_batch=None)
        ids = Order(self.units, batch.global_batch_size, self.found.spec.train.seed).step(0).ids
        lengths = self.data.lengths.astype(np.int64)[units[ids]].sum(axis=1)
        hand = micro_batches_of(lengths, batch, data_rank=0)[0]
        members = units[ids[hand]].ravel()
        packed = batch.tokens_per_micro_batch is not None
        places = self.data.lengths[members]
        rows = tuple(self.row(int(index)) for index in members)
        return ShownBatch(packed, rows, int(places.sum() if packed else places.max()))

    def worst(self) -> tuple[ShownWorst, ...]:
        kinds = worst_of(self.data, self.found.tokenizer, pairs=self.found.spec.task == "dpo")
        return tuple(ShownWorst(kind.title, tuple(self.row(*one) for one in kind.examples)) for kind in kinds)

    def named(self, name: str) -> list[ShownRow]:
        """What `name` means, a number from 1 or file:line; a row that is left out as it would be."""
        count = len(self.data)
        if name.isdecimal():
            if not 1 <= int(name) <= count:
                raise _no_row(name, f"there are {count:,}, counted from 1")
            return [self.row(int(name) - 1)]
        which = [i for i in range(count) if _is_named(self.data.source(i), name)]
        rows = [self.row(i) for i in which] or list(self._left_out(name))
        if not rows:
            ends = (
                f"the first is {self.data.source(0)}, the last {self.data.source(count - 1)}" if count else ""
            )
            raise _no_row(name, ends or "none is left")
        return rows

    def _left_out(self, name: str) -> Iterator[ShownRow]:
        for source in self.found.sources:
            for place, reason in source.rows.account.bad:
                if _is_named(place, name):
                    raise _no_row(name, f"it cannot be read: {reason}")
            for row in range(source.count):
                place = source.rows.source(row)
                if _is_named(place, name):
                    whole = source.rows.read(row)
                    tokens = tuple(tokens_of(whole.input_ids, whole.trained, self.found.tokenizer))
                    why = ", ".join([_fate(source, row), *kinds_of(source, row, self.found.spec)])
                    yield ShownRow(None, place, tokens, (len(tokens),), why)

    def _answer(self, index: int) -> tuple[str, int]:
        """Of a pair: which answer it is, and how many tokens both begin with, before any is trained on."""
        if self.units.examples.shape[1] == 1 or index not in self.units.examples:
            return "", 0
        chosen, rejected = self.units.examples[np.any(self.units.examples == index, axis=1)][0].tolist()
        ours, theirs = self.data[chosen], self.data[rejected]
        least = min(int(np.argmax(np.append(one.trained, True))) for one in (ours, theirs))
        differ = np.append(ours.input_ids[:least] != theirs.input_ids[:least], True)
        return ("chosen" if index == chosen else "rejected"), int(np.argmax(differ))

    def _happened(self, index: int) -> str:
        """Of a row that is not whole."""
        at = int(np.searchsorted(self.data.ends, index, side="right"))
        part = self.data.parts[at]
        if not isinstance(part, RowPart):
            return ""
        mine = index - (self.data.ends[at - 1] if at else 0)
        row, pieces = int(row_of(part)[mine]), part.pieces
        begin, length, whole = int(pieces.begin[mine]), int(pieces.lengths[mine]), int(part.rows.lengths[row])
        if pieces.at is not None:
            return f"begins at token {begin:,} of {part.rows.source(row)}" if begin else ""
        if length == whole:
            return ""
        if pieces.headed is not None and pieces.headed[mine]:
            return f"token 0 and tokens {begin:,} to {begin + length - 2:,} of {whole:,}"
        return f"tokens {begin:,} to {begin + length - 1:,} of {whole:,}"


def _fate(source: Source, row: int) -> str:
    """Of a row that is in no example of the run."""
    if any(row in part.pieces.rows for part in source.parts):
        return "held out"
    return "left out" if source.rows.desirable[row] else "labelled undesirable, left out"


def _is_named(source: str, row: str) -> bool:
    return source == row or source.endswith(f"/{row}")


def _no_row(row: str, rule: str) -> SpecError:
    message = f"{row!r} is none of the rows that are trained on; {rule}"
    return SpecError("there is no such row:", [Problem("--row", message)])
