"""What every host is doing, in the record of each logged step: takes this rank's figures, gives all ranks' by
host, and names a rank that lags behind the others. Pure, but for reading this process's and host's memory.

The figures of all ranks travel in one tensor, in the all-reduce that the loop makes for the losses anyway:
each rank fills its own row of zeros.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import psutil
import torch
from torch import Tensor

from dsft.data.steps.copies import to_device
from dsft.plan.memory.sizes import GIB
from dsft.report.memory import resident

LAGS, LAGS_NOT = 1.3, 1.15
"""A rank's own work ÷ the others', from which on it lags, and under which it no longer does."""
LOST = 0.1
"""Of a step: less than that, spent waiting for the slowest, is not worth a line."""
RECORDS, STEPS, SECONDS = 5, 20, 10.0
"""The fewest that a verdict rests on. One slow step, or rows of unequal length, are no lagging rank, and a
moment of another program's is none."""
JUDGED_EVERY = 1.0  # seconds: runs with quicker records are looked at after several
MOSTLY = 0.75
"""In so many of these records, at least, the rank is the slowest, and by more than LAGS_NOT."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and which stage of a pipeline."""

    host: str
    local_rank: int
    stage: int = 0


class Spent(NamedTuple):
    """One rank's part of a window of steps. seconds: from its first step's begin to its last one's end,
    evaluations and checkpoints left out; waiting: of these, for other ranks; data: for the next batch;
    tokens: positions that went through the model; bytes: of this process, of the host's memory in use, and
    the largest that torch has allocated on the GPU."""

    steps: float
    seconds: float
    waiting: float
    data: float
    tokens: float
    resident: float
    host_used: float
    allocated: float = 0.0

    @property
    def own(self) -> float:
        """Seconds that were this rank's own doing: its work and its data."""
        return max(self.seconds - self.waiting, 0.0)


WIDTH = len(Spent._fields)


class Waits(Protocol):
    """`dsft.engine.waiting.Waiting`."""

    def counted(self) -> AbstractContextManager[None]: ...
    def taken(self) -> float: ...


class HostWatch:
    """places: of every rank. say: takes one line; only rank 0 has a record and something to say."""

    def __init__(
        self,
        places: Sequence[Place],
        rank: int,
        waits: Waits,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._places, self._rank, self._waits, self._device = places, rank, waits, device
        self._names = host_names(places)
        self._lag = Lag(places, self._names)
        self._say = say

    def counted(self) -> AbstractContextManager[None]:
        """Around a step, its data and all."""
        return self._waits.counted()

    def mine(self, steps: int, began: float, data: float, tokens: int) -> Tensor:
        """(ranks · WIDTH,) float64 on the device: this rank's row, the others' are 0. Of the window that
        began at `began` of time.perf_counter: its steps, seconds of wait for data, and positions computed.
        Does not wait for the device."""
        waiting = self._waits.taken()
        seconds = time.perf_counter() - began
        allocated = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        used = psutil.virtual_memory().used if self._places[self._rank].local_rank == 0 else 0
        spent = Spent(steps, seconds, waiting, data, tokens, resident(), used, allocated)
        rows = torch.zeros(len(self._places), WIDTH, dtype=torch.float64)
        rows[self._rank] = torch.tensor(spent, dtype=torch.float64)
        return to_device(rows.flatten(), self._device)

    def record(self, everyones: Tensor) -> dict[str, float]:
        """Of the sum of all ranks' `mine`."""
        if self._rank != 0:
            return {}
        ranks = [Spent(*row) for row in everyones.view(-1, WIDTH).tolist()]
        record = host_record(self._names, ranks) | self._lag.record(ranks)
        for line in self._lag.add(ranks):
            self._say(line)
        return record


def host_names(places: Sequence[Place]) -> list[str]:
    """Each rank's host, as it stands in a metric's name: the first label of the host's name where that tells
    the hosts apart, letters, digits, - and _ alone. Two hosts of one name get a number: a local rank stands
    once on a host."""
    hosts: dict[tuple[str, int], str] = {}
    seen: Counter[tuple[str, int]] = Counter()
    keys = []
    for place in places:
        keys.append((place.host, seen[place.host, place.local_rank]))
        seen[place.host, place.local_rank] += 1
    short = {key: re.sub(r"[^A-Za-z0-9_-]+", "-", key[0].partition(".")[0]) for key in dict.fromkeys(keys)}
    common = Counter(short.values())
    for key, name in short.items():
        if common[name] > 1:  # a.one and a.two, or the same name on two machines
            name = re.sub(r"[^A-Za-z0-9_-]+", "-", key[0])
        wanted, number = name or "host", 1
        while (name := wanted if number == 1 else f"{wanted}_{number}") in hosts.values():
            number += 1
        hosts[key] = name
    return [hosts[key] for key in keys]


def host_record(names: Sequence[str], ranks: Sequence[Spent]) -> dict[str, float]:
    """host/NAME/… of every host, from its ranks'."""
    record: dict[str, float] = {}
    hosts: dict[str, list[Spent]] = {}
    for name, spent in zip(names, ranks, strict=True):
        hosts.setdefault(name, []).append(spent)
    for name, mine in hosts.items():
        figures = {
            "step_time": max(spent.seconds / spent.steps for spent in mine),
            "work_time": max(spent.own / spent.steps for spent in mine),
            "data_wait_fraction": max(spent.data / spent.seconds for spent in mine),
            "rss_gib": sum(spent.resident for spent in mine) / GIB,
            "memory_used_gib": max(spent.host_used for spent in mine) / GIB,
        }
        if any(spent.allocated for spent in mine):
            figures["peak_allocated_gib"] = max(spent.allocated for spent in mine) / GIB
        record |= {f"host/{name}/{figure}": value for figure, value in figures.items()}
    return record


class Lag:
    """Which rank lags, over the last records.

    A rank is compared with those that do the same work: all, or its pipeline stage's. Stages differ by
    nature; where each is one rank, a rank's part of all ranks' work is compared with the part that it had in
    the first records, so one that is slow from the start is taken for a large stage.
    """

    def __init__(self, places: Sequence[Place], names: Sequence[str], seconds: float = SECONDS) -> None:
        self._places, self._names, self._seconds = places, names, seconds
        stages = {place.stage for place in places}
        self._by_itself = len(stages) == len(places)  # nobody does the same work
        everyone = range(len(places))
        self._groups = (
            [list(everyone)]
            if self._by_itself
            else [[rank for rank in everyone if places[rank].stage == stage] for stage in sorted(stages)]
        )
        self._usual: list[float] | None = None if self._by_itself else [1.0] * len(places)
        self._recent: deque[_Window] = deque()
        self._held = _Held()
        self._unjudged = 0.0  # seconds
        self._named: int | None = None

    def record(self, ranks: Sequence[Spent]) -> dict[str, float]:
        """Of one window: the slowest rank's own work ÷ what its peers say it should be (1: nobody is behind),
        and which rank that is. Nothing for one rank, and until a pipeline's usual parts are known."""
        slowest = self._slowest(ranks)
        if slowest is None:
            return {}
        return {"rel/straggler_ratio": max(slowest.ratio, 1.0), "rel/straggler_rank": slowest.rank}

    def add(self, ranks: Sequence[Spent]) -> list[str]:
        """What there is to say after this window."""
        if len(ranks) < 2:
            return []
        recent = self._recent
        recent.append(_Window(ranks, self._slowest(ranks)))
        self._held = self._held.after(ranks[0], 1)
        while (without := self._held.after(recent[0].ranks[0], -1)).suffices(self._seconds):
            recent.popleft()
            self._held = without
        self._unjudged += ranks[0].seconds
        if self._unjudged < JUDGED_EVERY or not self._held.suffices(self._seconds):
            return []
        self._unjudged = 0.0
        total = [_summed(windows) for windows in zip(*(window.ranks for window in recent), strict=True)]
        if self._usual is None:
            self._usual = [max(spent.own, 1e-9) for spent in total]
            recent.clear()
            self._held = _Held()
            return []
        behind = self._behind(total)
        lines = []
        if self._named is not None and behind[self._named].ratio < LAGS_NOT:
            lines.append(f"{self._who(self._named)} no longer lags.")
            self._named = None
        found = max(behind, key=lambda each: each.ratio)
        if found.rank == self._named or found.ratio < LAGS or found.lost < LOST:
            return lines
        slowest = [window.slowest for window in recent if window.slowest and window.slowest.ratio > LAGS_NOT]
        times = sum(each.rank == found.rank for each in slowest)
        if times < MOSTLY * len(recent):
            return lines
        self._named = found.rank
        return [*lines, self._told(found, total[found.rank])]

    def _slowest(self, ranks: Sequence[Spent]) -> Behind | None:
        """None where there is nobody to compare with."""
        if len(ranks) < 2 or self._usual is None:
            return None
        return max(self._behind(ranks), key=lambda each: each.ratio)

    def _behind(self, ranks: Sequence[Spent]) -> list[Behind]:
        """By a rank's time, or by its time per token where that says less: rows of unequal length are not its
        fault, and work that no token causes is not either."""
        usual = self._usual
        assert usual is not None
        found: dict[int, Behind] = {}
        for group in self._groups:
            times = [ranks[rank].own / usual[rank] for rank in group]
            expected = others_medians(times)
            tokens = [ranks[rank].tokens for rank in group]
            if all(tokens):
                per_token = others_medians([time / n for time, n in zip(times, tokens, strict=True)])
                by_tokens = [median * n for median, n in zip(per_token, tokens, strict=True)]
                expected = list(map(max, expected, by_tokens))
            for rank, others in zip(group, expected, strict=True):
                mine = ranks[rank]
                wanted = max(others * usual[rank], 0.01 * mine.seconds)
                lost = (mine.own - wanted) / mine.seconds
                found[rank] = Behind(rank, mine.own / wanted, lost, wanted / mine.steps)
        return [found[rank] for rank in range(len(ranks))]

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self._names[rank]}, local rank {self._places[rank].local_rank})"

    def _told(self, found: Behind, mine: Spent) -> str:
        among = "the other ranks" if len(self._groups) == 1 else "its stage's other ranks"
        usual = "what its part of the pipeline took at first" if self._by_itself else f"that of {among}"
        line = (
            f"warning: {self._who(found.rank)} lags: over {mine.steps:.0f} steps its own work took "
            f"{found.ratio:.2f} times {usual}, {mine.own / mine.steps:.3g} s a step instead of "
            f"{found.expected:.3g}; the others wait for it, {100 * found.lost:.0f} % of the time"
        )
        if mine.data > 0.5 * found.lost * mine.seconds:
            line += f"; {mine.data / mine.steps:.3g} s a step are its wait for data"
        return f"{line}. See docs/telemetry.md."


@dataclass(frozen=True)
class Behind:
    """ratio: a rank's own seconds ÷ those expected of it; lost: the difference, of the window's seconds;
    expected: seconds a step."""

    rank: int
    ratio: float
    lost: float
    expected: float


class _Held(NamedTuple):
    """What the recent windows hold together."""

    records: int = 0
    steps: float = 0.0
    seconds: float = 0.0

    def after(self, window: Spent, sign: int) -> _Held:
        return _Held(
            self.records + sign, self.steps + sign * window.steps, self.seconds + sign * window.seconds
        )

    def suffices(self, seconds: float) -> bool:
        return self.records >= RECORDS and self.steps >= STEPS and self.seconds >= seconds


@dataclass(frozen=True)
class _Window:
    ranks: Sequence[Spent]
    slowest: Behind | None


def others_medians(values: Sequence[float]) -> list[float]:
    """For each value the median of the others; of two or more."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked, others = [values[index] for index in order], len(values) - 1
    found = [0.0] * len(values)
    for position, index in enumerate(order):
        low, high = (k + (k >= position) for k in ((others - 1) // 2, others // 2))
        found[index] = (ranked[low] + ranked[high]) / 2
    return found


def _summed(windows: Sequence[Spent]) -> Spent:
    return Spent(*(math.fsum(values) for values in zip(*windows, strict=True)))
