"""What a run is doing, for `dsft status` and other programs: runs/NAME/logs/status.json, replaced whole every
two seconds and at the end. Takes facts, writes the file; a disk that refuses stops nothing.

    {"pid", "host", "command", "job", "launcher", "hosts": {host: slots}, "started", "updated": ISO times,
     "state": starting | running | stopping | ending | ended, "attempt": 1, "restarts": N,
     "ranks": {"0": {"host", "pid", "step", "phase", "pulse_age", "progress_age"}, …},   ages in seconds
     "exit_code": null | n, "error": null | text}
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = "status.json"
EVERY = 2.0  # seconds


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Status:
    """Written by a thread of its own: a disk that does not answer must not keep pings from the agents."""

    def __init__(self, logs: Path) -> None:
        self._path = logs / NAME
        self._text: str | None = None
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._write, name="status", daemon=True)
        self._thread.start()

    def put(self, facts: Mapping[str, Any]) -> None:
        self._text = json.dumps({**facts, "updated": now()}, indent=1) + "\n"
        self._wake.set()

    def close(self) -> None:
        """After the last facts; waits for the disk, 5 seconds at most."""
        self._ended = True
        self._wake.set()
        self._thread.join(5)

    def _write(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ended, text = self._ended, self._text
            if text is not None:
                with suppress(OSError):
                    aside = self._path.with_name(f".{NAME}.{os.getpid()}")
                    aside.write_text(text, encoding="utf-8")
                    aside.replace(self._path)
            if ended:
                return
