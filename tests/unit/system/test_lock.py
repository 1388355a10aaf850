"""A run's folder has one job at a time, and a dead one does not keep it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from dsft.errors import LockedError, StorageError
from dsft.system.lock import lock_folder
from tests.launching import allowed

HOLDER = """
import sys, time
from pathlib import Path
from dsft.system.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_job_names_the_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for _ in range(2):  # asking does not wipe the answer
        with pytest.raises(LockedError) as error, lock_folder(tmp_path / "run"):
            pass
        assert f"is used by process {holder.pid} on {socket.gethostname()}" in str(error.value)
        assert error.value.exit_code == 73


def test_lock_of_a_killed_job_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with lock_folder(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert time.monotonic() - began < allowed(1)


def test_it_is_free_after_the_block_and_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "run"):
        raise ZeroDivisionError
    with lock_folder(tmp_path / "run"):
        pass


def test_of_many_that_start_together_one_holds_it(tmp_path: Path) -> None:
    once = HOLDER.replace("time.sleep(600)", "sys.stdin.read()")
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", once, str(tmp_path / "run")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )
        for _ in range(6)
    ]
    output = [job.stdout.readline() for job in jobs if job.stdout]  # each has taken it, or ended
    ended = [job.communicate()[1] for job in jobs]
    assert sorted(output) == [""] * 5 + ["held\n"]
    assert sum("LockedError" in text for text in ended) == 5


@pytest.mark.parametrize("by", ["removed", "taken over", "replaced"])
def test_who_holds_it_notices_that_the_lock_is_no_longer_on_the_disk(tmp_path: Path, by: str) -> None:
    run = tmp_path / "run"
    with lock_folder(run) as lock:
        lock.check()
        (run / ".lock").rename(tmp_path / "moved")
        if by == "replaced":
            (run / ".lock").write_text("process 1 on elsewhere")
        with lock_folder(run) if by == "taken over" else nullcontext() as other:
            with pytest.raises(LockedError, match="This run has lost the lock of") as error:
                lock.check()
            if other is not None:
                other.check()
        says = f"process {os.getpid()} on " if by == "taken over" else "process 1 on elsewhere"
        assert (says in str(error.value)) == (by != "removed")
        assert error.value.exit_code == 73


def test_holder_of_a_removed_folder_gets_an_error(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run") as lock:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(StorageError, match="run is gone"):
            lock.check()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be locked"), lock_folder(tmp_path / "file" / "run"):
        pass
