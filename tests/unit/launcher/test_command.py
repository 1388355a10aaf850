"""What `dsft launch` refuses before it starts anything, and what Ctrl-C does while it waits for a host."""

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
from dsft.launcher.verdict import Failure, Outcome
from tests.launching import LATE

ONE, TWO = "specs/one_node.yaml", "specs/two_nodes.yaml"


@pytest.mark.parametrize(("words", "code", "message"), [
    ([TWO, "--processes", "4"], 2, "--processes: 4 has no effect, since cluster.hosts gives"),
    (["specs/zero2.yaml", "--processes", "4", "--hostfile", "two"], 2, "since --hostfile gives"),
    (["specs/zero2.yaml", "--processes", "4", "--launcher", "slurm"], 2, "since the Slurm job gives"),
    ([ONE, "--hostfile", "two"], 69,
     "cluster.hosts expects 8 processes (localhost 8) but --hostfile two has 16 (a 8 + b 8)"),
    ([TWO, "--hostfile", "binary"], 2, "The hostfile cannot be used."),
    ([TWO, "--hostfile", "/dev/zero"], 66, "--hostfile /dev/zero cannot be read (it is a device, not a"),
    ([TWO, "--launcher", "torchrun"], 2, "'torchrun' is neither dsft nor slurm: dsft launch starts"),
    ([TWO, "--hostfile", "uneven"], 69, "16 processes (node1 8 + node2 8) but --hostfile uneven has 16"),
])  # fmt: skip
def test_options_without_effect_or_against_the_spec_are_refused(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "specs").symlink_to(Path("specs").absolute())
    (tmp_path / "two").write_text("a slots=8\nb slots=8\n")
    (tmp_path / "uneven").write_text("a slots=12\nb slots=4\n")
    (tmp_path / "binary").write_bytes(b"a slots=8\n\xbe\x00\xff")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["launch", *words, "--dry-run"])
    error = done.exception
    assert getattr(error, "exit_code", None) == code and message in str(error), done.output


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


def test_hostfile_with_other_names_and_the_same_numbers_is_accepted(tmp_path: Path) -> None:
    hostfile = tmp_path / "two"
    hostfile.write_text("a slots=8\nb slots=8\n")
    done = CliRunner().invoke(app, ["launch", TWO, "--hostfile", str(hostfile), "--dry-run"])
    assert done.exit_code == 0 and "b: 8 processes, ranks 8 to 15" in done.output, done.output


def test_stop_ends_the_wait_for_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    start = command.prepared(Path(TWO), (), command.Options(restarts=1))
    lost = Outcome(69, Failure("host", "node2", None, "was lost"), ("node2",), 1.0)
    asked = Requests(stops=1)

    async def no_answer(agent: list[str]) -> bool:
        return False

    monkeypatch.setattr(command, "does_answer", no_answer)
    began = time.monotonic()
    assert asyncio.run(command.reachable(start, lost, asked)) is None
    assert time.monotonic() < began + command.PAUSE


def test_error_of_a_run_is_printed_once_and_last(tmp_path: Path) -> None:
    start = command.prepared(Path(TWO), (f"output_dir={tmp_path}",), command.Options())
    lines = ("--- rank 1 of 2", "reading", "error: rank 1: no row is left.", "  a.jsonl:3: empty")
    failure = Failure("rank", "node2", 65, "no row is left.\n  a.jsonl:3: empty", 1, None, lines)
    lines = list(command.ending(start, Outcome(65, failure, (), 3.2)))
    assert lines == [
        "[node2:1] reading",
        f"all logs: {start.logs}",
        "error: rank 1 on node2: no row is left.\n  a.jsonl:3: empty",
        "failed after 3 seconds, exit code 65",
    ]
    lines = list(command.ending(start, Outcome(75, None, (), 3.2)))
    assert lines[0] == f"stopped; there is no checkpoint; start again with {start.typed}"
    assert lines[1:] == ["ended after 3 seconds, exit code 75"]
    (warning, *_) = command.ending(start, Outcome(69, None, ("node2",), 3.2))
    assert warning.startswith(
        "warning: node2 is lost; processes that are left there end by themselves 15 seconds"
    )


@pytest.mark.parametrize("launcher", ["dsft", "deepspeed", "torchrun", "slurm"])
def test_launcher_of_the_spec(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec that is meant for deepspeed or torchrun is launched by dsft's own agents."""
    monkeypatch.setattr(command, "of_slurm", lambda spec, environ: {"a": 8, "b": 8})
    plan = command.prepared(Path(TWO), (f"cluster.launcher={launcher}",), command.Options()).plan
    assert plan.through == ("srun" if launcher == "slurm" else "ssh")


def test_refused_start_names_an_existing_option(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("asked", "at"), [
    (signal.SIGTERM, "launching"),
    (signal.SIGINT, "launching"),
    (signal.SIGUSR1, "launching"),
    (signal.SIGTERM, "step"),
])  # fmt: skip
def test_signal_after_the_first_line_ends_with_75(tmp_path: Path, asked: signal.Signals, at: str) -> None:
    words = [ONE, "cluster.hosts={localhost: 2}", f"output_dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-u", "tests/lab/fake_launch.py", *words], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as command:  # fmt: skip
        lines = iter(command.stdout.readline, "")
        assert any(line.startswith(at) for line in lines)
        command.send_signal(asked)
        rest = list(lines)
        assert command.wait(LATE) == 75, rest
    saves = "saved\n" in rest
    if asked == signal.SIGUSR1 or at == "step":
        assert saves, rest
    else:  # nothing is saved before a step, unless a rank had begun one when the signal reached it
        assert not saves or any(line.startswith("step") for line in rest), rest


def test_closed_terminal_does_not_end_a_run_under_nohup(tmp_path: Path) -> None:
    words = [ONE, "cluster.hosts={localhost: 2}", f"output_dir={tmp_path}"]
    with subprocess.Popen(
        ["nohup", sys.executable, "-u", "tests/lab/fake_launch.py", *words], text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as command:  # fmt: skip
        lines = iter(command.stdout.readline, "")
        assert any(line.startswith("step") for line in lines)
        command.send_signal(signal.SIGHUP)
        assert all(next(lines).startswith("step") for _ in range(5))
        command.send_signal(signal.SIGTERM)
        rest = list(lines)
        assert command.wait(LATE) == 75, rest
    assert "saved\n" in rest


@pytest.mark.parametrize("port", ["junk", "99999"])
def test_invalid_port_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(WorldError, match="MASTER_PORT"):
        command.prepared(Path(TWO), (), command.Options(doctor=False))
