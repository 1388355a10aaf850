"""Load the data of a spec as a run would load it, and build the view: all that a preview shows, as one value
for the terminal, the page and JSON. Only the rows that are shown are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from dsft.data.cache.store import Cache, TokenizeProgress, cache_folder
from dsft.data.render.template import choose_template
from dsft.data.rows import Records
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import RunData, load_data
from dsft.data.sets.order import Order
from dsft.data.steps.pack import assign
from dsft.data.tokenizer.load import notes, open_tokenizer
from dsft.errors import Problem, SpecError
from dsft.preview.figures import LengthStats, StepStats, length_stats, step_stats
from dsft.preview.problems import (
    RowProblem,
    SourceSets,
    kinds_of,
    problems_of,
    worst_of,
)
from dsft.preview.tokens import Token, tokens_of
from dsft.spec.batch import BatchSizes
from dsft.spec.layout import batch_on, fewest_ranks, layout_of
from dsft.spec.schema import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RowView:
    """An example of the run, or a row that is left out.

    number    from 1, in the order of the files; None: left out
    segments  length of each segment; for a pair, of the chosen and of the rejected answer, each with the
              prompt
    extent    which tokens of its row an example has; "" if all
    why       the reason why it is shown
    shared    for a pair: the rejected answer follows only the last token of the prompt
    prompt    for a pair: number of tokens of the prompt; None: not a pair
    values    the fields that the loss uses, by name: of a label its name
    """

    number: int | None
    source: str
    tokens: tuple[Token, ...]
    segments: tuple[int, ...]
    extent: str = ""
    why: str = ""
    shared: bool = False
    prompt: int | None = None
    values: Mapping[str, str | float] = field(default_factory=dict)

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
class PreviewData:
    """The data of a spec. messages: a run's messages about its tokenizer and data. Examples are given by
    their index in `train`."""

    spec: Spec
    tokenizer: PreTrainedTokenizerBase
    batch: BatchSizes
    loaded: RunData
    messages: tuple[str, ...]

    @property
    def train(self) -> Dataset:
        return self.loaded.train

    @property
    def ledgers(self) -> Mapping[str, Mapping[str, Any]]:
        """The ledger of each training source by name, as in data.json."""
        sources: Mapping[str, Mapping[str, Any]] = self.loaded.account["train"]["sources"]
        return sources

    @cached_property
    def sources(self) -> tuple[SourceSets, ...]:
        """The sources of data.train, then of data.eval."""
        every = self.loaded.sources
        whole = [one for one in every if not one.is_split]
        return tuple(
            (read, *(one for one in every if one.is_split and one.records is read.records)) for read in whole
        )

    def row(self, index: int, why: str = "") -> RowView:
        example, is_pairs = self.train[index], self.train.answers > 1
        # The two segments of a pair are decoded separately, since no character spans their border.
        borders = np.cumsum(example.segment_lengths[:-1] if is_pairs else ()).astype(np.int64)
        parts = zip(np.split(example.input_ids, borders), np.split(example.trained, borders), strict=True)
        return RowView(
            index + 1,
            self.train.source(index),
            tuple(token for part in parts for token in tokens_of(*part, self.tokenizer)),
            example.segment_lengths,
            self.train.extent(index),
            why,
            shared=example.starts is not None,
            prompt=int(np.argmax(example.trained)) if is_pairs else None,
            values={
                name: self.train.labels[column[index]] if name == "label" else column[index].item()
                for name, column in self.train.values.items()
            },
        )

    def micro_batch(self) -> BatchView:
        batch, data = self.batch, self.train
        ids = Order(data, batch.global_batch_size, self.spec.train.seed).step(0).ids
        members = assign(data, ids, batch, data_rank=0)[0]
        packed, rows = batch.tokens_per_micro_batch is not None, tuple(map(self.row, members.tolist()))
        return BatchView(
            packed, rows, int(data.lengths[members].sum() if packed else data.widths[members].max())
        )

    def named(self, name: str) -> list[RowView]:
        """Return the rows that `name` selects, a number from 1 or file:line. A row that is left out is shown
        whole, with the reason. Raises SpecError if there is none."""
        data, count = self.train, len(self.train)
        if name.isdecimal():
            if not 1 <= int(name) <= count:
                raise _no_row(name, f"there are {count:,}, numbered from 1")
            return [self.row(int(name) - 1)]
        which = [i for i in range(count) if _is_named(data.source(i), name)]
        rows = [self.row(i) for i in which] or list(self._left_out(name))
        if not rows and count:
            raise _no_row(name, f"the first is {data.source(0)}, the last {data.source(count - 1)}")
        if not rows:
            raise _no_row(name, "no row is left to train on")
        return rows

    def _left_out(self, name: str) -> Iterator[RowView]:
        for source in self.sources:
            read = source[0]
            for place, reason in read.account.bad:
                if _is_named(place, name):
                    raise _no_row(name, f"it cannot be read: {reason}")
            for row in range(read.count):
                if _is_named(read.records.source(row), name):
                    if any(read.records.each * row in one.examples.row_ids for one in source):
                        fate = "held out"
                    else:
                        undesirable = not self.train.labels and read.records.values("label")[row] == 0
                        fate = "labeled undesirable, left out" if undesirable else "left out"
                    yield self._whole(read.records, row, ", ".join([fate, *kinds_of(source, row, self.spec)]))

    def _whole(self, records: Records, row: int, why: str) -> RowView:
        """Return a left-out row, or both rows of a left-out pair, untruncated."""
        read = records.read(row)
        tokens = [tokens_of(one.input_ids, one.trained, self.tokenizer) for one in read]
        prompt = int(np.argmax(read[0].trained)) if len(read) > 1 else None
        segments = tuple(map(len, tokens))
        return RowView(None, records.source(row), tuple(chain(*tokens)), segments, why, prompt=prompt)


def _is_named(source: str, row: str) -> bool:
    return source == row or source.endswith(f"/{row}")


def _no_row(row: str, rule: str) -> SpecError:
    return SpecError(
        "no such row:", [Problem("--row", f"{row!r} is not one of the rows that are used; {rule}")]
    )


def collect(
    spec: Spec,
    log: Callable[[str], None] = lambda text: None,
    progress: Callable[[TokenizeProgress], None] = lambda progress: None,
) -> PreviewData:
    """Load the data of a spec, with the batch sizes of its cluster or, without one, of the fewest processes
    that they fit. log, progress: callbacks, as in Cache. Raises MissingInputError for a missing file or
    tokenizer, SpecError if the batch sizes do not fit the ranks."""
    train = spec.train
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    processes = fewest_ranks(spec.parallel)
    if total and micro and steps:
        processes = total // (micro * steps) * spec.parallel.pipeline_stages * spec.parallel.sequence_parallel
    if spec.cluster:
        processes = sum(spec.cluster.hosts.values())
    batch = batch_on(spec, layout_of(spec.parallel, processes))
    tokenizer, added = open_tokenizer(spec.model)
    new_tokens = notes(tokenizer, added)
    choose_template(tokenizer, spec.data.chat_template, spec.data.thinking)
    cache = Cache(cache_folder(spec), spec.data.num_workers, log, progress)  # the cache that the run will use
    loaded = load_data(spec, tokenizer, cache, refuse=False)
    return PreviewData(spec, tokenizer, batch, loaded, (*new_tokens, *loaded.lines))


@dataclass(frozen=True)
class View:
    """All that a preview shows.

    rows     of the run's examples, those that are shown
    worst    title -> the worst examples of a kind
    problems kind of problem -> number of rows, and the first of them
    """

    data: PreviewData
    lengths: LengthStats | None
    trained_share: float
    steps: StepStats | None
    micro_batch: BatchView | None
    rows: Sequence[RowView]
    worst: Mapping[str, Sequence[RowView]]
    problems: Mapping[str, tuple[int, Sequence[RowProblem]]]

    @property
    def title(self) -> str:
        spec, examples = self.data.spec, "pair" if self.unit == "pair" else "example"
        return f"{spec.name}: {spec.task}, {len(self.data.train):,} {examples}s"

    @property
    def unit(self) -> str:
        return self.data.spec.task_kind.unit


def view(
    data: PreviewData,
    *,
    rows: int = 0,
    row: str | None = None,
    worst: bool = False,
    micro_batch: bool = False,
    problems: int = 0,
) -> View:
    """Build the view. rows: number of first examples; row: only that one, by its number or file:line;
    problems: number of rows of each kind. Raises SpecError if `row` does not exist."""
    train, spec, some = data.train, data.spec, len(data.train) > 0
    kinds = worst_of(train, data.tokenizer) if some and worst else {}
    return View(
        data,
        lengths=length_stats(train.lengths, spec.data.max_length) if some else None,
        trained_share=float(train.target_counts.sum() / max(1, train.lengths.sum())),
        steps=step_stats(train, spec, data.batch) if some else None,
        micro_batch=data.micro_batch() if some and micro_batch else None,
        rows=data.named(row) if row is not None else [data.row(i) for i in range(min(rows, len(train)))],
        worst={title: [data.row(*one) for one in examples] for title, examples in kinds.items()},
        problems=problems_of(data.sources, spec, problems),
    )


# --- for programs -----------------------------------------------------------------------------------------


def as_mapping(view: View) -> dict[str, Any]:
    """Return the view as JSON values.

    tokens    what each token adds to the text; a row's tokens together are its text
    segments  for a pair, the lengths of both answers, each with its `prompt`, or if that is `shared`, the
              second with the prompt's last token only
    """
    batch, data, problems, refusal = view.micro_batch, view.data, view.problems, view.data.loaded.refusal
    return {
        "name": data.spec.name,
        "task": data.spec.task,
        "examples": len(data.train),
        "rows": [_row_mapping(row) for row in view.rows],
        "micro_batch": batch
        and {"packed": batch.packed, "width": batch.width, "rows": [_placed(row) for row in batch.rows]},
        "worst": {
            title: [_placed(row) | {"why": row.why} for row in rows] for title, rows in view.worst.items()
        },
        "ledger": dict(data.ledgers),
        "told": list(data.messages),
        "lengths": view.lengths and asdict(view.lengths),
        "trained_share": view.trained_share,
        "batch": data.batch.equation(),
        "steps": view.steps and asdict(view.steps),
        "problems": {
            "counts": {kind: count for kind, (count, _) in problems.items()},
            "rows": [asdict(row) for _, rows in problems.values() for row in rows],
        },
        "refusal": refusal and {"title": refusal.title, "problems": list(map(str, refusal.problems))},
    }


def _row_mapping(row: RowView) -> dict[str, Any]:
    return {
        "source": row.source,
        "input_ids": [token.id for token in row.tokens],
        "tokens": [token.text for token in row.tokens],
        "trained": [token.trained for token in row.tokens],
        **row.values,
    } | ({} if row.prompt is None else {"segments": row.segments, "prompt": row.prompt, "shared": row.shared})


def _placed(row: RowView) -> dict[str, Any]:
    """Return a row as JSON values, without its tokens."""
    return {
        "row": row.number,
        "source": row.source,
        "length": len(row.tokens),
        "trained": row.trained,
        "happened": row.extent,
    }
