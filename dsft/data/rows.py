"""The values between a data file and its tokens: Line, Row (of Text or Conversation), Rendered, TokenRows and
Records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsft.errors import DataError, Problem

MAX_SHOWN = 20
PLACES = 3  # named for one message
MAX_CHARACTERS = 500  # of a reason in a message

Message = Mapping[str, Any]
"""A message as chat templates take it: {"role", "content"} and, where needed, the keys of tool calls and of
reasoning."""


class BadRowError(Exception):
    """A row cannot be used. The message is the reason alone; the caller adds the file and line."""


class EndlessTemplateError(BadRowError):
    """The chat template exceeded its limit of CPU time, memory or output."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line or record of a file. number: from 1 within its block. A blank line has no row and no mistake."""

    number: int
    row: Mapping[str, Any] | None = None
    mistake: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """One text as (piece, whether it is trained on)."""

    parts: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation. trained: the row's own flag for each message; None, or an empty tuple:
    data.train_on decides."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    trained: tuple[bool | None, ...] = ()


Sample = Text | Conversation


class RowField(NamedTuple):
    """A number that a row has beside its tokens, from its format to the objective.

    column   its name in a block of the cache
    dtype    its numpy type there; micro-batches have int64 or float64
    missing  the number of rows that have none
    needed   whether a row without one is a bad row
    """

    column: str
    dtype: str
    missing: float = 0
    needed: bool = False


FIELDS: dict[str, RowField] = {
    "label": RowField("labels", "<i4", 1),  # the number of the row's class; for KTO 1, desirable, or 0
    "margin": RowField("margins", "<f8"),  # by how much the reward of the chosen answer is to be greater
}
"""The fields of rows, by name. A label is read by its format, another field by `formats.convert`, from the
column of its name, for tasks that have it in `TaskFacts.fields`. Objectives get them in `Answers.values`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A converted line: one sample, or the chosen and the rejected one of a pair. values: by the names of
    FIELDS, those that the row has, a number for each sample."""

    samples: tuple[Sample, ...]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A tokenized row.

    input_ids  (T,) int32
    trained    (T,) bool: the mask. The first token is never a target, whatever its mask
    ended      the last part that is trained on ends with its end-of-turn or end-of-text token
    spelled    the content spells tokens of the chat template, which were tokenized as plain text
    """

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    ended: bool = True
    spelled: bool = False


@dataclass(frozen=True)
class Account:
    """What was found while reading a source.

    bad      ("file:line", reason) of the first of the `bad_rows`
    notes    a sentence per finding
    formats  (file, format, reason) of each file that has rows
    unread   ("file:line", reason) of each file that has no format that the task takes, so that none of its
             rows is read; these are in `bad`, too
    share    of the source's rows that were read, less than 1 for a sample
    """

    blank_lines: int = 0
    bad_rows: int = 0
    bad: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    formats: tuple[tuple[str, str, str], ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    share: float = 1.0


class TokenRows(Protocol):
    """The tokens of the n rows of a source, in the order of its files, before any truncation."""

    @property
    def account(self) -> Account: ...
    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) number of tokens of each row."""

    @property
    def trained(self) -> NDArray[np.int64]:
        """(n,) number of targets of each row; the first token is never one."""

    @property
    def ended(self) -> NDArray[np.bool_]: ...
    @property
    def content(self) -> NDArray[np.uint64]:
        """(n,) a hash of each row's content before tokenization; rows with equal hashes are duplicates."""

    @property
    def values(self) -> Mapping[str, NDArray[Any]]:
        """By the names of FIELDS, `label` and those of the task: (n,) the number of each row."""

    @property
    def digest(self) -> str:
        """sha256 over all rows' tokens and masks, in order."""

    def source(self, row: int) -> str:
        """Return the row's place, "file:line"."""

    def spans(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for ascending rows (k,), the number of spans (runs of targets) of each, (k,), and start and
        stop of all of them, (n, 2). No tokens are read."""

    def first_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the first token of each of the rows (k,), which are ascending and not empty."""

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Rendered:
        """Return tokens `start` to `stop` of a row, without copying the others; by default all."""


@dataclass(frozen=True, eq=False)
class Records:
    """The n records of a source's files, each of them a `unit` ("row" or "pair"). Record i is the `each` rows
    from i × `each` on: one, or the two of a preference pair, which are the prompt with the chosen and with
    the rejected answer."""

    rows: TokenRows
    each: int
    unit: str = "row"

    def __post_init__(self) -> None:
        if len(self.rows.lengths) % self.each:
            count = len(self.rows.lengths)
            rule = f"is the last of {count:,} rows, but a {self.unit} is {self.each} rows; add or remove rows"
            title = f"The rows of a source do not make whole {self.unit}s:"
            raise DataError(title, [Problem(self.rows.source(count - 1), rule)])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of all rows of each record."""
        return self._joined(np.add, self.rows.lengths)

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        """(n,) tokens of each record's longest row, which data.max_length limits."""
        return self._joined(np.maximum, self.rows.lengths)

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """(n,) targets of each record; 0 if one answer of a pair has none, since then there is nothing to
        compare."""
        least = self._joined(np.minimum, self.rows.trained)
        return least if self.each == 1 else np.where(least, self._joined(np.add, self.rows.trained), 0)

    @cached_property
    def ended(self) -> NDArray[np.bool_]:
        return self._joined(np.logical_and, self.rows.ended)

    @property
    def content(self) -> NDArray[np.uint64]:
        """(n,) a hash of each record's content."""
        return self.rows.content[:: self.each]

    def values(self, name: str) -> NDArray[Any]:
        """Return a field of the first row of each record, (n,)."""
        return self.rows.values[name][:: self.each]

    def source(self, record: int) -> str:
        """Return the record's place, "file:line"."""
        return self.rows.source(self.each * record)

    def read(self, record: int) -> list[Rendered]:
        return [self.rows.read(row) for row in range(self.each * record, self.each * (record + 1))]

    def _joined(self, how: np.ufunc, column: NDArray[T]) -> NDArray[T]:
        return joined(how, column.reshape(-1, self.each))


T = TypeVar("T", bound=np.generic)


def joined(how: np.ufunc, columns: NDArray[T]) -> NDArray[T]:
    """Return a matrix (n, k) reduced over k, (n,); without a copy if k is 1."""
    if columns.shape[1] == 1:
        return columns[:, 0]
    reduced: NDArray[T] = how.reduce(columns, axis=1, dtype=columns.dtype)
    return reduced


def printable(text: str) -> str:
    """Return text from a file in a form that is safe in a message: non-printable characters escaped, and at
    most MAX_CHARACTERS long."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:MAX_CHARACTERS])
    return "".join(shown) + ("…" if len(text) > MAX_CHARACTERS else "")


def data_error(problems: Sequence[Problem], title: str, count: int) -> DataError:
    """Return a DataError that lists up to MAX_SHOWN different messages, each with its first PLACES places,
    and counts the other problems. count: the number of all, of which `problems` may hold only the first."""
    places: dict[str, list[str]] = {}
    for problem in problems:
        places.setdefault(problem.message, []).append(problem.where)
    messages = list(places)[:MAX_SHOWN]
    shown = [Problem(_first_of(places[message]), message) for message in messages]
    listed = sum(len(places[message]) for message in messages)
    if listed < count:
        shown.append(Problem(f"… and {count - listed:,} more", f"the first {listed:,} are shown"))
    return DataError(title, shown)


def _first_of(places: Sequence[str]) -> str:
    rest = len(places) - PLACES
    return ", ".join(places[:PLACES]) + (f" and {rest:,} more" if rest > 0 else "")
