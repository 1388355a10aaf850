"""The examples of a run, in memory, and the account of what became of every row.

Takes the spec's sources and a tokenizer. Gives a Dataset. Reads the data files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from dsft.data.masks import TrainOn
from dsft.data.render import Renderer
from dsft.data.rows import data_error
from dsft.data.store import IN_MEMORY, Cache, Source, tokenised
from dsft.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnTooLong = Literal["error", "drop", "truncate", "split", "fill"]
"""What becomes of rows over max_length. fill, for packed pretraining: no row is too long, all are laid one
after the other into rows of exactly max_length tokens."""


@dataclass(frozen=True, eq=False)
class Example:
    """input_ids (T,) int32; trained (T,) bool: token t is to be predicted (never so for t = 0, which has
    nothing before it); source "file:line"; segments: tokens of each piece that sees only itself, in a row of
    several documents (whose first tokens are not trained either)."""

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    source: str
    segments: tuple[int, ...] | None = None

    @property
    def target_count(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return self.segments or (len(self.input_ids),)


@dataclass(frozen=True)
class Ledger:
    """What became of the rows. Lengths and counts are in tokens, the others in rows.

    rows            read from the files, blank lines not among them
    examples        trained on; more than rows where rows were split
    tokens          of the examples
    trained_tokens  targets of the examples
    blank_lines     skipped in the files
    dropped         rows longer than max_length that were left out
    truncated       rows cut at max_length
    split           rows of which several examples have a part
    lost_tokens     of dropped and truncated rows
    without_target  rows left out because nothing of them is trained on (after truncation, too)
    """

    rows: int
    examples: int
    tokens: int
    trained_tokens: int
    blank_lines: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    lost_tokens: int = 0
    without_target: int = 0

    def text(self) -> str:
        """One paragraph; what did not happen is left out."""
        said = [f"{self.rows:,} rows gave {self.examples:,} examples of {self.tokens:,} tokens,"]
        said.append(f"{self.trained_tokens:,} of them trained on.")
        happened = (
            (self.dropped, "too long and dropped"),
            (self.truncated, "truncated"),
            (self.split, "split"),
            (self.without_target, "left out, with nothing to train on"),
        )
        said += [f"{count:,} {_rows(count)} {what}." for count, what in happened if count]
        if self.lost_tokens:
            said.append(f"{self.lost_tokens:,} tokens were cut off or dropped.")
        if self.blank_lines:
            lines = "line was" if self.blank_lines == 1 else "lines were"
            said.append(f"{self.blank_lines:,} blank {lines} skipped.")
        return " ".join(said)


def _rows(count: int) -> str:
    return "row was" if count == 1 else "rows were"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples in the order of the files, never empty. `notes`: a sentence per finding."""

    examples: tuple[Example, ...]
    ledger: Ledger
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of each example."""
        return np.array([len(example.input_ids) for example in self.examples], dtype=np.int64)

    @cached_property
    def target_counts(self) -> NDArray[np.int64]:
        """(n,) targets of each example."""
        return np.array([example.target_count for example in self.examples], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all lengths, tokens and masks, in order: what a resumed run must find unchanged."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for example in self.examples:
            digest.update(example.input_ids.astype("<i4").tobytes())
            digest.update(example.trained.tobytes())
            if example.segments is not None:
                digest.update(np.array(example.segments, dtype="<i8").tobytes())
        return digest.hexdigest()


def load_dataset(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: str,
    max_length: int,
    on_too_long: OnTooLong,
    train_on: TrainOn = "assistant",
    cache: Cache = IN_MEMORY,
) -> Dataset:
    """Read, check, render and cut all rows.

    `max_length` in tokens. Raises MissingInputError for a file that is not there, and DataError with every
    bad row, or where nothing is left to train on.
    """
    if on_too_long in ("split", "fill") and task != "pretrain":
        rule = f"{on_too_long} is for pretraining, and the task is {task}; use error, drop or truncate"
        raise DataError("too long rows cannot be cut so:", [Problem("data.on_too_long", rule)])
    renderer = Renderer(tokenizer, train_on=train_on)
    read = [tokenised(source, renderer, task=task, cache=cache) for source in sources]
    bad = [Problem(*problem) for part in read for problem in part.account.bad]
    if bad:
        raise data_error(bad, "mistake in the data", "mistakes in the data")
    notes = tuple(note for part in read for note in part.account.notes)
    whole = [
        Example(row.input_ids, row.trained, part.source(i))
        for part in read
        for i, row in ((i, part.read(i)) for i in range(len(part.lengths)))
    ]
    if not whole:
        names = ", ".join(str(source.path) for source in sources) or "no file given"
        raise DataError("no rows to train on:", [Problem(names, "holds no row; give a file with rows")])
    examples, ledger = _cut(whole, max_length, on_too_long)
    kept = [example for example in examples if example.target_count > 0]
    ledger = replace(
        ledger,
        examples=len(kept),
        tokens=sum(len(example.input_ids) for example in kept),
        trained_tokens=sum(example.target_count for example in kept),
        blank_lines=sum(part.account.blank_lines for part in read),
        without_target=len(examples) - len(kept),
    )
    if not kept:
        raise DataError("no rows are left to train on:", [Problem("data", _nothing_left(ledger, max_length))])
    return Dataset(tuple(kept), ledger, notes)


def _nothing_left(ledger: Ledger, max_length: int) -> str:
    return (
        f"{ledger.rows} rows were read, {ledger.dropped} dropped as longer than data.max_length "
        f"({max_length} tokens), {ledger.without_target} left out with nothing to train on "
        f"({ledger.truncated} rows had been truncated); raise data.max_length or look at the rows"
    )


def _cut(
    examples: Sequence[Example], max_length: int, on_too_long: OnTooLong
) -> tuple[list[Example], Ledger]:
    """The examples of at most `max_length` tokens, and how many rows were longer."""
    if on_too_long == "fill":
        return full_rows(examples, max_length)
    ledger = Ledger(rows=len(examples), examples=0, tokens=0, trained_tokens=0)
    too_long = [example for example in examples if len(example.input_ids) > max_length]
    tokens = sum(len(example.input_ids) for example in too_long)
    if not too_long:
        return list(examples), ledger
    if on_too_long == "error":
        raise data_error([_too_long(e, max_length) for e in too_long], "row is too long", "rows are too long")
    if on_too_long == "drop":
        short = [example for example in examples if len(example.input_ids) <= max_length]
        return short, replace(ledger, dropped=len(too_long), lost_tokens=tokens)
    if on_too_long == "truncate":
        ledger = replace(ledger, truncated=len(too_long), lost_tokens=tokens - max_length * len(too_long))
        return [_piece(example, 0, max_length) for example in examples], ledger
    pieces = [piece for example in examples for piece in _pieces(example, max_length)]
    return pieces, replace(ledger, split=len(too_long))


def _too_long(example: Example, max_length: int) -> Problem:
    return Problem(
        example.source,
        f"{len(example.input_ids)} tokens, data.max_length is {max_length}; raise it or set data.on_too_long",
    )


def _piece(example: Example, start: int, stop: int) -> Example:
    return Example(example.input_ids[start:stop], example.trained[start:stop], example.source)


def _pieces(example: Example, max_length: int) -> list[Example]:
    """Pieces that overlap by one token, so that every token but the first is a target exactly once."""
    starts = range(0, max(1, len(example.input_ids) - 1), max_length - 1)
    return [_piece(example, start, start + max_length) for start in starts]


def full_rows(documents: Sequence[Example], length: int) -> tuple[list[Example], Ledger]:
    """Rows of `length` tokens, the last one of what is left: the documents one after the other, cut where a
    row is full, every token once. A piece of a document is a segment of its own, so the first token of a row
    is trained in no row."""
    ids = np.concatenate([document.input_ids for document in documents])
    trained = np.concatenate([document.trained for document in documents])
    sizes = np.array([len(document.input_ids) for document in documents])
    ends = np.cumsum(sizes)
    rows = np.arange(0, len(ids), length)
    starts = np.union1d(np.concatenate([[0], ends[:-1]]), rows)  # of the pieces
    trained[starts] = False
    lengths = np.diff(starts, append=len(ids))
    of_row = np.split(lengths, np.searchsorted(starts, rows[1:]))
    sources = [documents[which].source for which in np.searchsorted(ends, rows, side="right")]
    examples = [
        Example(ids[start : start + length], trained[start : start + length], source, tuple(pieces.tolist()))
        for start, source, pieces in zip(rows, sources, of_row, strict=True)
    ]
    split = np.count_nonzero((ends - sizes) // length != (ends - 1) // length)
    return examples, Ledger(rows=len(documents), examples=0, tokens=0, trained_tokens=0, split=int(split))
