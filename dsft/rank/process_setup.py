"""Set up a rank's process: log, heartbeat, signal handling, exit when the launcher ends, and
cleanup of its compilers."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from dsft.rank.ancestors import watch
from dsft.rank.environment import Launched
from dsft.rank.heartbeat import LOGS, SOCKET, Heartbeat, begin_log
from dsft.rank.launched import AGENT
from dsft.rank.stopping import Stopping
from dsft.system.redact import RedactedStream


def set_up_process(launched: Launched, environ: Mapping[str, str]) -> tuple[Heartbeat, Stopping]:
    """Set up this process. Call once, in the main thread. Signals are handled before the first heartbeat is
    sent, so that whoever has received a heartbeat may send a signal."""
    sys.stdout, sys.stderr = (
        unbroken(descriptor, stream, redacts=not environ.get(AGENT))  # else dsft's agent redacts it all
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr))
    )
    begin_log(environ.get(LOGS), launched.rank, launched.world_size)
    heartbeat = Heartbeat(launched.rank, launched.local_rank, environ.get(SOCKET))

    def ends(code: int, message: str) -> None:
        heartbeat.end(code, message)
        end_ninja()

    stopping = Stopping(ends, prints=launched.rank == 0)
    stopping.listen()
    heartbeat.start()
    if not environ.get(AGENT):  # else the kernel kills this process with the agent
        watch(stopping)
    return heartbeat, stopping


def unbroken(descriptor: int, output: io.TextIOBase | Any, *, redacts: bool) -> io.TextIOWrapper:
    """Return `output` as a line-buffered stream to `descriptor` that ignores a broken pipe: once the reader
    is gone, for example because ssh has ended, output is discarded without an error, so that the run can
    still save. redacts: hide secrets."""
    output.flush()
    raw = io.BufferedWriter(_Unbroken(descriptor, "w", closefd=False))
    kind = RedactedStream if redacts else io.TextIOWrapper
    return kind(raw, output.encoding, "backslashreplace", line_buffering=True)


class _Unbroken(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return memoryview(data).nbytes


def has_ninja(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether ninja is on PATH. If it is only in this Python's folder, append that folder to PATH
    first."""
    path = environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=path) is not None:
        return True
    folder = str(Path(sys.executable).parent)
    if shutil.which("ninja", path=folder) is None:
        return False
    environ["PATH"] = os.pathsep.join([path, folder])
    return True


def end_ninja() -> None:
    """Send SIGTERM to a ninja that this process has started (ninja then removes half-written files) and to
    its compilers. Call right before this process ends: otherwise its main thread sees a failed build."""
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.name() == "ninja":
                found += [child.pid, *(each.pid for each in child.children(recursive=True))]
    sys.setswitchinterval(60)  # seconds: no other thread runs before this one has ended the process
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
