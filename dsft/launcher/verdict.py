"""Decide what is wrong with a run: which rank hangs, what failed first, and the exit code of the whole, from
heartbeats, the ends of logs, and failures in order of arrival. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

STOPPED = 75
HUNG = 124
WORLD = 69
HEADING = "--- rank "  # begins a start in a rank's log: dsft/rank/heartbeat.py

Kind = Literal["rank", "host", "hang"]

NO_RESTART = frozenset({0, 2, 65, 66, 72, 73, STOPPED, 76, 77, 78})
"""Exit codes for which a restart is useless, since it would end the same way: see dsft/errors.py."""

TRAINING_PHASES = frozenset({"data", "step", "evaluate", "save"})
"""Phases in which a rank must make progress, because it enters them again and again. Other phases (load,
export) may take any time; there only the heartbeat shows that a rank lives."""

CONSEQUENCES = (
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)",
    r"closed by peer",
    r"[Bb]roken pipe",
    r"remote process (?:has )?exited",
    r"NCCL (?:communicator was aborted|operation timed out)",
    r"ncclRemoteError|ncclSystemError|unhandled system error",
    r"[Tt]imed out (?:waiting|after)",
    r"[Ss]ocket [Tt]imeout",
    r"Application timeout caused pair closure",
    r"TCPStore",
    r"has ended too early",  # dsft/run/main.py
)
"""Messages of a rank whose peer or host is gone: from gloo, NCCL, torch's store, and dsft itself."""

_CONSEQUENCE = re.compile("|".join(CONSEQUENCES))


@dataclass(frozen=True)
class Failure:
    """One failure of a run.

    code     as a shell reports it (128 + signal); None if unknown
    message  the text of one error
    lines    the end of its log
    """

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

    def headline(self) -> str:
        """Return what is said at once; `text` has the reason, and is said at the end."""
        what = {"host": "is lost", "hang": "hangs"}
        return f"{self.where()} {what.get(self.kind, 'has failed')}"

    def text(self) -> str:
        return f"{self.where()}: {self.message or ended_with(self.code or 1)}"

    def is_consequence(self) -> bool:
        """Return whether the message only says that another process or host is gone."""
        if self.kind in {"host", "hang"}:
            return False
        return self.message is not None and is_consequence(self.message)


@dataclass(frozen=True)
class Outcome:
    """The result of one start.

    code     exit code of the command
    failure  the first real failure
    lost     hosts that did not answer or were lost
    stacks   ranks of a hung run that have written their stacks
    """

    code: int
    failure: Failure | None
    lost: tuple[str, ...]
    seconds: float
    stacks: tuple[int, ...] = ()

    @property
    def error(self) -> str | None:
        return self.failure.text() if self.failure else None


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the most likely cause; None without failures. In this order: a hang, an error that a rank
    reported, a lost host, a rank that ended without a message, and last a failure that is a consequence."""
    order = [
        [each for each in failures if each.kind == "hang"],
        [
            each
            for each in failures
            if each.kind == "rank" and not each.is_consequence() and _is_explained(each)
        ],
        [each for each in failures if each.kind == "host"],
        [each for each in failures if each.kind == "rank" and not each.is_consequence()],
        list(failures),
    ]
    return next((found[0] for found in order if found), None)


def _is_explained(failure: Failure) -> bool:
    """Return whether the rank reported an error, or was killed by a signal other than SIGTERM."""
    return failure.message is not None or (
        failure.code is not None and failure.code > 128 and failure.code != 128 + signal.SIGTERM
    )


def exit_code(failure: Failure | None) -> int:
    """Return the exit code of the command; 1 if a failure has none."""
    if failure is None:
        return 0
    if failure.kind == "hang":
        return HUNG
    if failure.kind == "host":
        return WORLD
    return failure.code or 1


def may_succeed(failure: Failure, code: int) -> bool:
    """Return whether a restart may succeed: not if the spec, the data or the checkpoint is at fault."""
    if code == WORLD:
        return failure.kind == "host"
    return code not in NO_RESTART


def shell_code(code: int) -> int:
    """Return a process's exit code as a shell reports it: 128 + the signal that killed it."""
    return 128 - code if code < 0 else code


def ended_with(code: int) -> str:
    return f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"


def is_consequence(text: str) -> bool:
    return _CONSEQUENCE.search(text) is not None


def error_in(lines: Sequence[str]) -> str | None:
    """Return the last error in the lines: the text after dsft's own `error: `, else the last line of a
    traceback."""
    errors = [line for line in lines if re.match(r"(?:dsft/train\.py: )?error: ", line)]
    if errors:
        return re.sub(r"^(?:dsft/train\.py: )?error: ", "", errors[-1])
    starts = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if not starts:
        return None
    indent = lines[starts[-1]].partition("Traceback")[0]  # torchrun's prefix, or none
    for line in lines[starts[-1] + 1 :]:
        text = line.removeprefix(indent)
        if text and not text[0].isspace():
            return text
    return None


def shown_lines(lines: Sequence[str], message: str | None) -> list[str]:
    """Return the lines of a log without headings, and without a rank's `error: ` of this message, which the
    supervisor prints at the end."""
    shown = [line for line in lines if not line.startswith(HEADING)]
    first, *rest = (message or "").split("\n")
    for number, line in enumerate(shown):
        if first and line.startswith("error: ") and line.endswith(first):
            del shown[number : number + 1 + len(rest)]
            break
    return shown


@dataclass(frozen=True)
class RankActivity:
    """What a rank last reported, and how long ago. silent: seconds since its last heartbeat; idle: seconds
    since it last made progress."""

    rank: int
    host: str
    step: int | None
    phase: str
    silent: float
    idle: float


def hung_ranks(ranks: Iterable[RankActivity], limit: float) -> list[RankActivity]:
    """Return the ranks that hang.

    These are the ranks without a heartbeat for `limit` seconds. If some rank has made no progress for that
    long, ranks that miss heartbeats for a shorter time count already: the others wait for them, and reported
    ages may be up to two seconds old. If all send heartbeats, these are the ranks without progress that have
    the lowest step, since ranks at a later step wait for them.
    """
    ranks = list(ranks)
    idle = [each for each in ranks if each.phase in TRAINING_PHASES and each.idle > limit]
    silent = [each for each in ranks if each.silent > (_missing(limit) if idle else limit)]
    if silent:
        return sorted(silent, key=lambda each: -each.silent)
    least = min((each.step or 0 for each in idle), default=0)
    return [each for each in idle if (each.step or 0) == least]


def _missing(limit: float) -> float:
    """Seconds without a heartbeat (one is sent per second) that rule out a rank that is only waiting."""
    return min(10.0, limit / 2)


def hang_message(found: list[RankActivity], limit: float) -> str:
    first = found[0]
    if first.silent > _missing(limit):
        what = f"has sent no heartbeat for {first.silent:.0f} seconds"
    else:
        what = f"has made no progress for {first.idle:.0f} seconds"
    others = "" if len(found) == 1 else f", like rank(s) {', '.join(str(each.rank) for each in found[1:])}"
    late = ", and others have made no progress for longer" if _missing(limit) < first.silent <= limit else ""
    return f"{what}{others}{late} (cluster.hang_timeout {limit:g}); its phase was {first.phase}"
