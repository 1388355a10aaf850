"""Real agents, real ranks (that train nothing), real kills: how a start ends, what it says, what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsft.errors import WorldError
from dsft.launcher.attempt import Attempt, AttemptSettings, Requests
from dsft.launcher.command import sweep
from dsft.launcher.launch_plan import AGENT, LaunchPlan
from dsft.launcher.processes import environment_of
from dsft.remote import module_command
from tests.launching import LATE, allowed
from tests.unit.launcher import conftest
from tests.unit.launcher.conftest import Start


def until(check: Callable[[], object]) -> None:
    while not check():
        time.sleep(0.02)


def is_heard(attempt: Attempt) -> bool:
    return all(rank.heartbeat for rank in attempt.ranks.values())


@pytest.mark.parametrize("by", ["dsft", "deepspeed"])
def test_all_is_well(start: Start, by: str) -> None:
    words = ["a b", "$(touch x)", "'", '"', "`id`", "\n", "é", "--x=;rm", "*", "\\", ""]
    words += ["0:2:tells", "2:2:tells"]
    job = start("5", *words, by=by)
    outcome = job.outcome()
    assert outcome.code == 0 and outcome.failure is None
    assert job.lines.count("token (hidden)") == job.lines.count("by a child: (hidden)") == 1
    assert [line for line in job.lines if line.startswith("step")] == [f"step {n}" for n in range(1, 6)]
    assert f"arguments {ascii(['5', *words])}" in job.lines
    logs = {rank: (job.attempt.plan.logs, rank) for rank in range(3)}
    for folder, rank in logs.values():
        with open(f"{folder}/rank-{rank}.log", encoding="utf-8") as file:
            said = file.read()
        assert f"--- rank {rank} of 3" in said and "s3cr3t" not in said
        assert ("token (hidden)\nby a child: (hidden)\n" in said) == (rank != 1)


@pytest.mark.parametrize("by", ["dsft", "deepspeed"])
def test_a_killed_rank_ends_all(start: Start, by: str) -> None:
    job = start("600", "2:15:kill", by=by)
    outcome = job.outcome()
    assert outcome.code == 137 and outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.host) == (2, "two")
    assert 1 <= (outcome.failure.step or 0) <= 15  # by its last heartbeat


@pytest.mark.parametrize("others", ["importing", "stepping"])
def test_a_launchers_rank_that_is_killed_before_its_first_heartbeat(
    start: Start, tmp_path: Path, others: str
) -> None:
    """The launcher hands the signal on as 256 - 9, and nobody else knows of it; a rank of its that steps
    saves."""
    if others == "importing":
        (tmp_path / "go").touch()
    job = start("600", "1:0:dead", by="deepspeed")
    if others == "stepping":
        until(lambda: job.attempt.ranks[2].heartbeat)
        (tmp_path / "go").touch()
    outcome = job.outcome()
    assert outcome.code == 137 and outcome.failure is not None
    assert outcome.failure.text() == "two: was killed by signal 9"


def test_a_kernel_without_pidfds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "module_command", lambda host, module: [sys.executable, "-c", NO_PIDFD])
    job = start("600", "2:15:kill")
    outcome = job.outcome()
    assert outcome.code == 137 and outcome.failure is not None and outcome.failure.rank == 2
    assert "step 599" not in job.lines, "it was noticed when the others had ended"


NO_PIDFD = """
import os

def none(pid):
    raise OSError(38, "Function not implemented")

os.pidfd_open = none
from dsft.launcher.agent import main
main()
"""


@pytest.mark.parametrize("length", [77, 79, 150])
def test_a_long_name_of_the_temporary_folder(
    start: Start, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # noqa: S108  # shorter than tmp_path
        folder = Path(above, "x" * (length - len(above) - 1))
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        assert start("3").outcome().code == 0


def test_an_agent_to_which_nobody_says_a_word_ends() -> None:
    code = "from dsft.launcher import agent; agent.SILENCE = 0.5; agent.main()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.wait(LATE) == 0


def test_what_is_wrong_with_the_command_of_an_agent_is_raised_before_one_starts(tmp_path: Path) -> None:
    def command(host: str) -> list[str]:
        if host == "two":
            raise WorldError("DSFT_SSH_ARGS is not a list of options")
        return ["touch", str(tmp_path / "started")]

    plan = LaunchPlan("dsft", {"one": 1, "two": 1}, (), str(tmp_path), str(tmp_path), "none")
    attempt = Attempt(plan, AttemptSettings({}), Requests(), lambda line: None, command)
    with pytest.raises(WorldError, match="DSFT_SSH_ARGS"):
        asyncio.run(attempt.run())
    assert not (tmp_path / "started").exists()


def test_the_first_real_error_is_told_and_not_what_follows(start: Start) -> None:
    """Rank 0 fails half a second after rank 1, within the time in which the others may report."""
    job = start("600", "0:10:error=Connection closed by peer [10.0.0.2]:1234", "1:5:error=a row is bad")
    outcome = job.outcome()
    assert outcome.failure is not None and outcome.code == 1
    assert outcome.failure.text() == "rank 1 on two, step 5: a row is bad"
    assert "rank 1 on two, step 5 has failed; ending all others" in job.lines
    assert not any(line.startswith(("error: ", "rank 1 on two, step 5:")) for line in job.lines), "said later"
    assert "error: Connection closed" in Path(job.plan.logs, "rank-0.log").read_text()


@pytest.mark.parametrize("by", ["dsft", "deepspeed"])
def test_the_ranks_own_code(start: Start, by: str) -> None:
    assert start("600", "1:2:66", by=by).outcome().code == 66


def test_a_rank_that_fails_before_its_first_line_is_told_with_what_it_printed(start: Start) -> None:
    job = start("no number")
    outcome = job.outcome()
    assert outcome.code == 1 and outcome.failure is not None
    assert outcome.failure.kind == "rank" and (outcome.failure.message or "").startswith("ValueError: ")
    assert not list(Path(job.plan.logs).glob("launcher-*")), "there is no launcher"


def test_one_process_a_rank_and_the_agents_are_all_that_runs(start: Start) -> None:
    job = start("600")
    until(lambda: is_heard(job.attempt))
    assert sorted(job.left()) == sorted(rank.pid for rank in job.attempt.ranks.values() if rank.pid)
    job.requests.take(signal.SIGTERM)
    assert job.outcome().code == 75


def test_a_secret_reaches_the_ranks_and_nothing_else(start: Start) -> None:
    job = start("600")
    until(lambda: is_heard(job.attempt))
    ranks = [rank.pid for rank in job.attempt.ranks.values()]
    assert all(pid is not None and b"CANARY_TOKEN=s3cr3t-s3cr3t" in environment_of(pid) for pid in ranks)
    lines = [text(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert len(lines) > 5 and not any(b"s3cr3t-s3cr3t" in line for line in lines)
    job.requests.take(signal.SIGTERM)
    job.outcome()
    kept = [path.read_bytes() for path in Path(job.plan.logs).rglob("*") if path.is_file()]
    assert kept and not any(b"s3cr3t" in said for said in (*kept, *map(str.encode, job.lines)))


def text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_asked_to_stop_all_save_and_end(start: Start) -> None:
    job = start("600")
    until(lambda: is_heard(job.attempt))
    job.requests.take(signal.SIGINT)
    outcome = job.outcome()
    assert outcome.code == 75 and outcome.failure is None
    assert any(line.startswith("Ctrl-C: saving at the end of this step") for line in job.lines)
    assert "asked by SIGINT" in job.lines and "saved" in job.lines


def test_a_stop_that_was_announced_is_the_first_one() -> None:
    """Slurm sends SIGUSR1 ahead of a job's time, and SIGTERM when it is over."""
    requests = Requests()
    for number, stops in ((signal.SIGUSR1, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)):
        requests.take(number)
        assert (requests.stops, requests.signal) == (stops, number)
        requests.first_at -= 10


LATE_RANKS = ("0:0:late", "1:0:late", "2:0:late")


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_asked_before_any_rank_has_imported_all_end_at_once(start: Start, asked: signal.Signals) -> None:
    for moment in ("as soon as it runs", "once the ranks' processes are there"):
        job = start("600", *LATE_RANKS)
        if moment != "as soon as it runs":
            until(lambda: all(rank.pid for rank in job.attempt.ranks.values()))  # noqa: B023
        job.requests.take(asked)
        outcome = job.outcome()
        assert (outcome.code, outcome.failure) == (75, None), moment
        assert not any(line.startswith("step") for line in job.lines), moment


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_are_still_importing_get_the_request_later(
    start: Start, tmp_path: Path, asked: signal.Signals
) -> None:
    job = start("600", *LATE_RANKS[1:])
    until(lambda: job.attempt.ranks[0].heartbeat and all(rank.pid for rank in job.attempt.ranks.values()))
    job.requests.take(asked)
    until(lambda: "saved" in job.lines)
    assert len(job.left()) >= 2, "the late ranks live"
    (tmp_path / "go").touch()
    outcome = job.outcome()
    assert (outcome.code, outcome.failure) == (75, None), job.lines


@pytest.mark.parametrize("words", [(), LATE_RANKS])
def test_sigusr1_ahead_of_the_ranks_waits_for_their_first_step(
    start: Start, tmp_path: Path, words: tuple[str, ...]
) -> None:
    job = start("600", *words)
    if words:
        until(lambda: all(rank.pid for rank in job.attempt.ranks.values()))
    job.requests.take(signal.SIGUSR1)
    until(lambda: job.attempt._last_signal)
    (tmp_path / "go").touch()
    outcome = job.outcome()
    assert (outcome.code, outcome.failure) == (75, None), job.lines
    assert "step 1" in job.lines and "saved" in job.lines


def test_asked_twice_it_ends_at_once(start: Start) -> None:
    job = start("600", "1:3:hang")
    until(lambda: job.attempt.ranks[1].step == 3)
    job.requests.take(signal.SIGINT)
    time.sleep(1)
    assert job.left()
    job.requests.take(signal.SIGINT)
    began = time.monotonic()
    assert job.outcome().code == 130
    assert time.monotonic() - began < allowed(5)


def test_a_stopped_rank_is_named_with_its_stack(start: Start) -> None:
    job = start("600", "1:3:stop", hang_timeout=4)
    outcome = job.outcome()
    assert outcome.code == 124 and outcome.failure is not None and outcome.failure.rank == 1
    with open(f"{job.plan.logs}/rank-1.stack", encoding="utf-8") as file:
        assert "fake_rank.py" in file.read()


def test_a_killed_agent_is_told_and_its_ranks_are_gone(start: Start) -> None:
    job = start("600")
    until(lambda: is_heard(job.attempt))
    agent = job.attempt._hosts["two"].channel
    assert agent is not None
    os.kill(agent.pid, signal.SIGKILL)
    outcome = job.outcome()
    assert outcome.code == 69 and outcome.lost == ("two",)
    assert outcome.failure is not None and "killed by signal 9" in outcome.failure.text()


def test_what_a_launcher_left_is_swept(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start("600", by="deepspeed")
    until(lambda: is_heard(job.attempt))
    agent = job.attempt._hosts["two"].channel
    assert agent is not None
    os.kill(agent.pid, signal.SIGKILL)
    job._thread.join(LATE)
    outcome = job._outcome
    assert outcome is not None and outcome.code == 69 and outcome.lost == ("two",)
    monkeypatch.setattr(LaunchPlan, "agent", lambda self, host: module_command("localhost", AGENT))
    assert asyncio.run(sweep(job.plan, outcome.lost)) == []
    assert job.left() == []
