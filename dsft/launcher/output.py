"""Write what `dsft launch` outputs (lines on the terminal and in launch.log, status.json), and what its
processes do (their logs), without secrets. Each in a separate thread: a hanging disk or a stopped terminal
(Ctrl-S) must not block the messages between supervisor and agents.

runs/NAME/logs/status.json, replaced atomically every two seconds and at the end, is for `dsft status` and
other programs:

{"pid", "host", "command", "job", "launcher", "hosts": {host: slots}, "started", "updated": ISO times,
 "state": starting | running | stopping | ending | ended, "attempt": 1, "restarts": N,
 "ranks": {"0": {"host", "pid", "step", "phase", "pulse_age", "progress_age"}, …},   ages in seconds
 "exit_code": null | n, "error": null | text}
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from dsft.errors import printable
from dsft.report.console import with_bar
from dsft.system.files import atomic_write
from dsft.system.redact import redact

WAITING = 20_000  # lines that may wait for a terminal or a disk; beyond that the oldest are dropped
PATIENCE = 3.0  # seconds that `close` waits for them
GATHER = 0.002  # seconds between two reads of a rank's output: many lines at once cost less
LONGEST = 2**16  # bytes of a line that is written as a whole
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

    def __init__(self, log: IO[str], environ: Mapping[str, str]) -> None:
        """environ: variables with the secrets of the ranks."""
        self._environ = environ
        sys.stdout.flush()
        # By descriptor: a lock of Python's streams cannot block the interpreter's exit.
        self._outputs = [WriterThread(_to(descriptor)) for descriptor in (STDOUT, log.fileno())]

    def __call__(self, line: str) -> None:
        last_state = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar
        line = printable(redact(last_state, self._environ), keep_colors=True)
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


class OutputLog:
    """A pipe for the output of processes, and a thread that appends it to a log, without secrets and by whole
    lines; the states of a progress bar count as lines.

    writing  descriptor of the pipe, for processes that inherit it
    ended    is set when no process has the pipe open any more and everything is written
    """

    def __init__(self, log: Path, report: Callable[[list[str]], object] = lambda lines: None) -> None:
        """report: called in the thread with new lines. Raises OSError."""
        self._log = log.open("ab", buffering=0)
        self._reading, self.writing = os.pipe()
        self._report = report
        self._held, self._line = b"", ""  # an incomplete line, as it was read and without secrets
        self._last: deque[str] = deque(maxlen=TAIL)
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="output", daemon=True).start()

    def close(self) -> None:
        """Close this process's end of the pipe."""
        os.close(self.writing)

    def last_lines(self) -> list[str]:
        """Return the last lines, up to TAIL, of what was written until now. Waits for the thread, at most
        PATIENCE seconds for a disk that does not answer."""
        until = time.monotonic() + PATIENCE
        while any(fcntl.ioctl(self._reading, termios.FIONREAD, bytes(4))) and time.monotonic() < until:
            time.sleep(GATHER)
        if self._lock.acquire(timeout=PATIENCE):
            self._lock.release()
        return [*self._last, *filter(None, [self._line + _redacted(self._held)])]

    def _follow(self) -> None:
        waiting, data = select.poll(), b" "
        waiting.register(self._reading, select.POLLIN)
        with self._log:
            while data:
                waiting.poll()
                with self._lock:
                    data = os.read(self._reading, LONGEST)
                    self._take(data)
                time.sleep(GATHER)
        self.ended.set()

    def _take(self, data: bytes) -> None:
        """Write the complete lines, and hold the rest. data: what was read; empty at the end."""
        held = self._held + data
        end = max(held.rfind(b"\n"), held.rfind(b"\r")) + 1
        if not data or len(held) - end > LONGEST:
            end = len(held)
        self._held, text = held[end:], _redacted(held[:end])
        with suppress(OSError):  # a full disk: the run continues
            self._log.write(text.encode(errors="surrogateescape"))
        *lines, self._line = (self._line + text).split("\n")
        self._line = self._line[max(0, self._line.rstrip("\r").rfind("\r")) :]
        if not data and self._line:
            lines.append(self._line)
        shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        self._last.extend(shown)
        if shown:
            self._report(shown)


def _redacted(data: bytes) -> str:
    return redact(data.decode(errors="surrogateescape"), os.environ)
