"""Logs of ranks: new lines of a file as it grows, its last lines, and what of them tells an error. Reads
files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

TAIL = 40  # lines
HEADING = "--- rank "  # of a start, in a rank's log: dsft/launch/pulse.py

CONSEQUENCES = (
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)",
    r"closed by peer",
    r"[Bb]roken pipe",
    r"remote process (?:has )?exited",
    r"NCCL (?:communicator was aborted|operation timed out)",
    r"ncclRemoteError|ncclSystemError|unhandled system error",
    r"[Tt]imed out (?:waiting|after)",
    r"[Ss]ocket [Tt]imeout",
    r"Application timeout caused pair closure",
    r"TCPStore",
    r"has ended before its time",  # dsft/job/run.py
    r"which started this run, is gone",  # dsft/launch/ancestors.py
)
"""What a rank says when another one, or its host, is gone: by gloo, NCCL, torch's store, and dsft's own."""

_CONSEQUENCE = re.compile("|".join(CONSEQUENCES))


def is_consequence(text: str) -> bool:
    return _CONSEQUENCE.search(text) is not None


class Tail:
    """Whole lines that a file gets after now; it need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        try:
            self._read = path.stat().st_size
        except OSError:
            self._read = 0

    def lines(self, *, end: bool = False) -> list[str]:
        """end: no more will come, so half a line is one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                found = file.read()
        except OSError:
            return []
        self._read += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        if end and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rpartition("\r")[2] for line in whole]


def last_lines(path: Path, start: int = 0, count: int = TAIL) -> list[str]:
    """Of what stands from byte `start` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 2**16))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def error_in(lines: Sequence[str]) -> str | None:
    """The sentence of the last error that they tell: dsft's own `error: …`, else the last line of a
    traceback."""
    told = [line for line in lines if re.match(r"(?:dsft/train\.py: )?error: ", line)]
    if told:
        return re.sub(r"^(?:dsft/train\.py: )?error: ", "", told[-1])
    starts = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if not starts:
        return None
    indent = lines[starts[-1]].partition("Traceback")[0]  # torchrun's prefix, or none
    for line in lines[starts[-1] + 1 :]:
        text = line.removeprefix(indent)
        if text and not text[0].isspace():
            return text
    return None
