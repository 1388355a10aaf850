"""The tests' own launcher leaves no process behind."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.launching import torchrun

WORKER = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
os.write(1, b"rank %d\\n" % int(os.environ["RANK"]))  # one write: the ranks share the pipe
if sys.argv[2] == "hang":
    time.sleep(600)
sys.exit(3 * int(os.environ["RANK"]))
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def test_ranks_that_hang_are_ended(worker: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        torchrun(worker, 2, [str(tmp_path), "hang"], timeout=30)
    assert "rank 1" in str(raised.value.stdout)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    deadline = time.monotonic() + 10
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still running"
        time.sleep(0.1)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_rank_that_fails_fails_the_launch(worker: Path, tmp_path: Path) -> None:
    done = torchrun(worker, 2, [str(tmp_path), "fail"], timeout=60)
    assert done.returncode != 0
    assert "exitcode  : 3" in done.stderr
