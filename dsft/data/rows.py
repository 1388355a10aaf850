"""What flows from a file to its tokens: a line, what it means, what the model sees of it. Values alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsft.errors import DataError, Problem

MAX_SHOWN = 20
MAX_CHARACTERS = 500  # of a reason

Message = Mapping[str, Any]
"""As chat templates take it: {"role", "content"}, and what a call of a tool needs."""


class BadRowError(Exception):
    """Why a row cannot be used: the reason alone; whoever catches it knows the place."""


class EndlessTemplateError(BadRowError):
    """The chat template was stopped at its limit of CPU time, memory or written text."""


@dataclass(frozen=True, slots=True)
class Line:
    """A record of a file: `number` counts from 1 in its block; a blank line has neither row nor mistake."""

    number: int
    row: Mapping[str, Any] | None = None
    mistake: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Pieces of one text, and whether each is trained on."""

    parts: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """`trained`: of each message, what the row says of it; None, or empty: as data.train_on says."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    trained: tuple[bool | None, ...] = ()


Sample = Text | Conversation


@dataclass(frozen=True, slots=True)
class Row:
    """What a line means: one sample, or the chosen and the rejected one of a pair. label: desirable or not
    (KTO), None where a row has none."""

    samples: tuple[Sample, ...]
    label: bool | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """input_ids (T,) int32; trained (T,) bool: the token is to be predicted (t = 0 has nothing before it);
    ended: the last part that is trained on ends with its end of turn, or of text; spelled: the contents spell
    tokens of the chat template, which are read as plain text there."""

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    ended: bool = True
    spelled: bool = False


@dataclass(frozen=True)
class Account:
    """What was read of a source. bad: ("file:line", reason) of rows that cannot be used, the first of them;
    notes: a sentence per finding; formats: (file, format, why) of each file that has rows; unread: of files
    whose rows have no format that the task takes, as in `bad`, where they stand too."""

    blank_lines: int = 0
    bad_rows: int = 0
    bad: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    formats: tuple[tuple[str, str, str], ...] = ()
    unread: tuple[tuple[str, str], ...] = ()


class TokenRows(Protocol):
    """The tokens of one source's rows, whole, in the order of its files."""

    @property
    def account(self) -> Account: ...
    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of each row."""

    @property
    def trained(self) -> NDArray[np.int64]:
        """(n,) targets of each row: its trained tokens, never the first one."""

    @property
    def ended(self) -> NDArray[np.bool_]: ...
    @property
    def content(self) -> NDArray[np.uint64]:
        """(n,) a hash of what the row says, before it is tokens; equal rows are duplicates."""

    @property
    def desirable(self) -> NDArray[np.bool_]:
        """(n,) False: labelled as not to be learned (KTO)."""

    @property
    def digest(self) -> str:
        """sha256 over all rows' tokens and masks, in order."""

    def source(self, row: int) -> str:
        """Where the row stands: "file:line"."""

    def spans(self, row: int) -> NDArray[np.int64]:
        """(k, 2): where each run of its trained tokens starts and stops, without reading a token."""

    def spans_of(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of rows (k,), ascending: how many runs each has, (k,), and all their spans, one after the other."""

    def first_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """(k,): of rows (k,), ascending, each with a token; not checked against the disk's errors."""

    def read(self, row: int) -> Rendered: ...
    def read_part(self, row: int, start: int, stop: int) -> Rendered:
        """Its tokens from `start` to `stop`, without a copy of the others."""


def printable(text: str) -> str:
    """What a file holds as a message says it: escaped where a terminal would not show it or obey it, and cut
    short."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:MAX_CHARACTERS])
    return "".join(shown) + ("…" if len(text) > MAX_CHARACTERS else "")


def data_error(problems: Sequence[Problem], one: str, many: str, count: int | None = None) -> DataError:
    """Problems up to MAX_SHOWN in full, the rest as a number. count: of all, where fewer are given."""
    count = len(problems) if count is None else count
    title = f"{count:,} {one if count == 1 else many}:"
    shown = list(problems[:MAX_SHOWN])
    rest = count - len(shown)
    if rest:
        shown.append(Problem(f"… and {rest:,} more", f"the first {MAX_SHOWN} are shown"))
    return DataError(title, shown)
