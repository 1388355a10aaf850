"""All that a preview shows, as one value that the terminal, the page and the JSON write each in its way.

Takes what was collected, and what is asked for; decodes the rows that are shown, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsft.data.dataset import Dataset, Example
from dsft.data.order import Order
from dsft.data.pack import micro_batches_of
from dsft.errors import Problem, SpecError
from dsft.preview.collect import Collected
from dsft.preview.figures import Lengths, Steps, lengths_of, steps_of
from dsft.preview.tokens import Token, tokens_of


@dataclass(frozen=True)
class ShownRow:
    """number: from 1, in the order of the files; segments: tokens of each piece that sees only itself."""

    number: int
    source: str
    tokens: tuple[Token, ...]
    segments: tuple[int, ...]
    why: str = ""

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)


@dataclass(frozen=True)
class MicroBatch:
    """The first one of rank 0 in step 1. width: places of each row; packed: the rows are one."""

    packed: bool
    rows: tuple[ShownRow, ...]
    width: int


@dataclass(frozen=True)
class View:
    """examples: of the run, all of them; rows: those that are shown."""

    name: str
    task: str
    batch: str
    examples: int
    rows: tuple[ShownRow, ...]
    notes: tuple[str, ...]
    ledger: tuple[str, ...]
    lengths: Lengths | None
    steps: Steps | None
    micro_batch: MicroBatch | None
    trained_share: float
    refusal: tuple[str, tuple[Problem, ...]] | None


@dataclass(frozen=True)
class Wanted:
    """rows: how many, from the first; row: that one alone, by its number or as file:line."""

    rows: int
    row: str | None = None


def view(found: Collected, wanted: Wanted) -> View:
    """Raises SpecError where a row is asked for that is not there."""
    spec, loaded, refusal = found.spec, found.loaded, found.refusal
    refused = None if refusal is None else (refusal.title, refusal.problems)
    if loaded is None:
        if wanted.row is not None:
            raise _no_row(wanted.row, "no row can be trained on")
        empty = (spec.name, spec.task, found.batch.equation(), 0, (), (), ())
        return View(*empty, None, None, None, 0.0, refused)
    data = loaded.train
    if wanted.row is not None:
        which: Sequence[int] = _found(data, wanted.row)
    else:
        which = range(min(wanted.rows, len(data)))
    return View(
        name=spec.name,
        task=spec.task,
        batch=found.batch.equation(),
        examples=len(data),
        rows=tuple(shown(found, data, index) for index in which),
        notes=(),
        ledger=loaded.lines,
        lengths=lengths_of(data.lengths, spec.data.max_length),
        steps=steps_of(data, spec.train, spec.data, found.batch),
        micro_batch=None if wanted.row is not None else _micro_batch(found, data),
        trained_share=float(data.target_counts.sum() / data.lengths.sum()),
        refusal=refused,
    )


def shown(found: Collected, data: Dataset, index: int, why: str = "") -> ShownRow:
    example: Example = data[index]
    tokens = tuple(tokens_of(example, found.tokenizer))
    return ShownRow(index + 1, example.source, tokens, example.segment_lengths, why)


def _micro_batch(found: Collected, data: Dataset) -> MicroBatch:
    batch = found.batch
    ids = Order(data, batch.global_batch_size, found.spec.train.seed).step(0).ids
    members = ids[micro_batches_of(data.lengths[ids].astype(np.int64), batch, data_rank=0)[0]]
    lengths = data.lengths[members]
    packed = batch.tokens_per_micro_batch is not None
    rows = tuple(shown(found, data, int(index)) for index in members)
    return MicroBatch(packed, rows, int(lengths.sum() if packed else lengths.max()))


def _found(data: Dataset, row: str) -> list[int]:
    if row.isdecimal():
        if not 1 <= int(row) <= len(data):
            raise _no_row(row, f"there are {len(data)}, counted from 1")
        return [int(row) - 1]
    sources = [data.source(index) for index in range(len(data))]
    which = [i for i, source in enumerate(sources) if source == row or source.endswith(f"/{row}")]
    if not which:
        raise _no_row(row, f"the first is {sources[0]}, the last {sources[-1]}")
    return which


def _no_row(row: str, rule: str) -> SpecError:
    message = f"{row!r} is none of the rows that are trained on; {rule}"
    return SpecError("there is no such row:", [Problem("--row", message)])
