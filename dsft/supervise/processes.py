"""The processes of a job on this host: found by the variable DSFT_JOB, which each inherits, and ended. Reads
/proc; kills processes that have the variable, and no others.
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


def kill_job(job: str, leader: int | None = None) -> list[int]:
    """SIGKILL to all of them, and to the descendants of `leader` where it lives, until none is left. Those
    that are left after GONE seconds (in the kernel, waiting for a disk that does not answer)."""
    deadline = time.monotonic() + GONE
    while True:
        found = {*job_processes(job), *_descendants(leader)}
        _kill(found)
        if not found or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.05)


def environment_of(pid: int) -> list[bytes]:
    """As it was at the process's start; empty where it is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def variable(pid: int, name: str) -> str | None:
    prefix = f"{name}=".encode()
    values = [entry[len(prefix) :] for entry in environment_of(pid) if entry.startswith(prefix)]
    return values[0].decode(errors="surrogateescape") if values else None


def children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def is_alive(pid: int) -> bool:
    state = _stat(pid)[:1]
    return bool(state) and state[0] not in {"Z", "X"}


def is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]


def code_of_ended(pid: int) -> int | None:
    """The exit code, or the negative number of the signal, of a process that has ended and that its parent
    has not asked about yet; None where the parent was quicker. proc(5): the last field of its `stat`."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] == "Z" else None


def _stat(pid: int) -> list[str]:
    """Its fields from the third (the state) on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _descendants(leader: int | None) -> list[int]:
    try:
        return (
            [] if leader is None else [child.pid for child in psutil.Process(leader).children(recursive=True)]
        )
    except psutil.Error:
        return []


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
