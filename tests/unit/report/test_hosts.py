"""The metrics of every host, and which rank is named as a straggler, from figures written by hand."""

import random
from collections.abc import Sequence

import pytest
import torch

from dsft.plan.memory.sizes import GIB
from dsft.report.hosts import HostWatch, RankWindow, StragglerDetector, host_names, host_record
from dsft.report.hosts import RankLocation as At


def spent(
    own: float, seconds: float = 1.0, tokens: float = 1000, data: float = 0.0, steps: int = 10
) -> RankWindow:
    """Return a window of `steps` steps of `seconds` each, of which `own` were the rank's own."""
    return RankWindow(
        steps, steps * seconds, steps * (seconds - own), steps * data, steps * tokens, GIB, 4 * GIB
    )


def lines_of(places: Sequence[At], windows: Sequence[Sequence[RankWindow]]) -> list[tuple[int, str]]:
    """(window, line), from 1."""
    lag = StragglerDetector(places, host_names(places))
    return [(n, line) for n, ranks in enumerate(windows, start=1) for line in lag.add(ranks)[1]]


PAIR = [At("node1", 0), At("node2", 0)]
FOUR = [At("node1", 0), At("node1", 1), At("node2", 0), At("node2", 1)]


def test_a_slow_rank_is_named_once() -> None:
    [(number, line)] = lines_of(PAIR, [WELL] * 10 + [ONE] * 10 + [WELL] * 10 + [ONE] * 10)
    assert number == 15  # five records are judged together
    assert line.startswith("warning: rank 1 (node2, local rank 0) lags: over 50 steps its own work took 1.80")


WELL, ONE, OTHER = ([spent(first), spent(second)] for first, second in ((0.5, 0.5), (0.5, 0.9), (0.9, 0.5)))


@pytest.mark.parametrize(("places", "windows"), [
    (PAIR, [ONE, ONE, ONE, OTHER, OTHER] * 10),
    ([At("node1", 0)], [[spent(1.0)]] * 20),
    (PAIR, [[spent(0.8, tokens=2000), spent(0.4, tokens=1000)]] * 20),
    (PAIR, [[spent(0.4, tokens=1000), spent(0.4, tokens=200)]] * 20),
    (PAIR, [[spent(0.01), spent(0.05)]] * 20),  # five times as long, 4 % of the step
    (PAIR, [WELL] * 10 + [[spent(0.5), spent(5.0, seconds=5.2)]] + [WELL] * 10),
    (PAIR, [[spent(0.01, 0.02), spent(0.02, 0.02)]] * 20),  # 4 s in all
    ([At("node1", 0, 0), At("node2", 0, 1)], [[spent(0.3), spent(0.9)]] * 10),
], ids=["slow in turn", "a single process", "longer rows", "fewer tokens in equal time", "a small share",
        "a disturbance", "a short one", "a stage of one rank"])  # fmt: skip
def test_who_is_not_named(places: list[At], windows: list[list[RankWindow]]) -> None:
    assert lines_of(places, windows) == []


def test_a_stage_of_one_rank_has_no_record() -> None:
    places = [At("node1", 0, 0), At("node2", 0, 1)]
    assert StragglerDetector(places, ["node1", "node2"]).add([spent(0.3), spent(0.9)]) == ({}, [])


def test_the_line_of_a_straggler() -> None:
    [(_, line)] = lines_of(FOUR, [[spent(0.4), spent(0.4), spent(0.4), spent(0.8, data=0.5)]] * 5)
    assert line == (
        "warning: rank 3 (node2, local rank 1) lags: over 50 steps its own work took 2.00 times that of the "
        "other ranks of its stage, 0.8 s per step instead of 0.4; they wait for it 40 % of the time; it "
        "waits 0.5 s per step for data. See docs/telemetry.md."
    )


def test_ranks_that_wait_for_a_slow_one_are_not_named() -> None:
    [(_, line)] = lines_of(FOUR, [[spent(0.1), spent(0.1), spent(0.9), spent(0.1)]] * 8)
    assert "rank 2 (node2, local rank 0)" in line


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_false_alarm(ranks: int) -> None:
    """1,000 records of one step each, whose work is uneven by 20 % (standard deviation), with hiccups."""
    draw, places = random.Random(ranks), [At("node1", rank) for rank in range(ranks)]

    def window() -> list[RankWindow]:
        own = [max(draw.gauss(1.0, 0.2), 0.3) * (5 if draw.random() < 0.01 else 1) for _ in places]
        return [spent(each, max(own) + 0.1, steps=1) for each in own]

    assert lines_of(places, [window() for _ in range(1000)]) == []


def test_stages_differ_by_nature_and_are_compared_with_their_peers() -> None:
    """Two stages of two ranks: the second stage works twice as long; then one of its ranks does."""
    places = [At("node1", 0, 0), At("node1", 1, 0), At("node2", 0, 1), At("node2", 1, 1)]
    well = [spent(0.3), spent(0.3), spent(0.6), spent(0.6)]
    slow = [spent(0.3), spent(0.3), spent(0.6), spent(0.95)]
    [(number, line)] = lines_of(places, [well] * 10 + [slow] * 10)
    assert number > 10
    assert "rank 3" in line


def test_the_record() -> None:
    ranks = [spent(0.4), spent(0.8, data=0.25)]
    names = ["node1", "node1"]
    assert host_record(names, ranks) == {
        "host/node1/step_time": 1.0, "host/node1/work_time": pytest.approx(0.8),
        "host/node1/data_wait_fraction": 0.25, "host/node1/rss_gib": 2.0, "host/node1/memory_used_gib": 4.0,
    }  # fmt: skip
    assert StragglerDetector(FOUR[:2], names).add(ranks)[0] == {
        "rel/straggler_ratio": pytest.approx(2.0),
        "rel/straggler_rank": 1,
    }
    assert StragglerDetector(FOUR[:1], names[:1]).add(ranks[:1]) == ({}, [])


def test_names_of_hosts() -> None:
    names = host_names([At("gpu-1.cluster.example", 0), At("gpu-1.cluster.example", 1), At("Zwei", 0)])
    assert names == ["gpu-1", "gpu-1", "Zwei"]
    assert host_names([At("a.one", 0), At("a.two", 0)]) == ["a-one", "a-two"]
    assert host_names([At("10.77.0.1", 0), At("10.77.0.2", 0)]) == ["10-77-0-1", "10-77-0-2"]
    assert host_names([At("a/b\nc$(id)", 0)]) == ["a-b-c-id-"]


def test_every_rank_fills_its_own_row_and_rank_0_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.report.hosts.time.perf_counter", lambda: 110.0)
    lines: list[str] = []
    cpu = torch.device("cpu")
    watches = [HostWatch(PAIR, rank, [2.0, 3.0][rank].__float__, cpu, lines.append) for rank in range(2)]
    total = sum(watch.mine(5, 100.0, 1.0, 640) for watch in watches)
    assert isinstance(total, torch.Tensor) and total.dtype == torch.float64
    record = watches[0].record(total)
    assert record["host/node1/work_time"] == pytest.approx(8.0 / 5)
    assert record["host/node2/work_time"] == pytest.approx(7.0 / 5)
    assert record["host/node2/step_time"] == 2.0
    assert 0 < record["host/node1/rss_gib"] < record["host/node1/memory_used_gib"]
    assert record["rel/straggler_rank"] == 0
    assert watches[1].record(total) == {}
