"""Which rank is silent: takes what is known of each by its pulses, gives those that the others wait for.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

AT_WORK = frozenset({"data", "step", "evaluate", "save"})
"""Phases of the loop, each of which a rank begins again and again; in others (a load, an export) one may
take as long as it takes, and the pulse alone shows life."""


@dataclass(frozen=True)
class Seen:
    """Of one rank. silent, idle: seconds since its last pulse, and since its last progress."""

    rank: int
    host: str
    pid: int
    step: int | None
    phase: str
    silent: float
    idle: float


def hung(ranks: Iterable[Seen], limit: float) -> list[Seen]:
    """Those without a pulse for `limit` seconds. Where some rank has made no progress for as long, already
    those that miss pulses: the others wait for them, and what is known of each is up to two seconds old. Else
    those without progress, the least far first: a rank that has gone further waits for them."""
    ranks = list(ranks)
    idle = [each for each in ranks if each.phase in AT_WORK and each.idle > limit]
    silent = [each for each in ranks if each.silent > (_missing(limit) if idle else limit)]
    if silent:
        return sorted(silent, key=lambda each: -each.silent)
    least = min((each.step or 0 for each in idle), default=0)
    return [each for each in idle if (each.step or 0) == least]


def _missing(limit: float) -> float:
    """Seconds without a pulse, which comes every second, that a rank does not have which only waits."""
    return min(10.0, limit / 2)


def sentence(found: list[Seen], limit: float) -> str:
    first = found[0]
    if first.silent > _missing(limit):
        what = f"has given no sign of life for {first.silent:.0f} seconds"
    else:
        what = f"has made no progress for {first.idle:.0f} seconds"
    others = "" if len(found) == 1 else f", nor rank(s) {', '.join(str(each.rank) for each in found[1:])}"
    late = ", and others no progress for longer" if _missing(limit) < first.silent <= limit else ""
    return f"{what}{others}{late} (cluster.hang_timeout {limit:g}); it was at {first.phase}"
