"""What `dsft launch` prints and writes: lines for the terminal and launch.log, and status.json; and the lines
of a rank's log as it grows. All by threads of their own: a disk that does not answer, or a terminal that was
stopped (Ctrl-S), must not keep the supervisor and its agents from hearing each other.

runs/NAME/logs/status.json, replaced whole every two seconds and at the end, is for `dsft status` and other
programs:

    {"pid", "host", "command", "job", "launcher", "hosts": {host: slots}, "started", "updated": ISO times,
     "state": starting | running | stopping | ending | ended, "attempt": 1, "restarts": N,
     "ranks": {"0": {"host", "pid", "step", "phase", "pulse_age", "progress_age"}, …},   ages in seconds
     "exit_code": null | n, "error": null | text}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from dsft.errors import plain
from dsft.system.files import atomic_write

WAITING = 20_000  # lines that may wait for a terminal or a disk; of more, the oldest are left out
PATIENCE = 3.0  # seconds that the end waits for them
EVERY = 0.2  # seconds between two looks at a log that grows
TAIL = 40  # lines
STDOUT = 1


class Background:
    """Texts that are written by a thread. What cannot be written is left out: the run goes on."""

    def __init__(self, write: Callable[[str], object], waiting: int = WAITING) -> None:
        self._write = write
        self._texts: deque[str] = deque(maxlen=waiting)
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, text: str) -> None:
        self._texts.append(text)
        self._wake.set()

    def close(self) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ended = self._ended
            while self._texts:
                with suppress(OSError):  # a full disk, a terminal that is gone
                    self._write(self._texts.popleft())
            if ended:
                return


class Voice:
    """Lines that are printed, and kept in a log."""

    def __init__(self, log: IO[str]) -> None:
        sys.stdout.flush()
        # By the descriptor: no lock of Python's stands in the way of the interpreter's end.
        self._outputs = [Background(_to(descriptor)) for descriptor in (STDOUT, log.fileno())]

    def __call__(self, line: str) -> None:
        line = plain(line.rstrip("\r").rpartition("\r")[2], colours=True)  # of a progress bar its last state
        for each in self._outputs:
            each.put(line)

    def close(self) -> None:
        for each in self._outputs:
            each.close()


def _to(descriptor: int) -> Callable[[str], None]:
    def write(line: str) -> None:
        text = f"{line}\n".encode(errors="backslashreplace")
        while text:
            text = text[os.write(descriptor, text) :]

    return write


class Status:
    """status.json."""

    def __init__(self, logs: Path) -> None:
        self._path = logs / "status.json"
        self._writer = Background(self._replace, waiting=1)

    def put(self, facts: Mapping[str, Any]) -> None:
        self._writer.put(json.dumps({**facts, "updated": now()}, indent=1) + "\n")

    def close(self) -> None:
        self._writer.close()

    def _replace(self, text: str) -> None:
        with atomic_write(self._path) as file:
            file.write(text.encode())


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Follower:
    """Calls `tell`, in its thread, with the whole lines that a file gets from byte `start` on."""

    def __init__(self, path: Path, start: int, tell: Callable[[list[str]], None]) -> None:
        self._path, self._read, self._tell = path, start, tell
        self._ending = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._follow, name="follower", daemon=True).start()

    def end(self) -> None:
        """No more will come: half a line is one too. `ended` is set once it is read."""
        self._ending.set()

    def _follow(self) -> None:
        rest, ending = b"", False
        while not ending:
            ending = self._ending.wait(EVERY)
            with suppress(OSError), self._path.open("rb") as file:
                file.seek(self._read)
                found = file.read()
                self._read += len(found)
                *whole, rest = (rest + found).split(b"\n")
                if ending and rest:
                    whole.append(rest)
                if whole:
                    self._tell([line.decode(errors="replace").rpartition("\r")[2] for line in whole])
        self.ended.set()


def last_lines(path: Path, start: int = 0, count: int = TAIL) -> list[str]:
    """Of what the file has from byte `start` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 2**16))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]
