"""Build the view: all that a preview shows, as one value for the terminal, the page and JSON.

Only the rows that are shown are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.order import Order
from dsft.data.sets.pairs import PairExamples
from dsft.data.sets.pieces import RowExamples
from dsft.data.sets.selection import PairRows
from dsft.data.steps.pack import assign
from dsft.errors import Problem, SpecError
from dsft.preview.collect import PreviewData
from dsft.preview.figures import LengthStats, StepStats, length_stats, step_stats
from dsft.preview.problems import (
    Problems,
    SourceSelections,
    kinds_of,
    lost_of,
    parts_of,
    problems_of,
    row_of,
    worst_of,
)
from dsft.preview.tokens import Token, tokens_of
from dsft.spec.task import TASKS


@dataclass(frozen=True)
class RowView:
    """An example of the run, or a row that is left out.

    number    from 1, in the order of the files; None: left out
    segments  length of each segment; for a pair, of the chosen and of the rejected answer, each with the
              prompt
    happened  what became of the example's row; "" if all of it is there
    why       the reason why it is shown
    shared    for a pair: the rejected answer follows only the last token of the prompt
    prompt    for a pair: number of tokens of the prompt; None: not a pair
    """

    number: int | None
    source: str
    tokens: tuple[Token, ...]
    segments: tuple[int, ...]
    happened: str = ""
    why: str = ""
    shared: bool = False
    prompt: int | None = None

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)


@dataclass(frozen=True)
class BatchView:
    """The first micro-batch of rank 0 in step 1. packed: all examples are in one row; width:
    positions of each row."""

    packed: bool
    rows: tuple[RowView, ...]
    width: int


@dataclass(frozen=True)
class WorstView:
    title: str
    rows: tuple[RowView, ...]


@dataclass(frozen=True)
class View:
    """All that a preview shows.

    examples  number of examples of the run, of which `rows` are shown
    messages  a run's messages about its data
    ledgers   the ledger of each source, as in data.json
    refusal   title and problems of the error with which a run would refuse the data; None: it would not
    """

    name: str
    task: str
    batch: str
    examples: int
    messages: tuple[str, ...]
    ledgers: Mapping[str, Mapping[str, Any]]
    lengths: LengthStats | None
    trained_share: float
    steps: StepStats | None
    micro_batch: BatchView | None
    rows: tuple[RowView, ...]
    worst: tuple[WorstView, ...]
    problems: Problems
    refusal: tuple[str, tuple[Problem, ...]] | None

    @property
    def unit(self) -> str:
        return "pair" if self.unit_of_data == "pair" else "example"

    @property
    def unit_of_data(self) -> str:
        return TASKS[self.task].unit


@dataclass(frozen=True)
class ViewOptions:
    """What to show. rows: number of first examples; row: only that one, by its number or file:line; problems:
    number of rows of each kind."""

    rows: int = 0
    row: str | None = None
    worst: bool = False
    micro_batch: bool = False
    problems: int = 0


def view(found: PreviewData, wanted: ViewOptions) -> View:
    """Build the view. Raises SpecError if `wanted.row` does not exist."""
    spec, show = found.spec, RowDecoder(found)
    data, some = show.data, len(show.data) > 0
    if wanted.row is not None:
        rows = show.named(wanted.row)
    else:
        rows = [show.row(index) for index in range(min(wanted.rows, len(data)))]
    refusal = found.loaded.refusal
    return View(
        name=spec.name,
        task=spec.task,
        batch=found.batch.equation(),
        examples=len(data),
        messages=found.messages,
        ledgers=found.ledgers,
        lengths=length_stats(data.lengths, spec.data.max_length) if some else None,
        trained_share=float(data.target_counts.sum() / max(1, data.lengths.sum())),
        steps=step_stats(data, spec, found.batch) if some else None,
        micro_batch=show.micro_batch() if some and wanted.micro_batch else None,
        rows=tuple(rows),
        worst=show.worst() if some and wanted.worst else (),
        problems=problems_of(found.sources, spec, wanted.problems),
        refusal=None if refusal is None else (refusal.title, refusal.problems),
    )


@dataclass(frozen=True)
class RowDecoder:
    """Decodes examples, given by their index in the dataset, to rows that can be shown."""

    found: PreviewData

    @property
    def data(self) -> Dataset:
        return self.found.train

    def row(self, index: int, why: str = "") -> RowView:
        example = self.data[index]
        tokens = self._tokens(example.input_ids, example.trained, example.segment_lengths)
        prompt = int(np.argmax(example.trained)) if self.data.is_pairs else None
        happened, shared = self._happened(index), example.starts is not None
        return RowView(
            index + 1, example.source, tokens, example.segment_lengths, happened, why, shared, prompt
        )

    def _tokens(
        self, ids: NDArray[np.int32], trained: NDArray[np.bool_], segments: Sequence[int]
    ) -> tuple[Token, ...]:
        """Return the tokens of an example. The two segments of a pair are decoded separately, since no
        character spans their border."""
        borders = np.cumsum(segments[:-1] if self.data.is_pairs else ()).astype(np.int64)
        parts = zip(np.split(ids, borders), np.split(trained, borders), strict=True)
        return tuple(token for part in parts for token in tokens_of(*part, self.found.tokenizer))

    def micro_batch(self) -> BatchView:
        batch, data = self.found.batch, self.data
        ids = Order(data, batch.global_batch_size, self.found.spec.train.seed).step(0).ids
        packed = batch.tokens_per_micro_batch is not None
        lengths = data.lengths if packed else data.widths
        members = ids[assign(lengths[ids].astype(np.int64), batch, data_rank=0)[0]]
        rows = tuple(self.row(int(index)) for index in members)
        return BatchView(packed, rows, int(lengths[members].sum() if packed else lengths[members].max()))

    def worst(self) -> tuple[WorstView, ...]:
        kinds = worst_of(self.data, self.found.tokenizer)
        return tuple(WorstView(kind.title, tuple(self.row(*one) for one in kind.examples)) for kind in kinds)

    def named(self, name: str) -> list[RowView]:
        """Return the rows that `name` selects, a number from 1 or file:line. A row that is left out is shown
        whole, with the reason."""
        count = len(self.data)
        if name.isdecimal():
            if not 1 <= int(name) <= count:
                raise _no_row(name, f"there are {count:,}, numbered from 1")
            return [self.row(int(name) - 1)]
        which = [i for i in range(count) if _is_named(self.data.source(i), name)]
        rows = [self.row(i) for i in which] or list(self._left_out(name))
        if not rows:
            ends = (
                f"the first is {self.data.source(0)}, the last {self.data.source(count - 1)}" if count else ""
            )
            raise _no_row(name, ends or "no row is left to train on")
        return rows

    def _left_out(self, name: str) -> Iterator[RowView]:
        for source in self.found.sources:
            read = source[0]
            for place, reason in read.account.bad:
                if _is_named(place, name):
                    raise _no_row(name, f"it cannot be read: {reason}")
            for row in range(read.count):
                if _is_named(read.rows.source(row), name):
                    why = ", ".join([_fate(source, row), *kinds_of(source, row, self.found.spec)])
                    yield self._whole(read.rows, row, why)

    def _whole(self, rows: TokenRows | PairRows, row: int, why: str) -> RowView:
        """Return a left-out row, or both rows of a left-out pair, untruncated."""
        if isinstance(rows, PairRows):
            read = [rows.answers.read(2 * row), rows.answers.read(2 * row + 1)]
        else:
            read = [rows.read(row)]
        tokens = [tokens_of(one.input_ids, one.trained, self.found.tokenizer) for one in read]
        prompt = int(np.argmax(read[0].trained)) if len(read) > 1 else None
        segments = tuple(map(len, tokens))
        return RowView(None, rows.source(row), tuple(chain(*tokens)), segments, why, prompt=prompt)

    def _happened(self, index: int) -> str:
        """Return which part of its row an example has; "" if it has all of it."""
        at = int(np.searchsorted(self.data.ends, index, side="right"))
        part = self.data.parts[at]
        mine = index - (self.data.ends[at - 1] if at else 0)
        if isinstance(part, PairExamples):
            lost = int(lost_of(part)[mine])
            return f"truncated, {lost:,} tokens of both rows cut off" if lost else ""
        if not isinstance(part, RowExamples):
            return ""
        row = part.row_of(mine)
        begin, length, whole = int(part.begin[mine]), int(part.lengths[mine]), int(part.rows.lengths[row])
        if part.at is not None:
            return f"begins at token {begin:,} of {part.rows.source(row)}" if begin else ""
        if length == whole:
            return ""
        if part.headed is not None and part.headed[mine]:
            return f"token 0 and tokens {begin:,} to {begin + length - 2:,} of {whole:,}"
        return f"tokens {begin:,} to {begin + length - 1:,} of {whole:,}"


def _fate(source: SourceSelections, row: int) -> str:
    """Return why a row is in no training example."""
    if any(row in row_of(part) for part in parts_of([one.examples for one in source])):
        return "held out"
    return "left out" if source[0].rows.desirable[row] else "labeled undesirable, left out"


def _is_named(source: str, row: str) -> bool:
    return source == row or source.endswith(f"/{row}")


def _no_row(row: str, rule: str) -> SpecError:
    message = f"{row!r} is not one of the rows that are used; {rule}"
    return SpecError("no such row:", [Problem("--row", message)])


# --- for programs -----------------------------------------------------------------------------------------


def as_mapping(view: View) -> dict[str, Any]:
    """Return the view as JSON values.

    tokens    what each token adds to the text; a row's tokens together are its text
    segments  for a pair, the lengths of both answers, each with its `prompt`, or if that is `shared`, the
              second with the prompt's last token only
    """
    batch = view.micro_batch
    return {
        "name": view.name,
        "task": view.task,
        "examples": view.examples,
        "rows": [_row_mapping(row) for row in view.rows],
        "micro_batch": None
        if batch is None
        else {"packed": batch.packed, "width": batch.width, "rows": [_placed(row) for row in batch.rows]},
        "worst": {kind.title: [_placed(row) | {"why": row.why} for row in kind.rows] for kind in view.worst},
        "ledger": dict(view.ledgers),
        "told": list(view.messages),
        "lengths": None if view.lengths is None else asdict(view.lengths),
        "trained_share": view.trained_share,
        "batch": view.batch,
        "steps": None if view.steps is None else asdict(view.steps),
        "problems": {
            "counts": dict(view.problems.counts),
            "rows": [asdict(row) for row in view.problems.rows],
        },
        "refusal": None
        if view.refusal is None
        else {"title": view.refusal[0], "problems": [str(problem) for problem in view.refusal[1]]},
    }


def _row_mapping(row: RowView) -> dict[str, Any]:
    return {
        "source": row.source,
        "input_ids": [token.id for token in row.tokens],
        "tokens": [token.text for token in row.tokens],
        "trained": [token.trained for token in row.tokens],
    } | ({} if row.prompt is None else {"segments": row.segments, "prompt": row.prompt, "shared": row.shared})


def _placed(row: RowView) -> dict[str, Any]:
    """Return a row as JSON values, without its tokens."""
    return {
        "row": row.number,
        "source": row.source,
        "length": len(row.tokens),
        "trained": row.trained,
        "happened": row.happened,
    }
