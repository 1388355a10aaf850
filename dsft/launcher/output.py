"""Write what `dsft launch` outputs (lines on the terminal and in launch.log, status.json), and follow a
rank's log as it grows. Each in a separate thread: a hanging disk or a stopped terminal (Ctrl-S) must not
block the messages between supervisor and agents.

runs/NAME/logs/status.json, replaced atomically every two seconds and at the end, is for `dsft status` and
other programs:

{"pid", "host", "command", "job", "launcher", "hosts": {host: slots}, "started", "updated": ISO times,
 "state": starting | running | stopping | ending | ended, "attempt": 1, "restarts": N,
 "ranks": {"0": {"host", "pid", "step", "phase", "pulse_age", "progress_age"}, …},   ages in seconds
 "exit_code": null | n, "error": null | text}
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from dsft.errors import printable
from dsft.report.console import with_bar
from dsft.system.files import atomic_write

WAITING = 20_000  # lines that may wait for a terminal or a disk; beyond that the oldest are dropped
PATIENCE = 3.0  # seconds that `close` waits for them
EVERY = 0.2  # seconds between two reads of a growing log
TAIL = 40  # lines
STDOUT = 1

_STEP = re.compile(r"step (\d+)/(\d+)  .* left")
"""A line of `dsft.report.console` on a step that is not the last."""


class WriterThread:
    """A queue of texts that a thread writes. Texts that cannot be written are dropped: the run continues."""

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


class LineWriter:
    """Print lines and append them to a log. On a terminal the steps of training share a line, with a bar."""

    def __init__(self, log: IO[str]) -> None:
        sys.stdout.flush()
        # By descriptor: a lock of Python's streams cannot block the interpreter's exit.
        self._outputs = [WriterThread(_to(descriptor)) for descriptor in (STDOUT, log.fileno())]

    def __call__(self, line: str) -> None:
        last_state = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar
        line = printable(last_state, keep_colors=True)
        for each in self._outputs:
            each.put(line)

    def close(self) -> None:
        for each in self._outputs:
            each.close()


def _to(descriptor: int) -> Callable[[str], None]:
    in_place = os.isatty(descriptor)
    is_open = False  # the terminal's last line is a step's, and may be replaced

    def write(line: str) -> None:
        nonlocal is_open
        step = _STEP.fullmatch(line) if in_place else None
        text = f"{line}\n"
        if step is not None:
            columns = (os.get_terminal_size(descriptor).columns or 80) - 1
            text = with_bar(line, int(step[1]), int(step[2]), columns)[:columns]
        if is_open:
            text = f"\r\x1b[K{text}"
        is_open = step is not None
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]

    return write


class StatusWriter:
    """Writer of status.json."""

    def __init__(self, logs: Path) -> None:
        self._path = logs / "status.json"
        self._writer = WriterThread(self._replace, waiting=1)

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
    """Call `report`, in a separate thread, with the complete lines that a file gets from byte `start` on."""

    def __init__(self, path: Path, start: int, report: Callable[[list[str]], None]) -> None:
        self._path, self._read, self._report = path, start, report
        self._ending = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._follow, name="follower", daemon=True).start()

    def end(self) -> None:
        """Read what is left, including an incomplete last line, and stop; sets `ended` when done."""
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
                    self._report([line.decode(errors="replace").rpartition("\r")[2] for line in whole])
        self.ended.set()


def last_lines(path: Path, start: int = 0, count: int = TAIL) -> list[str]:
    """Return up to `count` last lines of the file's content from byte `start` on, from its last 64 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 2**16))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]
