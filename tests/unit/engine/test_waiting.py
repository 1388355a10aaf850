"""The clock around waits: it runs in a step, on the loop's thread, and is gone after it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed.distributed_c10d import Work

from dsft.engine.waiting import Waiting

CPU = torch.device("cpu")


class Handle:
    def wait(self) -> str:
        time.sleep(0.02)
        return "done"


@pytest.fixture(autouse=True)
def _slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "wait", Handle.wait)


def test_waits_of_a_step_count() -> None:
    waiting = Waiting(CPU)
    before = Work.wait
    Work.wait(Handle())  # type: ignore[arg-type]
    assert waiting.taken() == 0.0
    with waiting.counted():
        assert Work.wait(Handle()) == "done"  # type: ignore[arg-type]
        Work.wait(Handle())  # type: ignore[arg-type]
    assert Work.wait is before
    assert 0.04 <= waiting.taken() < 2.0
    assert waiting.taken() == 0.0


def test_another_threads_waits_do_not() -> None:
    waiting = Waiting(CPU)
    with waiting.counted():
        thread = threading.Thread(target=lambda: Work.wait(Handle()))  # type: ignore[arg-type]
        thread.start()
        thread.join()
    assert waiting.taken() == 0.0


def test_a_step_that_fails_leaves_no_clock() -> None:
    waiting, before = Waiting(CPU), Work.wait
    with pytest.raises(RuntimeError), waiting.counted():
        raise RuntimeError("a rank is gone")
    assert Work.wait is before
