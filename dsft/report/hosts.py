"""Record the speed and memory of every host at each logged step, and detect stragglers.

The values of all ranks travel in one tensor, in the all-reduce that the loop does for the losses anyway: each
rank fills its own row, all others are zeros.
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
"""Ratio of a rank's own work to the others': above the first it is a straggler, below the second it no longer
is."""
LOST = 0.1
"""Fraction of a step; if the others spend less than that waiting for the slowest rank, no line is printed."""
RECORDS, STEPS, SECONDS = 5, 20, 10.0
"""The least number of records, steps and seconds to judge by, so that neither one slow step, nor rows of
unequal length, nor a short disturbance by another program makes a straggler."""
JUDGED_EVERY = 1.0  # seconds; shorter windows are judged together
MOSTLY = 0.75
"""Fraction of the recent records in which a straggler must be the slowest rank, by more than LAGS_NOT."""


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank: host, local rank and pipeline stage."""

    host: str
    local_rank: int
    stage: int = 0


class RankWindow(NamedTuple):
    """One rank's share of a window of steps.

    seconds     from the begin of its first step to the end of its last, without evaluations and checkpoints
    waiting     seconds of these in which it waited for other ranks
    data        seconds of these in which it waited for the next batch
    tokens      positions of its micro-batches
    resident    bytes of this process
    host_used   bytes in use on the host
    allocated   the most bytes that torch has allocated on the GPU
    """

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
        """Seconds that this rank itself caused, by its work and its data."""
        return max(self.seconds - self.waiting, 0.0)


WIDTH = len(RankWindow._fields)


class WaitTimer(Protocol):
    """The part of `dsft.engine.comm_timer.CommunicationTimer` that is used here."""

    def timing(self) -> AbstractContextManager[None]: ...
    def pop_seconds(self) -> float: ...


class HostWatch:
    """A watch over the speed and memory of all hosts, with warnings about stragglers. locations: of every
    rank; log: takes one line. Only rank 0 gets a record and prints."""

    def __init__(
        self,
        locations: Sequence[RankLocation],
        rank: int,
        waits: WaitTimer,
        device: torch.device,
        log: Callable[[str], None],
    ) -> None:
        self._locations, self._rank, self._waits, self._device = locations, rank, waits, device
        self._names = host_names(locations)
        self._detector = StragglerDetector(locations, self._names)
        self._log = log

    def counted(self) -> AbstractContextManager[None]:
        """Time the waiting within a step, including its data."""
        return self._waits.timing()

    def mine(self, steps: int, began: float, data: float, tokens: int) -> Tensor:
        """Return this rank's row in a (ranks · WIDTH,) float64 tensor on the device; the others' rows are 0.
        Describes the window since `began`, a value of time.perf_counter; data: seconds of waiting for data;
        tokens: positions computed. Does not synchronize with the device."""
        waiting = self._waits.pop_seconds()
        seconds = time.perf_counter() - began
        allocated = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        used = psutil.virtual_memory().used if self._locations[self._rank].local_rank == 0 else 0
        spent = RankWindow(steps, seconds, waiting, data, tokens, resident(), used, allocated)
        rows = torch.zeros(len(self._locations), WIDTH, dtype=torch.float64)
        rows[self._rank] = torch.tensor(spent, dtype=torch.float64)
        return to_device(rows.flatten(), self._device)

    def record(self, everyones: Tensor) -> dict[str, float]:
        """Return the hosts' metrics on rank 0, else {}. everyones: the sum of all ranks' `mine`."""
        if self._rank != 0:
            return {}
        ranks = [RankWindow(*row) for row in everyones.view(-1, WIDTH).tolist()]
        record, lines = self._detector.add(ranks)
        for line in lines:
            self._log(line)
        return host_record(self._names, ranks) | record


def host_names(locations: Sequence[RankLocation]) -> list[str]:
    """Return each rank's host as it appears in the names of metrics: the first label of the host name where
    that is unique, reduced to letters, digits, - and _. Two machines of the same name are told apart since
    each local rank occurs once per machine; the second gets a number."""
    hosts: dict[tuple[str, int], str] = {}
    counted: Counter[tuple[str, int]] = Counter()
    keys = []
    for location in locations:
        keys.append((location.host, counted[location.host, location.local_rank]))
        counted[location.host, location.local_rank] += 1
    short = {key: re.sub(r"[^A-Za-z0-9_-]+", "-", key[0].partition(".")[0]) for key in dict.fromkeys(keys)}
    common = Counter(short.values())
    for key, name in short.items():
        if common[name] > 1:  # such as a.one and a.two, or two machines of one name
            name = re.sub(r"[^A-Za-z0-9_-]+", "-", key[0])
        wanted, number = name or "host", 1
        while (name := wanted if number == 1 else f"{wanted}_{number}") in hosts.values():
            number += 1
        hosts[key] = name
    return [hosts[key] for key in keys]


def host_record(names: Sequence[str], ranks: Sequence[RankWindow]) -> dict[str, float]:
    """Return host/NAME/… of every host, from its ranks' values."""
    record: dict[str, float] = {}
    hosts: dict[str, list[RankWindow]] = {}
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


class StragglerDetector:
    """A detector of stragglers over the last records.

    A rank is compared with those that do the same work: all, or those of its pipeline stage. Stages differ by
    nature; where each stage is one rank, a rank's share of the total work is compared with its share in the
    first records, so a rank that is slow from the start is taken for a large stage.
    """

    def __init__(
        self, locations: Sequence[RankLocation], names: Sequence[str], seconds: float = SECONDS
    ) -> None:
        self._locations, self._names, self._seconds = locations, names, seconds
        stages = {location.stage for location in locations}
        self._by_itself = len(stages) == len(locations)  # no two ranks do the same work
        everyone = range(len(locations))
        self._groups = (
            [list(everyone)]
            if self._by_itself
            else [[rank for rank in everyone if locations[rank].stage == stage] for stage in sorted(stages)]
        )
        self._usual: list[float] | None = None if self._by_itself else [1.0] * len(locations)
        # Windows, each with its slowest rank.
        self._recent: deque[tuple[Sequence[RankWindow], Delay | None]] = deque()
        self._unjudged = 0.0  # seconds
        self._named: int | None = None

    def add(self, ranks: Sequence[RankWindow]) -> tuple[dict[str, float], list[str]]:
        """Add a window. Return its metrics, the ratio of the slowest rank's own work to what is expected from
        its peers (1: none lags) and its number, and the lines to print. Both are empty for a single rank, and
        until a pipeline's usual shares are known."""
        if len(ranks) < 2:
            return {}, []
        slowest = self._slowest(ranks)
        lines = self._judge(ranks, slowest)
        if slowest is None:
            return {}, lines
        return {"rel/straggler_ratio": max(slowest.ratio, 1.0), "rel/straggler_rank": slowest.rank}, lines

    def _judge(self, ranks: Sequence[RankWindow], slowest: Delay | None) -> list[str]:
        recent = self._recent
        recent.append((ranks, slowest))
        self._unjudged += ranks[0].seconds
        if self._unjudged < JUDGED_EVERY or not self._trimmed():
            return []
        self._unjudged = 0.0
        of_ranks = zip(*(ranks for ranks, _ in recent), strict=True)
        total = [RankWindow(*map(math.fsum, zip(*windows, strict=True))) for windows in of_ranks]
        if self._usual is None:
            self._usual = [max(spent.own, 1e-9) for spent in total]
            recent.clear()
            return []
        delays = self._delays(total)
        lines = []
        if self._named is not None and delays[self._named].ratio < LAGS_NOT:
            lines.append(f"{self._who(self._named)} no longer lags.")
            self._named = None
        found = max(delays, key=lambda each: each.ratio)
        if found.rank == self._named or found.ratio < LAGS or found.lost < LOST:
            return lines
        slow = [each.rank for _, each in recent if each is not None and each.ratio > LAGS_NOT]
        if slow.count(found.rank) < MOSTLY * len(recent):
            return lines
        self._named = found.rank
        return [*lines, self._warning(found, total[found.rank])]

    def _trimmed(self) -> bool:
        """Drop the oldest windows that are not needed to judge; return whether there are enough."""
        first = [ranks[0] for ranks, _ in self._recent]
        steps, seconds = sum(spent.steps for spent in first), sum(spent.seconds for spent in first)
        number = 0
        while self._suffices(len(first) - number, steps, seconds):
            steps, seconds = steps - first[number].steps, seconds - first[number].seconds
            number += 1
        for _ in range(number - 1):
            self._recent.popleft()
        return number > 0

    def _suffices(self, records: int, steps: float, seconds: float) -> bool:
        return records >= RECORDS and steps >= STEPS and seconds >= self._seconds

    def _slowest(self, ranks: Sequence[RankWindow]) -> Delay | None:
        """Return the slowest rank; None while a pipeline's usual shares are not known."""
        return max(self._delays(ranks), key=lambda each: each.ratio) if self._usual else None

    def _delays(self, ranks: Sequence[RankWindow]) -> list[Delay]:
        """Compare each rank with its peers, by time or by time per token, whichever is more lenient: neither
        rows of unequal length nor work that does not depend on tokens count as lagging."""
        usual = self._usual
        assert usual is not None
        found: dict[int, Delay] = {}
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
                found[rank] = Delay(rank, mine.own / wanted, lost, wanted / mine.steps)
        return [found[rank] for rank in range(len(ranks))]

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self._names[rank]}, local rank {self._locations[rank].local_rank})"

    def _warning(self, found: Delay, mine: RankWindow) -> str:
        others = "that of the other ranks" if len(self._groups) == 1 else "that of its stage's other ranks"
        expected = "that of its first steps" if self._by_itself else others
        line = (
            f"warning: {self._who(found.rank)} lags: over {mine.steps:.0f} steps its own work took "
            f"{found.ratio:.2f} times {expected}, {mine.own / mine.steps:.3g} s per step instead of "
            f"{found.expected:.3g}; the other ranks wait for it {100 * found.lost:.0f} % of the time"
        )
        if mine.data > 0.5 * found.lost * mine.seconds:
            line += f"; it waits {mine.data / mine.steps:.3g} s per step for data"
        return f"{line}. See docs/telemetry.md."


@dataclass(frozen=True)
class Delay:
    """How far a rank is behind. ratio: its own seconds ÷ those expected; lost: the difference, as a fraction
    of the window's seconds; expected: seconds per step."""

    rank: int
    ratio: float
    lost: float
    expected: float


def others_medians(values: Sequence[float]) -> list[float]:
    """Return for each value the median of the others; there must be two or more."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked, others = [values[index] for index in order], len(values) - 1
    found = [0.0] * len(values)
    for position, index in enumerate(order):
        low, high = (k + (k >= position) for k in ((others - 1) // 2, others // 2))
        found[index] = (ranked[low] + ranked[high]) / 2
    return found
