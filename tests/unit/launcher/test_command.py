"""What `dsft launch` refuses before it starts anything, and what Ctrl-C does while it waits for a host."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsft.cli import app
from dsft.doctor.results import CheckResult
from dsft.errors import SpecError, WorldError
from dsft.launcher import command
from dsft.launcher.attempt import Requests
from dsft.launcher.launch_plan import LaunchPlan
from dsft.launcher.verdict import Failure, Outcome
from tests.launching import LATE

ONE, TWO = "specs/one_node.yaml", "specs/two_nodes.yaml"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([TWO, "--processes", "4"], 2, "--processes: 4 has no effect, since cluster.hosts gives"),
        (["specs/zero2.yaml", "--processes", "4", "--hostfile", "two"], 2, "since --hostfile gives"),
        (["specs/zero2.yaml", "--processes", "4", "--launcher", "slurm"], 2, "since the Slurm job gives"),
        (
            [ONE, "--hostfile", "two"], 69,
            "cluster.hosts expects 8 processes (localhost 8) but --hostfile two has 16 (a 8 + b 8)",
        ),
        ([TWO, "--hostfile", "binary"], 2, "The hostfile cannot be used."),
        ([TWO, "--hostfile", "/dev/zero"], 66, "--hostfile /dev/zero cannot be read (it is a device, not a"),
        ([TWO, "--hostfile", "uneven"], 69, "16 processes (node1 8 + node2 8) but --hostfile uneven has 16"),
    ],
)  # fmt: skip
def test_what_would_go_unheard_or_break_the_promise_is_refused(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "specs").symlink_to(Path("specs").absolute())
    (tmp_path / "two").write_text("a slots=8\nb slots=8\n")
    (tmp_path / "uneven").write_text("a slots=12\nb slots=4\n")
    (tmp_path / "binary").write_bytes(b"a slots=8\n\xbe\x00\xff")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["launch", *words, "--dry-run"])
    error = done.exception
    assert getattr(error, "exit_code", None) == code and said in str(error), done.output


def test_train_uses_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processes as GPUs, one on a CPU of any number of NUMA nodes, and no other host."""
    here = command.Options(only_here=True)
    two_nodes = "cluster.hosts={localhost: 2, node2: 2}"
    with pytest.raises(WorldError, match=r"other machines than this one \(node2\).*dsft launch"):
        command.prepared(Path(TWO), (two_nodes,), here)
    assert command.prepared(Path(ONE), (), here).plan.hosts == {"localhost": 8}
    for devices, hosts in (("cuda 4", 4), ("cpu 4", 1)):
        monkeypatch.setattr(command, "DEVICES", f"print('a line'); print('devices {devices}')")
        assert command.prepared(Path("specs/zero2.yaml"), (), here).plan.hosts == {"localhost": hosts}
    with pytest.raises(SpecError, match=r"data-parallel ranks 3 does not hold: the product is 24"):
        command.prepared(
            Path("specs/quickstart.yaml"), ("train.global_batch_size=16",), command.Options(processes=3)
        )
    monkeypatch.setattr(command, "DEVICES", "print('devices cuda 0')")
    with pytest.raises(WorldError, match="DeepSpeed finds no device"):
        command.prepared(Path("specs/zero2.yaml"), (), here)


def test_a_hostfile_of_other_names_with_the_same_numbers_is_taken(tmp_path: Path) -> None:
    hostfile = tmp_path / "two"
    hostfile.write_text("a slots=8\nb slots=8\n")
    done = CliRunner().invoke(app, ["launch", TWO, "--hostfile", str(hostfile), "--dry-run"])
    assert done.exit_code == 0 and "b: 8 processes, ranks 8 to 15" in done.output, done.output


def test_a_stop_ends_the_wait_for_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    start = command.prepared(Path(TWO), (), command.Options(restarts=1))
    lost = Outcome(69, Failure("host", "node2", None, "was lost"), ("node2",), 1.0)
    asked = Requests(stops=1)

    async def absent(plan: LaunchPlan) -> list[str]:
        return ["node2"]

    monkeypatch.setattr(command, "absent", absent)
    began = time.monotonic()
    assert asyncio.run(command.reachable(start, lost, asked)) is None
    assert time.monotonic() < began + command.PAUSE


def test_the_end_of_a_run_says_its_error_once_and_last(tmp_path: Path) -> None:
    start = command.prepared(Path(TWO), (f"output_dir={tmp_path}",), command.Options())
    lines = ("--- rank 1 of 2", "reading", "error: rank 1: no row is left.", "  a.jsonl:3: empty")
    failure = Failure("rank", "node2", 65, "no row is left.\n  a.jsonl:3: empty", 1, None, lines)
    said = list(command.ending(start, Outcome(65, failure, (), 3.2), []))
    assert said == [
        "[node2:1] reading",
        f"all logs: {start.logs}",
        "error: rank 1 on node2: no row is left.\n  a.jsonl:3: empty",
        "failed after 3 seconds, exit code 65",
    ]
    said = list(command.ending(start, Outcome(75, None, (), 3.2), []))
    assert said[0] == f"stopped; there is no checkpoint; start again with {start.typed}"
    assert said[1:] == ["ended after 3 seconds, exit code 75"]


def test_a_refused_start_names_an_option_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = CheckResult(
        "space", "localhost", "failure", "the disk is full", "the run writes there", "free some"
    )
    monkeypatch.setattr("dsft.doctor.command.quick", lambda *_, **__: [failed])
    with pytest.raises(WorldError) as refused:
        command.launch(Path(ONE), (), command.Options(only_here=True))
    program, word, *options = re.search(
        r"\((\S+) (\S+) (--\S+) starts it all the same\)", str(refused.value)
    ).groups()
    assert program == "dsft" and options[0] in CliRunner().invoke(app, [word, "--help"]).output


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        (signal.SIGTERM, "launching"),
        (signal.SIGINT, "launching"),
        (signal.SIGUSR1, "launching"),
        (signal.SIGTERM, "step"),
    ],
)
def test_a_signal_from_the_first_line_on_ends_it_with_75(
    tmp_path: Path, asked: signal.Signals, at: str
) -> None:
    words = [ONE, "cluster.hosts={localhost: 2}", f"output_dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-u", "tests/lab/fake_launch.py", *words], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as command:  # fmt: skip
        assert command.stdout is not None
        said = iter(command.stdout.readline, "")
        assert any(line.startswith(at) for line in said)
        command.send_signal(asked)
        rest = list(said)
        assert command.wait(LATE) == 75, rest
    saves = "saved\n" in rest
    if asked == signal.SIGUSR1 or at == "step":
        assert saves, rest
    else:  # nothing is saved before a step, unless a rank had begun one when the signal reached it
        assert not saves or any(line.startswith("step") for line in rest), rest


def test_a_terminal_that_is_closed_does_not_end_what_nohup_started(tmp_path: Path) -> None:
    words = [ONE, "cluster.hosts={localhost: 2}", f"output_dir={tmp_path}"]
    with subprocess.Popen(
        ["nohup", sys.executable, "-u", "tests/lab/fake_launch.py", *words], text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as command:  # fmt: skip
        assert command.stdout is not None
        said = iter(command.stdout.readline, "")
        assert any(line.startswith("step") for line in said)
        command.send_signal(signal.SIGHUP)
        assert all(next(said).startswith("step") for _ in range(5))
        command.send_signal(signal.SIGTERM)
        rest = list(said)
        assert command.wait(LATE) == 75, rest
    assert "saved\n" in rest


@pytest.mark.parametrize("port", ["junk", "99999"])
def test_a_port_that_is_none_is_refused_and_not_replaced(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(WorldError, match="MASTER_PORT"):
        command.prepared(Path(TWO), (), command.Options(doctor=False))
