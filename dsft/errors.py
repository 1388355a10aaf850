"""What can go wrong, as the user meets it. Each class carries the exit code of the process.

DsftError                 70  an internal fault
├── SpecError              2  the spec, an override or the command line
├── DataError             65  rows that cannot be trained on
├── MissingInputError     66  a file, folder or model that is not there
├── WorldError            69  processes, hosts or devices other than promised
├── LockedError           73  the run's folder is used by another job, or holds another run
├── OutOfMemoryError      71  a micro-batch that does not fit into memory
├── BuildError            72  an operation of DeepSpeed's that cannot be compiled
├── StorageError          74  a disk that is full, cannot be written, or gives back other bytes
├── StoppedError          75  asked to stop: saved, and the same command goes on
├── CheckpointError       76  a checkpoint that is torn, altered or of another run
└── NonFiniteError        78  gradients that stay infinite or not a number

Messages are one sentence: the value and where it stands, the rule, the way out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_COLOUR = r"\x1b\[[\d;]*m"
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
_OBEYED = re.compile(_CONTROL)
_OBEYED_OR_COLOUR = re.compile(f"{_COLOUR}|{_CONTROL}")


def plain(text: str, *, colours: bool = False) -> str:
    """Return the text with every character that a terminal obeys instead of showing it written as an escape,
    such as \\x1b: control characters but line breaks and tabs, and marks of the writing direction. Whatever
    came from a file passes through here before it is printed. colours: leave sequences that set a colour."""
    if colours:
        return _OBEYED_OR_COLOUR.sub(
            lambda found: found[0] if len(found[0]) > 1 else _escaped(found[0]), text
        )
    return _OBEYED.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class DsftError(Exception):
    """The root: whoever catches it prints the message alone, without a traceback."""

    exit_code = 70
    of_one_rank = False  # True: only the rank that raises it can tell it


@dataclass(frozen=True)
class Problem:
    """One mistake, where it stands.

    `where` is a dotted path of the spec (`train.micro_batch_size`) or `file:line` of a data file;
    `line` the line in the spec's file, None where it comes from the command line or a default;
    `message` says value, rule and way out in one sentence.
    """

    where: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}, {self.where}" if self.line is not None else self.where
        return f"{place}: {self.message}"


class ProblemsError(DsftError):
    """Several mistakes, told together."""

    def __init__(self, title: str, problems: Sequence[Problem]) -> None:
        self.title = title
        self.problems = tuple(problems)
        super().__init__("\n".join([title, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[str, tuple[Problem, ...]]]:
        return type(self), (self.title, self.problems)  # rank 0 sends its errors to the others


class SpecError(ProblemsError):
    exit_code = 2


class DataError(ProblemsError):
    exit_code = 65


class MissingInputError(DsftError):
    exit_code = 66


class WorldError(DsftError):
    exit_code = 69


class OutOfMemoryError(DsftError):
    """Raised by the rank whose memory is full, and told by it, since the others wait for it."""

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
    """No fault: it was asked for by a signal, a time limit or the launcher's end. Raised on every rank."""

    exit_code = 75


class CheckpointError(DsftError):
    exit_code = 76


class NonFiniteError(DsftError):
    exit_code = 78
