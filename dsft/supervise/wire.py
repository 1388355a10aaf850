"""JSON lines between the supervisor and the agents. Takes file descriptors; reads and writes them without
ever waiting, since a host whose link is down reads nothing.

To an agent:   {"order": …} once, then {"ping": 1} each second, {"signal": n}, {"stacks": 1},
               {"end": seconds}; or {"sweep": job} alone.
From an agent: {"hello": {host, pid, addresses, port}}, {"started": pid}, {"rank": r, "pid": p},
               {"lines": [[rank | null, text], …]}, {"pulses": [pulse, …]} each second and a rank's first,
               {"told": pulse with "ended"}, {"died": r, "code": n | null, "pulse": its last}, {"part": code},
               {"tail": r | null, "lines": […]}, {"fault": text}, {"end": left} last.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

Message = dict[str, Any]

PING = 1.0  # seconds
SILENCE = 15.0
"""Seconds without a word after which an agent takes the supervisor, or the supervisor an agent, for lost."""

FULL = 2**20
"""Bytes that may wait to be written before lines of logs, which stand in files too, are left out."""


@dataclass(frozen=True)
class Order:
    """What a host runs: argv in folder, with `environ` beside the host's own variables; its processes are
    known by `DSFT_JOB=job`. ranks: global, of this host. logs: the folder of rank-N.log."""

    host: str
    job: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    folder: str
    logs: str
    ranks: tuple[int, ...]

    def message(self) -> Message:
        return {"order": asdict(self)}


def order_of(message: Message) -> Order:
    fields = dict(message["order"])
    return Order(**{**fields, "argv": tuple(fields["argv"]), "ranks": tuple(fields["ranks"])})


class Inbox:
    """Whole lines of a descriptor. `ended`: nothing more comes."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.ended = False
        self._rest = b""
        self._lines: deque[bytes] = deque()

    def read(self) -> Iterator[Message | str]:
        """Messages, and as text what is none: a banner that the other host's shell prints."""
        for line in self.lines():
            text = line.decode(errors="replace").rstrip("\r")
            try:
                message = json.loads(text)
            except ValueError:
                message = None
            yield message if isinstance(message, dict) else text

    def lines(self) -> Iterator[bytes]:
        """Those that have come; whoever stops before the last one gets the others with the next call."""
        self._take()
        while self._lines:
            yield self._lines.popleft()

    def _take(self) -> None:
        while not self.ended:
            try:
                found = os.read(self.descriptor, 2**16)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            self.ended = not found
            *whole, self._rest = (self._rest + found).split(b"\n")
            if self.ended and self._rest:
                whole.append(self._rest)
            self._lines.extend(whole)


class Outbox:
    """Messages that are written as far as the other side takes them. `broken`: it takes no more."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.broken = False
        self._waiting = b""

    @property
    def waits(self) -> bool:
        return bool(self._waiting) and not self.broken

    def put(self, message: Message, *, may_drop: bool = False) -> None:
        if self.broken or (may_drop and len(self._waiting) > FULL):
            return
        self._waiting += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        while self._waiting and not self.broken:
            try:
                done = os.write(self.descriptor, self._waiting[: 2**16])
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
                return
            self._waiting = self._waiting[done:]

    def close(self) -> None:
        self.broken = True
        with suppress(OSError):
            os.close(self.descriptor)
