"""Attempts with ranks that train nothing: real agents and real processes, without torch."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsft.launcher.attempt import Attempt, AttemptSettings, Requests
from dsft.launcher.launch_plan import AGENT, LaunchPlan
from dsft.launcher.processes import job_processes, kill_job
from dsft.launcher.verdict import Outcome
from dsft.remote import module_command
from tests.launching import LATE

HERE = Path(__file__).parent


class Started:
    """An attempt in a thread. `hosts`: names of this machine, each with its ranks."""

    def __init__(self, folder: Path, program: list[str], hosts: dict[str, int], hang_timeout: float | None):
        self.job = f"test{os.getpid()}{id(self):x}"
        self.lines: list[str] = []
        self.requests = Requests()
        words = (str(HERE / "fake_rank.py"), *program)
        self.plan = LaunchPlan("ssh", hosts, words, str(folder), str(folder / "logs"), self.job)
        terms = AttemptSettings({"CANARY_TOKEN": "s3cr3t-s3cr3t"}, hang_timeout)
        agent = module_command("localhost", AGENT)
        self.attempt = Attempt(self.plan, terms, self.requests, self.lines.append, lambda host: agent)
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._outcome = asyncio.run(self.attempt.run())

    def outcome(self, timeout: float = LATE) -> Outcome:
        self._thread.join(timeout)
        assert self._outcome is not None, self.lines
        assert self.left() == []
        return self._outcome

    def left(self) -> list[int]:
        return [pid for node in range(len(self.plan.hosts)) for pid in job_processes(f"{self.job}.{node}")]

    def clear(self) -> None:
        for node in range(len(self.plan.hosts)):
            kill_job(f"{self.job}.{node}")
        self._thread.join(20)


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def begin(*program: str, hang_timeout: float | None = None) -> Started:
        started.append(Started(tmp_path, list(program), {"one": 1, "two": 2}, hang_timeout))
        return started[-1]

    yield begin
    for each in started:
        each.clear()
