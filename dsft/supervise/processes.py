"""The processes of a job on this host: found by the variable DSFT_JOB, which each inherits, and ended. Reads
/proc; kills processes that have the variable, or that one of them started, and no others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

JOB = "DSFT_JOB"
GONE = 3.0  # seconds that killed processes may take to be gone


def job_processes(job: str) -> list[int]:
    """Living ones, oldest first, without this process."""
    wanted, own = f"{JOB}={job}".encode(), os.getpid()
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
    return [pid for pid in sorted(pids) if pid != own and wanted in environment_of(pid) and is_alive(pid)]


def kill_job(job: str, leaders: Iterable[int] = ()) -> list[int]:
    """SIGKILL to all of them, and to the descendants of `leaders`, until none is left. Gives those that are
    left after GONE seconds (in the kernel, waiting for a disk that does not answer)."""
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
    """As it was at the process's start; empty where it is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    state = _stat(pid)[:1]
    return bool(state) and state[0] not in {"Z", "X"}


def is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]


def code_of_ended(pid: int) -> int | None:
    """The exit code, or the negative number of the signal, of another process's child that has ended; None
    where its parent has asked for it already. proc(5): the last field of its `stat`."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] == "Z" else None


def _stat(pid: int) -> list[str]:
    """Its fields from the third (the state) on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _descendants(leader: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(leader).children(recursive=True)]
    except psutil.Error:
        return []
