"""Reading and writing by threads of their own: a disk that does not answer, or a terminal that was stopped
(Ctrl-S), must not keep the supervisor and its agents from hearing each other. Takes files; gives and takes
lines.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from dsft.errors import plain
from dsft.supervise.logs import Tail

EVERY = 0.2  # seconds between two looks at a file that grows
WAITING = 20_000  # lines that may wait for a terminal or a disk; later ones are left out
STDOUT = 1
PATIENCE = 3.0  # seconds that the end waits for them


class Follower:
    """The lines that a file gets, as they come."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def lines(self, *, end: bool = False) -> list[str]:
        """Those since the last call. end: no more will come; waits for what there is."""
        if end:
            self._ended.set()
            self._thread.join(PATIENCE)
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._lines.get_nowait())
        return found

    def _follow(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(EVERY)
            for line in self._tail.lines(end=ended):
                self._lines.put(line)


class Voice:
    """Lines that are printed, and kept in a log. What cannot be written is left out: the run goes on."""

    def __init__(self, log: IO[str]) -> None:
        sys.stdout.flush()
        self._kept, self._printed = _Writer(log.fileno()), _Writer(STDOUT)

    def __call__(self, line: str) -> None:
        line = plain(line.rstrip("\r").rpartition("\r")[2], colours=True)  # of a progress bar its last state
        for each in (self._printed, self._kept):
            each.put(line)

    def close(self) -> None:
        for each in (self._printed, self._kept):
            each.close()


class _Writer:
    """By the descriptor: no lock of Python's stands in the way of the interpreter's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def put(self, line: str | None) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(line)

    def close(self) -> None:
        until = time.monotonic() + PATIENCE
        self.put(None)
        self._thread.join(max(until - time.monotonic(), 0))

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            text = f"{line}\n".encode(errors="backslashreplace")
            with suppress(OSError):  # a full disk, a terminal that is gone
                while text:
                    text = text[os.write(self._descriptor, text) :]
