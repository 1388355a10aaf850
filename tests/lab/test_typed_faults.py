"""`deepspeed --hostfile` typed by hand over two hosts, and what happens to it: the command is killed or asked
to end, a rank on the other host is killed. How long until nothing is left, and what was saved.

docs/internals/reliability.md has the figures, and those of `dsft launch`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.runs import SPEC
from tests.lab.hosts import ROOT, Lab, Seen
from tests.launching import LATE, allowed

SLOW = ROOT / "tests" / "integration" / "slow.py"
LIMIT = 5.0  # seconds, for the ranks; launch.py looks once a second, and pdsh waits for it


def command(lab: Lab) -> Seen:
    """deepspeed itself, on the host where it was typed."""
    return next(seen for seen in lab.processes("", "node1") if Path(seen.argv[1:2][0]).name == "deepspeed")


def other_rank(lab: Lab) -> Seen:
    (found,) = (seen for seen in of_ranks(lab) if seen.host == "node2")
    return found


@pytest.mark.parametrize(
    ("victim", "fault", "saves"),
    [
        (command, signal.SIGTERM, True),
        # test_supervised_faults.py always kills one, and tests/integration/test_stopped.py launch.py.
        pytest.param(other_rank, signal.SIGKILL, False, marks=pytest.mark.long),
    ],
)
def test_no_process_outlives_a_typed_run(
    lab: Lab, tmp_path: Path, victim: Callable[[Lab], Seen], fault: signal.Signals, saves: bool
) -> None:
    text = SPEC.replace("max_steps: 10, eval_every: 5", "max_steps: 5000").replace(
        "{every: 4}", "{every: 5000}"
    )
    (tmp_path / "small.yaml").write_text(text + f"output_dir: {tmp_path / 'runs'}\n")
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    words = ["--hostfile", str(tmp_path / "hostfile"), str(SLOW), str(tmp_path / "small.yaml")]
    with (tmp_path / "output").open("w") as out:
        deepspeed = str(Path(sys.executable).parent / "deepspeed")
        typed = lab.start("node1", [deepspeed, *words], stdout=out, stderr=out)
    checkpoints = tmp_path / "runs" / "small" / "checkpoints"
    try:
        deadline = time.monotonic() + LATE
        while "step 3/" not in (tmp_path / "output").read_text():
            assert typed.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(victim(lab).pid, fault)
        seconds = [
            until(lambda: not of_ranks(lab), began),
            until(lambda: not lab.processes(str(SLOW)), began),
        ]
        code = typed.wait(LATE)
    finally:
        lab.reset()
    what = f"ranks and all gone after {seconds}, exit code {code}\n{(tmp_path / 'output').read_text()}"
    assert code != 0 and seconds[0] < allowed(LIMIT), what
    assert (checkpoints / "latest").exists() == saves, what


def of_ranks(lab: Lab) -> list[Seen]:
    return [seen for seen in lab.processes(str(SLOW)) if str(SLOW) in seen.argv[1:3]]


def until(look: Callable[[], bool], began: float) -> float:
    while not look():
        assert time.monotonic() - began < LATE
        time.sleep(0.05)
    return round(time.monotonic() - began, 1)
