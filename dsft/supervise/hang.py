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
    """Those without a pulse for `limit` seconds; where all have one, those without progress for as long, the
    least far first: a rank that has gone further waits for them."""
    ranks = list(ranks)
    silent = [each for each in ranks if each.silent > limit]
    if silent:
        return sorted(silent, key=lambda each: -each.silent)
    idle = [each for each in ranks if each.phase in AT_WORK and each.idle > limit]
    least = min((each.step or 0 for each in idle), default=0)
    return [each for each in idle if (each.step or 0) == least]


def sentence(found: list[Seen], limit: float) -> str:
    first = found[0]
    if first.silent > limit:
        what = f"has given no sign of life for {first.silent:.0f} seconds"
    else:
        what = f"has made no progress for {first.idle:.0f} seconds"
    others = "" if len(found) == 1 else f", nor rank(s) {', '.join(str(each.rank) for each in found[1:])}"
    return f"{what}{others} (cluster.hang_timeout {limit:g}); it was at {first.phase}"
