"""Set up a rank's process: log redirection, heartbeat, signal handling, exit when the launcher ends, and
cleanup of its compilers."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import Any

from dsft.rank.ancestors import watch
from dsft.rank.environment import Launched
from dsft.rank.heartbeat import LOGS, SOCKET, Heartbeat, keep_log
from dsft.rank.ninja import end_ninja
from dsft.rank.stopping import Stopping


def set_up_process(launched: Launched, environ: Mapping[str, str]) -> tuple[Heartbeat, Stopping]:
    """Set up this process. Call once, in the main thread. Signals are handled before the first heartbeat is
    sent, so that whoever has received a heartbeat may send a signal."""
    sys.stdout, sys.stderr = unbroken(1, sys.stdout), unbroken(2, sys.stderr)
    keep_log(environ.get(LOGS), launched.rank, launched.world_size)
    heartbeat = Heartbeat(launched.rank, launched.local_rank, environ.get(SOCKET))

    def ends(code: int, message: str) -> None:
        heartbeat.end(code, message)
        end_ninja()

    stopping = Stopping(ends, prints=launched.rank == 0)
    stopping.listen()
    heartbeat.start()
    watch(stopping)
    return heartbeat, stopping


def unbroken(descriptor: int, output: io.TextIOBase | Any) -> io.TextIOWrapper:
    """Return `output` as a line-buffered stream to `descriptor` that ignores a broken pipe: once the reader
    is gone, for example because ssh has ended, output is discarded without an error, so that the run can
    still save."""
    output.flush()
    raw = io.BufferedWriter(_Unbroken(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding=output.encoding, errors="backslashreplace", line_buffering=True)


class _Unbroken(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return memoryview(data).nbytes
