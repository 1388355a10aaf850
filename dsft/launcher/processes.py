"""Find and kill the processes of a job on this host, by the variable DSFT_JOB, which every process of it
inherits. Reads /proc; kills only processes that have the variable, and their descendants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

JOB = "DSFT_JOB"
GONE = 3.0  # seconds that killed processes may take to end


def job_processes(job: str) -> list[int]:
    """Return the pids of the job's living processes in ascending order, without this one."""
    wanted, own = f"{JOB}={job}".encode(), os.getpid()
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
    return [pid for pid in sorted(pids) if pid != own and wanted in environment_of(pid) and is_alive(pid)]


def kill_job(job: str, leaders: Iterable[int] = ()) -> list[int]:
    """Send SIGKILL to all of the job's processes and to the descendants of `leaders` until none is left.
    Returns the pids still there after GONE seconds (blocked in the kernel by a disk that does not answer)."""
    deadline = time.monotonic() + GONE
    while True:
        found = {*job_processes(job), *(pid for leader in leaders for pid in _descendants(leader))}
        for pid in found:
            send(pid, signal.SIGKILL)
        if not found or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.05)


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def environment_of(pid: int) -> list[bytes]:
    """Return a process's environment at its start; empty if it is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    state = _stat(pid)[:1]
    return bool(state) and state[0] not in {"Z", "X"}


def is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (the state) on; empty if there is no such
    process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _descendants(leader: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(leader).children(recursive=True)]
    except psutil.Error:
        return []
