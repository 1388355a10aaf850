"""Real agents, real ranks (that train nothing), real kills: how a start ends and what is left."""

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
from dsft.launcher.launch_plan import LaunchPlan
from dsft.launcher.processes import environment_of
from tests.launching import LATE, allowed
from tests.selected import tiered
from tests.unit.launcher.conftest import Start


def until(check: Callable[[], object]) -> None:
    while not check():
        time.sleep(0.02)


def all_send_heartbeats(attempt: Attempt) -> bool:
    return all(rank.heartbeat for rank in attempt.ranks.values())


def test_successful_run(start: Start) -> None:
    words = ["a b", "$(touch x)", "'", '"', "`id`", "\n", "é", "--x=;rm", "*", "\\", ""]
    words += ["0:2:leaks", "2:2:leaks"]
    job = start("5", *words)
    outcome = job.outcome()
    assert outcome.code == 0 and outcome.failure is None
    assert job.lines.count("token (hidden)") == job.lines.count("by a child: (hidden)") == 1
    assert [line for line in job.lines if line.startswith("step")] == [f"step {n}" for n in range(1, 6)]
    assert f"arguments {ascii(['5', *words])}" in job.lines
    logs = {rank: (job.attempt.plan.logs, rank) for rank in range(3)}
    for folder, rank in logs.values():
        with open(f"{folder}/rank-{rank}.log", encoding="utf-8") as file:
            log = file.read()
        assert f"--- rank {rank} of 3" in log and "s3cr3t" not in log
        assert ("token (hidden)\nby a child: (hidden)\n" in log) == (rank != 1)


def test_killed_rank_ends_all(start: Start) -> None:
    job = start("600", "2:15:kill")
    outcome = job.outcome()
    assert outcome.code == 137 and outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.host) == (2, "two")
    assert 1 <= (outcome.failure.step or 0) <= 15  # by its last heartbeat


def test_a_rank_killed_before_its_first_heartbeat(start: Start, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    outcome = start("600", "1:0:dead").outcome()
    assert outcome.code == 137 and outcome.failure is not None
    assert outcome.failure.text() == "rank 1 on two: was killed by signal 9"


@pytest.mark.parametrize("length", tiered([77, 79, 150], [77, 79]))
def test_long_temporary_folder(start: Start, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # noqa: S108  # shorter than tmp_path
        folder = Path(above, "x" * (length - len(above) - 1))
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        assert start("3").outcome().code == 0


def test_agent_without_messages_ends() -> None:
    code = "from dsft.launcher import agent; agent.SILENCE = 0.5; agent.main()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.wait(LATE) == 0


def test_wrong_agent_command_is_raised_before_any_agent_starts(tmp_path: Path) -> None:
    def command(host: str) -> list[str]:
        if host == "two":
            raise WorldError("DSFT_SSH_ARGS is not a list of options")
        return ["touch", str(tmp_path / "started")]

    plan = LaunchPlan("ssh", {"one": 1, "two": 1}, (), str(tmp_path), str(tmp_path), "none")
    attempt = Attempt(plan, AttemptSettings({}), Requests(), lambda line: None, command)
    with pytest.raises(WorldError, match="DSFT_SSH_ARGS"):
        asyncio.run(attempt.run())
    assert not (tmp_path / "started").exists()


def test_first_real_error_is_reported_and_not_its_consequence(start: Start) -> None:
    """Rank 0 fails half a second after rank 1, within the time in which the others may report."""
    job = start("600", "0:10:error=Connection closed by peer [10.0.0.2]:1234", "1:5:error=a row is bad")
    outcome = job.outcome()
    assert outcome.failure is not None and outcome.code == 1
    assert outcome.failure.text() == "rank 1 on two, step 5: a row is bad"
    assert "rank 1 on two, step 5 has failed; ending all others" in job.lines
    assert not any(line.startswith(("error: ", "rank 1 on two, step 5:")) for line in job.lines), (
        "printed later"
    )
    assert "error: Connection closed" in Path(job.plan.logs, "rank-0.log").read_text()


def test_exit_code_of_a_rank(start: Start) -> None:
    assert start("600", "1:2:66").outcome().code == 66


def test_rank_without_heartbeat_is_reported_with_its_output(start: Start) -> None:
    job = start("no number")
    outcome = job.outcome()
    assert outcome.code == 1 and outcome.failure is not None
    assert outcome.failure.kind == "rank" and (outcome.failure.message or "").startswith("ValueError: ")


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_stop_signal_makes_all_save_and_end(start: Start) -> None:
    """Until then only ranks and agents run, and only the ranks have the secret."""
    job = start("600")
    until(lambda: all_send_heartbeats(job.attempt))
    ranks = [rank.pid for rank in job.attempt.ranks.values() if rank.pid]
    assert len(ranks) == 3 and sorted(job.left()) == sorted(ranks)
    assert all(b"CANARY_TOKEN=s3cr3t-s3cr3t" in environment_of(pid) for pid in ranks)
    lines = [content(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert len(lines) > 5 and not any(b"s3cr3t-s3cr3t" in line for line in lines)
    job.requests.take(signal.SIGINT)
    outcome = job.outcome()
    assert outcome.code == 75 and outcome.failure is None
    assert any(line.startswith("Ctrl-C: saving at the end of this step") for line in job.lines)
    assert "asked by SIGINT" in job.lines and "saved" in job.lines
    kept = [path.read_bytes() for path in Path(job.plan.logs).rglob("*") if path.is_file()]
    assert kept and not any(b"s3cr3t" in text for text in (*kept, *map(str.encode, job.lines)))


def test_signal_after_sigusr1_is_the_first_stop() -> None:
    """Slurm sends SIGUSR1 ahead of a job's time, and SIGTERM when it is over."""
    requests = Requests()
    for number, stops in ((signal.SIGUSR1, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)):
        requests.take(number)
        assert (requests.stops, requests.signal) == (stops, number)
        requests.first_at -= 10


LATE_RANKS = ("0:0:late", "1:0:late", "2:0:late")


@pytest.mark.parametrize("asked", tiered([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], [signal.SIGTERM]))
def test_stop_before_any_heartbeat_ends_all_at_once(start: Start, asked: signal.Signals) -> None:
    for moment in ("as soon as it runs", "once the ranks' processes are there"):
        job = start("600", *LATE_RANKS)
        if moment != "as soon as it runs":
            until(lambda: all(rank.pid for rank in job.attempt.ranks.values()))  # noqa: B023
        job.requests.take(asked)
        outcome = job.outcome()
        assert (outcome.code, outcome.failure) == (75, None), moment
        assert not any(line.startswith("step") for line in job.lines), moment


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_still_import_get_the_signal_later(
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
def test_early_sigusr1_waits_for_the_first_step(start: Start, tmp_path: Path, words: tuple[str, ...]) -> None:
    job = start("600", *words)
    if words:
        until(lambda: all(rank.pid for rank in job.attempt.ranks.values()))
    job.requests.take(signal.SIGUSR1)
    until(lambda: job.attempt._last_signal)
    (tmp_path / "go").touch()
    outcome = job.outcome()
    assert (outcome.code, outcome.failure) == (75, None), job.lines
    assert "step 1" in job.lines and "saved" in job.lines


def test_second_signal_ends_all_at_once(start: Start) -> None:
    job = start("600", "1:3:hang")
    until(lambda: job.attempt.ranks[1].step == 3)
    job.requests.take(signal.SIGINT)
    time.sleep(1)
    assert job.left()
    job.requests.take(signal.SIGINT)
    began = time.monotonic()
    assert job.outcome().code == 130
    assert time.monotonic() - began < allowed(5)


def test_stopped_rank_is_named_with_its_stack(start: Start) -> None:
    job = start("600", "1:3:stop", hang_timeout=4)
    outcome = job.outcome()
    assert outcome.code == 124 and outcome.failure is not None and outcome.failure.rank == 1
    with open(f"{job.plan.logs}/rank-1.stack", encoding="utf-8") as file:
        assert "fake_rank.py" in file.read()


def test_killed_agent_is_reported_and_its_ranks_end(start: Start) -> None:
    job = start("600")
    until(lambda: all_send_heartbeats(job.attempt))
    agent = job.attempt._hosts["two"].channel
    os.kill(agent.pid, signal.SIGKILL)
    outcome = job.outcome()
    assert outcome.code == 69 and outcome.lost == ("two",)
    assert outcome.failure is not None and "killed by signal 9" in outcome.failure.text()
