"""The exceptions that dsft raises for a user, each with its exit code.

DsftError                 70  an internal fault
├── SpecError              2  a mistake in the spec, an override or the command line
├── DataError             65  rows that cannot be trained on
├── MissingInputError     66  a file, folder or model that does not exist
├── WorldError            69  processes, hosts or devices that differ from what the spec says
├── LockedError           73  the run's folder is in use by another job, or belongs to another run
├── OutOfMemoryError      71  a micro-batch that does not fit into memory
├── BuildError            72  a DeepSpeed operation that cannot be compiled
├── StorageError          74  a disk that is full, not writable, or returns other bytes than were written;
│                             a hub that does not take an upload
├── StoppedError          75  stopped on request after saving; the same command resumes the run
├── CheckpointError       76  a checkpoint that is incomplete, altered or of another run
└── NonFiniteError        78  gradients that remain infinite or NaN

A message is one sentence: the value and its place, the rule, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_COLOR = r"\x1b\[[\d;]*m"
_CHARACTER = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_CONTROL = re.compile(_CHARACTER)
_CONTROL_OR_COLOR = re.compile(f"{_COLOR}|{_CHARACTER}")


def printable(text: str, *, keep_colors: bool = False) -> str:
    """Return the text with terminal control characters (all but line breaks and tabs), marks of the writing
    direction and lone surrogates, which UTF-8 cannot encode, written as escapes, such as \\x1b. Text that
    comes from a file passes through here before it is printed. keep_colors: leave escape sequences that set a
    color."""

    def escaped(found: re.Match[str]) -> str:
        is_color = len(found[0]) > 1
        return found[0] if is_color else found[0].encode("unicode_escape").decode("ascii")

    return (_CONTROL_OR_COLOR if keep_colors else _CONTROL).sub(escaped, text)


def brief(error: BaseException) -> str:
    """Return what a library's error says, in one line of at most 200 characters that can be printed."""
    text = " ".join(printable(str(error)).split())
    text = f"{type(error).__name__} {text}".strip() if isinstance(error, LookupError) or not text else text
    return text if len(text) <= 200 else f"{text[:199]}…"


class DsftError(Exception):
    """Base class of all errors of dsft. The message is printed without a traceback."""

    exit_code = 70
    of_one_rank = False  # True: raised on one rank only, which prints the message itself


@dataclass(frozen=True)
class Problem:
    """One mistake and its place.

    where    dotted path in the spec (`train.micro_batch_size`), or `file:line` of a data file
    message  one sentence: the value, the rule, and what to do
    line     line in the spec's file; None if the value comes from the command line or is a default
    """

    where: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}, {self.where}" if self.line is not None else self.where
        return f"{place}: {self.message}"


class ProblemsError(DsftError):
    """Several mistakes, reported together."""

    def __init__(self, title: str, problems: Sequence[Problem]) -> None:
        self.title = title
        self.problems = tuple(problems)
        super().__init__("\n".join([title, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[str, tuple[Problem, ...]]]:
        return type(self), (self.title, self.problems)  # rank 0 sends its errors to the others, pickled


class SpecError(ProblemsError):
    exit_code = 2


class DataError(ProblemsError):
    exit_code = 65


class MissingInputError(DsftError):
    exit_code = 66


class WorldError(DsftError):
    exit_code = 69


class OutOfMemoryError(DsftError):
    """Raised and printed by the rank whose memory is full; the other ranks wait for it in a collective."""

    exit_code = 71
    of_one_rank = True


class BuildError(DsftError):
    exit_code = 72


class LockedError(DsftError):
    exit_code = 73


class StorageError(DsftError):
    exit_code = 74


class DamagedDataError(StorageError):
    """Raised by the rank that read the damaged bytes."""

    of_one_rank = True


class StoppedError(DsftError):
    """A stop that was requested by a signal, a time limit or the end of the launcher; not a fault. Raised on
    every rank."""

    exit_code = 75


class CheckpointError(DsftError):
    exit_code = 76


class NonFiniteError(DsftError):
    exit_code = 78
