"""Record the speed and memory of every host at each logged step, and detect stragglers.

The values of all ranks travel in one tensor, in the all-reduce that the loop does for the losses anyway: each
rank fills its own row, all others are zeros.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from dsft.data.steps.batch import to_device
from dsft.plan.memory.sizes import GIB
from dsft.report.memory import resident

RECORDS, STEPS, SECONDS = 5, 20, 10.0
"""The least number of records, steps and seconds that are judged together, so that neither one slow step, nor
a short disturbance by another program makes a straggler."""
LAGS, LOST = 1.3, 0.1
"""A rank lags if its own work takes at least LAGS times that of the others, and the difference at least the
fraction LOST of the time, ..."""
BEHIND, MOSTLY = 1.15, 0.75
"""... and if it was the slowest, by more than BEHIND times, in the fraction MOSTLY of the records."""


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
NOTHING = RankWindow(*[0.0] * WIDTH)


class HostWatch:
    """A watch over the speed and memory of all hosts, with warnings about stragglers. locations: of every
    rank; waited: `CommunicationTimer.pop_seconds`; log: takes one line. Only rank 0 gets a record and
    prints."""

    def __init__(
        self,
        locations: Sequence[RankLocation],
        rank: int,
        waited: Callable[[], float],
        device: torch.device,
        log: Callable[[str], None],
    ) -> None:
        self._locations, self._rank, self._waited, self._device = locations, rank, waited, device
        self._names = host_names(locations)
        self._detector = StragglerDetector(locations, self._names)
        self._log = log

    def mine(self, steps: int, began: float, data: float, tokens: int) -> Tensor:
        """Return this rank's row in a (ranks · WIDTH,) float64 tensor on the device; the others' rows are 0.
        Describes the window since `began`, a value of time.perf_counter; data: seconds of waiting for data;
        tokens: positions computed. Does not synchronize with the device."""
        waiting = self._waited()
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
    that is unique, else the whole name, reduced to letters, digits, - and _."""

    def reduced(name: str) -> str:
        return re.sub(r"[^A-Za-z0-9_-]+", "-", name) or "host"

    short = {location.host: reduced(location.host.partition(".")[0]) for location in locations}
    common = Counter(short.values())
    names = {host: name if common[name] == 1 else reduced(host) for host, name in short.items()}
    return [names[location.host] for location in locations]


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
    """A detector that compares ranks with those that do the same work, the other ranks of their pipeline
    stage, and names each that lags once. A stage of one rank is compared with nothing."""

    def __init__(
        self, locations: Sequence[RankLocation], names: Sequence[str], seconds: float = SECONDS
    ) -> None:
        self._locations, self._names, self._seconds = locations, names, seconds
        stages: dict[int, list[int]] = {}
        for rank, location in enumerate(locations):
            stages.setdefault(location.stage, []).append(rank)
        self._peers = [ranks for ranks in stages.values() if len(ranks) > 1]
        self._total: Sequence[RankWindow] = ()  # since ranks were last judged
        self._behind: list[int] = []  # the slowest rank of each record, -1 if it is hardly slower
        self._named: set[int] = set()

    def add(self, ranks: Sequence[RankWindow]) -> tuple[dict[str, float], list[str]]:
        """Add a window. Return its metrics, the ratio of the slowest rank's own work to that of its peers (1:
        none lags) and its number, and the lines to print. Both are empty where no rank has peers."""
        if not self._peers:
            return {}, []
        slowest = self._slowest(ranks)
        self._behind.append(slowest.rank if slowest.ratio > BEHIND else -1)
        summed = zip(self._total or [NOTHING] * len(ranks), ranks, strict=True)
        self._total = [RankWindow(*map(add, *both)) for both in summed]
        record = {"rel/straggler_ratio": max(slowest.ratio, 1.0), "rel/straggler_rank": slowest.rank}
        return record, list(self._judged())

    def _slowest(self, ranks: Sequence[RankWindow]) -> Delay:
        return max((_delay(ranks, peers) for peers in self._peers), key=lambda delay: delay.ratio)

    def _judged(self) -> Iterator[str]:
        """Yield the line on a rank that lags, once there is enough to judge by."""
        total, behind = self._total, self._behind
        if len(behind) < RECORDS or total[0].steps < STEPS or total[0].seconds < self._seconds:
            return
        self._total, self._behind = (), []
        found = self._slowest(total)
        rank, mine = found.rank, total[found.rank]
        lags = found.ratio >= LAGS and found.lost >= LOST and behind.count(rank) >= MOSTLY * len(behind)
        if not lags or rank in self._named:
            return
        self._named.add(rank)
        where = f"{self._names[rank]}, local rank {self._locations[rank].local_rank}"
        line = (
            f"warning: rank {rank} ({where}) lags: over {mine.steps:.0f} steps its own work took "
            f"{found.ratio:.2f} times that of the other ranks of its stage, {mine.own / mine.steps:.3g} s "
            f"per step instead of {found.expected / mine.steps:.3g}; they wait for it "
            f"{100 * found.lost:.0f} % of the time"
        )
        if mine.data > 0.5 * found.lost * mine.seconds:
            line += f"; it waits {mine.data / mine.steps:.3g} s per step for data"
        yield f"{line}. See docs/telemetry.md."


class Delay(NamedTuple):
    """How far a rank is behind. ratio: its own seconds ÷ those expected; lost: the difference, as a fraction
    of the window's seconds; expected: seconds."""

    rank: int
    ratio: float
    lost: float
    expected: float


def _delay(ranks: Sequence[RankWindow], peers: Sequence[int]) -> Delay:
    """Compare the slowest of the peers with the median of the others: of their times or of their times per
    token, whichever is more lenient. Neither rows of unequal length nor work that does not depend on tokens
    count as lagging."""
    slowest = max(peers, key=lambda rank: ranks[rank].own)
    mine, others = ranks[slowest], [ranks[rank] for rank in peers if rank != slowest]
    expected = statistics.median(each.own for each in others)
    if mine.tokens and all(each.tokens for each in others):
        expected = max(expected, mine.tokens * statistics.median(each.own / each.tokens for each in others))
    expected = max(expected, 0.01 * mine.seconds)
    return Delay(slowest, mine.own / expected, (mine.own - expected) / mine.seconds, expected)
