"""What failed first, and the exit code of the whole: takes failures in the order in which they were heard of,
gives the one that the others follow from. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsft.supervise.logs import is_consequence

STOPPED = 75
HUNG = 124
WORLD = 69

Kind = Literal["rank", "launcher", "host", "hang"]

NOT_AGAIN = frozenset({0, 2, 65, 66, 72, 73, STOPPED, 76, 77, 78})
"""Exit codes that a second start would end with too: see dsft/errors.py."""


@dataclass(frozen=True)
class Failure:
    """code: of the shell's kind (128 + signal); None where nobody knows it. message: what it said, one
    error's text. lines: the end of its log."""

    kind: Kind
    host: str
    code: int | None
    message: str | None = None
    rank: int | None = None
    step: int | None = None
    lines: tuple[str, ...] = ()

    def where(self) -> str:
        if self.rank is None:
            return self.host
        step = "" if self.step is None else f", step {self.step}"
        return f"rank {self.rank} on {self.host}{step}"

    def text(self) -> str:
        return f"{self.where()}: {self.message or ended_with(self.code)}"

    def is_consequence(self) -> bool:
        """Whether it only says that another process or host is gone."""
        if self.kind in {"host", "hang"}:
            return False
        return self.message is not None and is_consequence(self.message)


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Ranks speak for themselves before their launcher does, and before what follows from them."""
    order = [
        [each for each in failures if each.kind == "hang"],
        [each for each in failures if each.kind == "rank" and not each.is_consequence() and _is_told(each)],
        [each for each in failures if each.kind == "host"],
        [each for each in failures if each.kind == "rank" and not each.is_consequence()],
        [each for each in failures if each.kind == "launcher" and not each.is_consequence()],
        list(failures),
    ]
    return next((found[0] for found in order if found), None)


def _is_told(failure: Failure) -> bool:
    """It said what was wrong, or a signal that no launcher sends killed it."""
    return failure.message is not None or (
        failure.code is not None and failure.code > 128 and failure.code != 128 + signal.SIGTERM
    )


def exit_code(failure: Failure | None) -> int:
    """Of the command, where something failed. 1 where nobody knows better."""
    if failure is None:
        return 0
    if failure.kind == "hang":
        return HUNG
    if failure.kind == "host":
        return WORLD
    return failure.code or 1


def may_pass(failure: Failure, code: int) -> bool:
    """Whether a new start may go further: not where the spec, the data or the checkpoint is at fault."""
    if code == WORLD:
        return failure.kind == "host"
    return code not in NOT_AGAIN


def shell_code(code: int) -> int:
    """Of a process's own: a signal's negative number becomes 128 + it, also as a launcher hands it on
    (sys.exit(-9) ends with 247)."""
    if code < 0:
        return 128 - code
    return 128 + 256 - code if code > 256 - 32 else code


def ended_with(code: int | None) -> str:
    if code is None:
        return "ended, with an exit code that nobody saw"
    return f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
