"""`dsft launch` over two hosts, and the faults that need two: a killed supervisor, a pulled cable, Slurm, and
a training run through several of them. tests/unit/launcher/test_attempt.py has those of ranks and agents.

Hosts, ssh, agents and the supervisor are real throughout; where training is no part of the fault, ranks step
without it (tests/unit/launcher/fake_rank.py). docs/internals/reliability.md has the figures.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.integration.runs import SPEC, records, trained, write_spec
from tests.lab.hosts import ROOT, Lab
from tests.lab.slurm import why_not as no_slurm
from tests.launching import LATE, allowed
from tests.selected import tiered

FAKE = Path(__file__).with_name("fake_launch.py")
SLOW = ROOT / "tests" / "integration" / "slow.py"
CLUSTER = "cluster: {hosts: {node1: 1, node2: 1}, interface: e0, hang_timeout: 4}\n"
T = TypeVar("T")


def until(look: Callable[[], T], seconds: float = LATE) -> T:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.05)
    return found


@dataclass
class Run:
    """A supervised run in the lab. `command`: its process, on node1."""

    lab: Lab
    folder: Path
    command: subprocess.Popen[str]

    @property
    def logs(self) -> Path:
        return self.folder / "runs" / "small" / "logs"

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.logs / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def stepping(self, past: int, attempt: int = 1) -> bool:
        """Whether all ranks of an attempt have gone further than a step."""
        status = self.status()
        ranks = status.get("ranks", {}).values() if status.get("attempt") == attempt else ()
        return bool(ranks) and all((rank["step"] or 0) > past for rank in ranks)

    def signal_rank(self, number: int, what: int) -> None:
        rank = self.status()["ranks"][str(number)]
        os.kill(self.lab.outside(rank["host"], rank["pid"]), what)

    def ended(self, began: float, within: float) -> tuple[int, str]:
        """Its exit code and output; every process of the job is gone `within` seconds after `began`."""
        code = self.command.wait(LATE)
        until(lambda: not self.lab.processes("DSFT_JOB="))
        took = time.monotonic() - began
        output = (self.folder / "out").read_text()
        assert took < allowed(within), f"{took:.1f} s\n{output}"
        return code, output


@contextmanager
def running(
    lab: Lab, folder: Path, argv: list[str], program: str = sys.executable, env: dict[str, str] | None = None
) -> Iterator[Run]:
    (folder / "small.yaml").write_text(f"{SPEC}{CLUSTER}output_dir: {folder / 'runs'}\n")
    with (folder / "out").open("w") as out:
        process = lab.start("node1", [program, *argv], env, cwd=folder, stdout=out, stderr=out)
    try:
        yield Run(lab, folder, process)
    finally:
        lab.reset()


@pytest.fixture
def stepping(lab: Lab, tmp_path: Path) -> Iterator[Run]:
    with running(lab, tmp_path, [str(FAKE), "small.yaml"]) as run:
        until(lambda: run.stepping(5))
        yield run


def test_killed_supervisor_ends_all(stepping: Run) -> None:
    began = time.monotonic()
    stepping.command.kill()
    code, _ = stepping.ended(began, 5)
    assert code == -signal.SIGKILL
    until(lambda: not stepping.lab.processes("dsft.launcher"))


def test_pulled_cable_ends_all_and_the_other_host_goes_on(lab: Lab, tmp_path: Path) -> None:
    """15 seconds of silence, then both sides act alone; cluster.min_hosts allows one host."""
    words = [str(FAKE), "small.yaml", "cluster.min_hosts=1"]
    with running(lab, tmp_path, words, env={"FAKE_RESTARTS": "1"}) as run:
        until(lambda: run.stepping(5))
        began = time.monotonic()
        lab.cut("node2")
        until(lambda: not lab.processes("DSFT_JOB=", "node2"))
        assert time.monotonic() - began < allowed(30)
        until(lambda: run.stepping(5, attempt=2))
        assert list(run.status()["ranks"]) == ["0"]
        run.command.send_signal(signal.SIGTERM)
        code, output = run.ended(time.monotonic(), 5)
    assert code == 75
    assert "node2: has sent no message for 15 seconds" in output
    assert "starting again from the last checkpoint, on node1 (restart 1 of 1)" in output


def test_launch_under_slurm(lab: Lab, tmp_path: Path) -> None:
    """The agents are job steps of an allocation; nothing goes through ssh."""
    if reason := no_slurm():
        pytest.skip(reason)
    words = ["-N2", sys.executable, str(FAKE), "small.yaml", "cluster.launcher=slurm"]
    with lab.slurm(), running(lab, tmp_path, words, program="salloc") as run:
        until(lambda: run.stepping(5))
        assert not [seen for seen in lab.processes() if seen.argv[0] == "ssh"]
        began = time.monotonic()
        (supervisor,) = [seen for seen in lab.processes("fake_launch.py") if seen.argv[1:2] == (str(FAKE),)]
        os.kill(supervisor.pid, signal.SIGTERM)
        code, output = run.ended(began, 10)
    assert code == 75, output
    assert (run.logs / "rank-1.log").read_text().rstrip().endswith("saved")


def dsft(program: Path) -> list[str]:
    """Arguments of python for the command dsft, whose ranks run `program` in place of train.py."""
    lines = ["from pathlib import Path", "from dsft.cli import main", "from dsft.launcher import command"]
    lines += [f"command.TRAIN = Path({str(program)!r})", "command.EVERY = 0.2"]
    return ["-c", "\n".join([*lines, "main()"])]


# tests/unit/launcher/test_attempt.py always stops a rank for good, with ranks that train nothing.
@pytest.mark.parametrize("is_one_stopped", tiered([False, True], [False]))
def test_run_through_faults_ends_as_one_without(lab: Lab, tmp_path: Path, is_one_stopped: bool) -> None:
    """Real training: a rank is killed, another one may be stopped for good, then SIGTERM. Each start goes on
    from the step that was saved last, and what is measured is what a run on one host without a break
    measures."""
    own = ["train.max_steps=60", "train.eval_every=10"]  # a rank goes on while its stack is saved
    words = [*dsft(SLOW), "launch", "small.yaml", *own, "checkpoint.every=5", "cluster.hang_timeout=5"]
    saves = tmp_path / "runs" / "small" / "checkpoints" / "latest"
    with running(lab, tmp_path, [*words, "--restarts", "2"]) as run:
        until(lambda: run.stepping(5) and saves.exists())
        run.signal_rank(1, signal.SIGKILL)
        until(lambda: run.stepping(10, attempt=2))
        if is_one_stopped:
            run.signal_rank(0, signal.SIGSTOP)
            until(lambda: run.stepping(15, attempt=3))
        began = time.monotonic()
        run.command.send_signal(signal.SIGTERM)
        code, output = run.ended(began, 30)
    assert code == 75, output
    assert re.search(r"rank 1 on node2, step \d+: was killed by signal 9", output)
    if is_one_stopped:
        assert re.search(r"rank 0 on node1, step \d+: has sent no heartbeat for", output)
        assert "slow.py" in (run.logs / "rank-0.stack").read_text()

    saved = 0  # the step of the last checkpoint at each moment; a kill may come between a commit and its line
    starts = []
    for line in output.splitlines():
        if found := re.search(r"checkpoints/step-(\d+) is committed", line):
            saved = int(found[1])
        if found := re.match(r"going on from step (\d+): ", line):
            assert int(found[1]) >= saved, output
            saved = int(found[1])
            starts.append(saved)
    assert len(starts) == 1 + is_one_stopped, output
    stopped = re.search(r"stopped at step (\d+) of 60 by SIGTERM, and saved", output)
    assert stopped is not None and int(stopped[1]) == saved, output
    assert saves.read_text().strip() == f"step-{saved}"

    spec, own = write_spec(tmp_path), [*own, "checkpoint.every=100"]
    assert f"going on from step {saved}: " in trained(spec, *own)
    trained(spec, *own, f"output_dir={tmp_path / 'whole'}")
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert records(tmp_path / "runs" / "small", key) == records(tmp_path / "whole" / "small", key), key
