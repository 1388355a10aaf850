"""`dsft status`: what a run's folder, its lock and its supervisor say, with real processes that live or are
killed."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsft.cli import app
from dsft.commands.status import lines, lock_holder, status_of
from dsft.errors import MissingInputError
from dsft.system.run_folder import named_run

HOLD = """
import sys
from pathlib import Path
from dsft.system.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 200 steps at step 120, with a checkpoint at 100 and one that was not committed."""
    folder = tmp_path / "runs" / "two"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/train.log").write_text(
        "resumed at step 100\nstep 119/200  loss 2\nstep 120/200  loss 2\n"
    )
    records = [{"train/global_step": 100, "eval/loss": 3.25}]
    records += [
        {"train/global_step": step, "train/loss": 2.5, "perf/step_time": 0.5, "perf/tokens_per_second": 8e3}
        for step in range(101, 121)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + '{"train/global_step": 121, "tra')
    for step in (50, 100, 120):
        (folder / f"checkpoints/step-{step}").mkdir(parents=True)
    for step in (50, 100):
        (folder / f"checkpoints/step-{step}/MANIFEST.json").write_text("{}")
    return folder


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def write_status(folder: Path, *, age: float = 0, **facts: Any) -> None:
    """status.json, as dsft launch writes it."""
    found = {
        "pid": os.getpid(), "host": socket.gethostname(), "command": "dsft launch specs/two.yaml",
        "launcher": "deepspeed", "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": "running", "attempt": 1,
        "ranks": {
            str(rank): {"host": f"node{rank + 1}", "pid": 40 + rank, "step": 120, "phase": "step",
                        "pulse_age": 0.5, "progress_age": 2.5}
            for rank in range(2)
        },
        "exit_code": None, "error": None,
    }  # fmt: skip
    path, written = folder / "logs/status.json", time.time() - age
    path.write_text(json.dumps(found | facts))
    os.utime(path, (written, written))


def test_a_launched_run_is_shown_with_its_ranks(run: Path) -> None:
    write_status(run, age=3)
    found = status_of(run)
    assert (found.state, found.step, found.total_steps, found.checkpoint) == ("running", 120, 200, "step-100")
    assert (found.loss, found.held_out_loss, found.tokens_per_second) == (2.5, 3.25, 8000)
    assert found.seconds_left == 40
    assert [(rank["rank"], rank["host"], rank["step"]) for rank in found.ranks] == [
        (0, "node1", 120),
        (1, "node2", 120),
    ]
    assert 3.5 <= found.ranks[0]["pulse_age"] < 10 and 5.5 <= found.ranks[0]["progress_age"] < 12
    shown = "\n".join(lines(found))
    assert "two: running (dsft launch by deepspeed: process" in shown
    assert "step        120 of 200, 0:00:40 left" in shown
    assert "loss        2.5000, held-out 3.2500" in shown
    assert "8,000 tokens/s, 0.5 s per step" in shown


@pytest.mark.parametrize(
    ("code", "state"), [(0, "finished"), (75, "stopped"), (69, "failed"), (124, "failed"), (143, "failed")]
)
def test_the_recorded_end_is_shown(run: Path, code: int, state: str) -> None:
    write_status(
        run, state="ended", exit_code=code, error="rank 3 on node2: out of memory" if code == 69 else None
    )
    found = status_of(run)
    assert (found.state, found.exit_code, found.seconds_left) == (state, code, None)
    assert f"ended with exit code {code}" in found.why and ("out of memory" in found.why) == (code == 69)


def test_a_supervisor_that_was_killed_is_not_taken_for_one_that_runs(run: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    write_status(run, pid=process.pid)
    assert status_of(run).state == "running"
    process.kill()
    process.wait()
    found = status_of(run)
    assert found.state == "failed" and "has ended without recording its end" in found.why
    with held(run) as still:
        assert f"process {still.pid} on {socket.gethostname()} still has the run's lock" in status_of(run).why


def test_another_process_with_its_number_is_not_the_supervisor(run: Path) -> None:
    write_status(run, age=30 * 86400)
    assert "has ended without recording its end" in status_of(run).why


def test_an_old_status_is_shown_as_silent(run: Path) -> None:
    write_status(run, host="node1", age=90)
    found = status_of(run)
    assert found.state == "silent" and "status.json is 90 seconds old" in found.why


def test_a_run_that_was_started_by_hand_holds_its_lock(run: Path) -> None:
    with held(run) as process:
        found = status_of(run)
        assert found.state == "running"
        assert found.why == f"started by hand: process {process.pid} on {socket.gethostname()}"
        write_status(run, state="ended", exit_code=0, age=1000)  # of an earlier start
        assert status_of(run).state == "running"
    (run / "logs/status.json").unlink()
    found = status_of(run)
    assert found.state == "stopped" and found.why.endswith("the same command resumes from step-100")


def test_looking_takes_no_lock_away(run: Path) -> None:
    with held(run):
        assert lock_holder(run / ".lock", None) is not None
    assert lock_holder(run / ".lock", None) is None
    with held(run):
        pass


def test_another_hosts_process_is_believed_as_long_as_it_writes(run: Path) -> None:
    (run / ".lock").write_text("process 7 on node9")
    assert status_of(run).why == "started by hand: process 7 on node9"
    old = time.time() - 3600
    os.utime(run / "logs/train.log", (old, old))
    assert status_of(run).state == "stopped"


def test_a_finished_run_by_hand(run: Path) -> None:
    (run / "logs/train.log").write_text("step 120/120  loss 2\n")
    assert status_of(run).state == "stopped"
    (run / "export").mkdir()
    (run / "export/config.json").write_text("{}")
    assert status_of(run).state == "finished"


def test_a_run_that_never_trained(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    found = status_of(tmp_path)
    assert found.state == "failed" and "before its first step" in found.why
    assert list(lines(found))[1:] == ["  checkpoint  none yet"]
    unknown = dict.fromkeys(("pid", "step", "phase", "pulse_age", "progress_age"))
    write_status(tmp_path, state="starting", ranks={"0": {"host": "node1"} | unknown})
    found = status_of(tmp_path)
    assert found.state == "starting" and found.ranks[0]["pulse_age"] is None
    assert list(lines(found))[-1].split() == ["0", "node1", "-", "-", "-", "none", "none"]


def test_files_that_are_torn_are_left_out(run: Path) -> None:
    (run / "logs/status.json").write_text('{"pid": ')
    (run / "metrics.jsonl").write_bytes(b'\xff\x00\n[1]\n{"train/global_step": "x"}\n')
    assert status_of(run).step is None
    assert status_of(run).checkpoint == "step-100"


def test_an_unreadable_lock_has_no_holder(run: Path) -> None:
    (run / ".lock").mkdir()
    assert status_of(run).state == "stopped"


@pytest.mark.parametrize("other", [
    {"attempt": None}, {"attempt": "x"}, {"state": "ended", "exit_code": []}, {"pid": 10**400},
    {"ranks": {"0": None}}, {"ranks": {"x": {"host": "a"}}}, {"ranks": [1]},
    {"ranks": {"0": {"pulse_age": "a"}}},
])  # fmt: skip
def test_a_status_json_of_other_types_is_passed_over(run: Path, other: dict[str, Any]) -> None:
    write_status(run, **other)
    assert status_of(run).state == "stopped"


def test_a_step_time_that_is_not_finite_gives_no_time_left(run: Path) -> None:
    write_status(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"train/global_step": 121, "train/loss": 1.0, "perf/step_time": "Infinity"}\n')
    text = "\n".join(lines(status_of(run)))
    assert "121 of" in text and "inf" not in text


@pytest.mark.parametrize("time", ['"Infinity"', '"-Infinity"', "1e300", "-5", "9" * 400])
@pytest.mark.parametrize("total", ["200", "9" * 18, "9" * 5_000])
def test_times_and_steps_of_any_size_are_shown_or_left_out(run: Path, time: str, total: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'\n{{"train/global_step": 121, "train/loss": 1.0, "perf/step_time": {time}}}\n')
        file.write(f'{{"train/global_step": 122, "train/loss": 1.0, "perf/step_time": {time}}}\n')
    (run / "logs/train.log").write_text(f"step 119/{total}  loss 2\n")
    assert "two: stopped" in "\n".join(lines(status_of(run)))


def test_only_regular_files_are_read(run: Path) -> None:
    for name in ("metrics.jsonl", "logs/train.log", "logs/status.json", ".lock"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert status_of(run).state == "stopped"
    for name in ("metrics.jsonl", "logs/train.log", "logs/status.json", ".lock"):
        (run / name).unlink()
        (run / name).symlink_to("/dev/zero")
    assert status_of(run).state == "stopped"


@pytest.mark.parametrize("unit", ["[", '{"a":'])
def test_a_status_or_a_record_that_is_nested_without_end_is_passed_over(run: Path, unit: str) -> None:
    (run / "logs/status.json").write_text(unit * 50_000)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + unit * 50_000)
    found = status_of(run)
    assert found.state == "stopped" and found.step == 120


def test_nothing_that_a_terminal_obeys_is_printed(run: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b1m\r\u202e"
    rank = {"host": evil, "pid": evil, "step": 1, "phase": evil, "pulse_age": 0.5, "progress_age": 2.5}
    write_status(run, command=evil, launcher=evil, ranks={"0": rank})
    printed = CliRunner().invoke(app, ["status", str(run)]).output
    assert r"command     \x1b]0;title\x07\x1b[2J\x9b1m\r\u202e" in printed
    assert not set(evil[0] + "\x07\x9b\r\u202e") & set(printed)


def test_the_command(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])
    write_status(run)
    done = CliRunner().invoke(app, ["status", "two", "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["ranks"][1]["host"] == "node2"
    assert CliRunner().invoke(app, ["status", str(run)]).output.startswith("two: running")
    with pytest.raises(
        MissingInputError, match="nothing is neither the folder of a run nor the name of one; runs/ has two"
    ):
        named_run("nothing")


def test_without_a_name_all_runs_are_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that wrote last comes first; what is not known is left out; other folders are not runs."""
    monkeypatch.chdir(run.parents[1])
    write_status(run)
    older, other = run.parent / "older", run.parent / ".cache"
    (older / "logs").mkdir(parents=True)
    other.mkdir()
    for path in (older, older / "logs"):
        os.utime(path, (1e9, 1e9))
    done = CliRunner().invoke(app, ["status"])
    rows = [line.split() for line in done.output.splitlines() if line.strip()]
    assert rows[0] == ["run", "state", "step", "loss", "tokens/s", "left"]
    assert rows[2:] == [["two", "running", "120/200", "2.5000", "8,000", "0:00:40"], ["older", "failed"]]
    assert CliRunner().invoke(app, ["status", "runs"]).output == done.output
    found = json.loads(CliRunner().invoke(app, ["status", "--json"]).output)
    assert [(one["run"], one["state"], one["step"]) for one in found] == [
        ("two", "running", 120),
        ("older", "failed", None),
    ]
    monkeypatch.chdir(older)
    with pytest.raises(MissingInputError, match="there is no run in runs/"):
        CliRunner().invoke(app, ["status"], catch_exceptions=False)
