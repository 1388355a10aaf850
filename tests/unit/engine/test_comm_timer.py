"""The clock around waits: it runs in a step, on the loop's thread, and is gone after it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import Work

from dsft.engine import comm_timer as module
from dsft.engine.comm_timer import CALLS, MAX_PENDING, CommunicationTimer

CPU = torch.device("cpu")


class Handle:
    def wait(self) -> str:
        time.sleep(0.02)
        return "done"


@pytest.fixture(autouse=True)
def _slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "wait", Handle.wait)


def test_waits_of_a_step_are_counted() -> None:
    timer = CommunicationTimer(CPU)
    before = Work.wait
    Work.wait(Handle())  # type: ignore[arg-type]
    assert timer.pop_seconds() == 0.0
    with timer.timing():
        assert Work.wait(Handle()) == "done"  # type: ignore[arg-type]
        Work.wait(Handle())  # type: ignore[arg-type]
    assert Work.wait is before
    assert 0.04 <= timer.pop_seconds() < 2.0
    assert timer.pop_seconds() == 0.0


def test_waits_of_other_threads_are_not_counted() -> None:
    timer = CommunicationTimer(CPU)
    with timer.timing():
        thread = threading.Thread(target=lambda: Work.wait(Handle()))  # type: ignore[arg-type]
        thread.start()
        thread.join()
    assert timer.pop_seconds() == 0.0


def test_failed_step_leaves_no_running_clock() -> None:
    timer, before = CommunicationTimer(CPU), Work.wait
    with pytest.raises(RuntimeError), timer.timing():
        raise RuntimeError("a rank is gone")
    assert Work.wait is before


class Event:
    """One of a device that has come as far as `reached`; a wait takes it 2 ms."""

    made, reached, alive = 0, 0, 0

    def __init__(self, enable_timing: bool) -> None:
        Event.made += 1
        Event.alive += 1
        self.number = Event.made

    def __del__(self) -> None:
        Event.alive -= 1

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.number <= Event.reached

    def elapsed_time(self, last: Event) -> float:
        assert self.query() and last.query()
        return 2.0


def test_gpu_timing_does_not_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    backend = SimpleNamespace(**{name: lambda: "reduced" for name in CALLS})
    monkeypatch.setattr(module.deepspeed_comm, "cdb", backend)
    monkeypatch.setattr(module.dist, "all_to_all_single", backend.reduce)
    timer = CommunicationTimer(torch.device("cuda"))
    with timer.timing():
        calls: list[Any] = [backend.all_reduce, backend.broadcast, module.dist.all_to_all_single]
        assert [call() for call in calls] == ["reduced"] * 3
    Event.reached = 4
    assert timer.pop_seconds() == pytest.approx(0.004), "two are over, the third counts later"
    Event.reached = 6
    assert timer.pop_seconds() == pytest.approx(0.002)
    with timer.timing():
        for _ in range(10 * MAX_PENDING):
            backend.all_reduce()
            Event.reached = Event.made
            assert Event.alive <= 2 * (MAX_PENDING + 1)
    assert timer.pop_seconds() == pytest.approx(10 * MAX_PENDING * 0.002)
    assert Event.alive == 0
