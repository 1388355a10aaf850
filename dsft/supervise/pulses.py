"""The socket that the ranks of a host send their pulses to, and what is known of each rank by them. Takes a
folder of its own; makes the socket in it.

What a pulse is, and who sends it: `dsft.launch.pulse`.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**16  # bytes of a datagram


@dataclass(frozen=True)
class Pulse:
    """heard_at, progress_at: of this host's monotonic clock."""

    rank: int
    pid: int
    step: int | None
    phase: str
    heard_at: float
    progress_at: float
    ended: int | None = None
    message: str | None = None

    def told(self) -> dict[str, Any]:
        """Its ages in seconds: clocks of other hosts say nothing here."""
        now = time.monotonic()
        facts = {"rank": self.rank, "pid": self.pid, "step": self.step, "phase": self.phase}
        ages = {"silent": round(now - self.heard_at, 1), "idle": round(now - self.progress_at, 1)}
        return {**facts, **ages, "ended": self.ended, "message": self.message}


def listen(folder: Path) -> socket.socket:
    """At `folder/pulse`, which no other user may write to."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.bind(str(folder / "pulse"))
    found.setblocking(False)
    return found


def received(source: socket.socket) -> list[Pulse]:
    """What has come; what is no pulse is passed over."""
    found: list[Pulse] = []
    while True:
        try:
            datagram = source.recv(LARGEST)
        except OSError:
            return found
        pulse = read_pulse(datagram, time.monotonic())
        if pulse is not None:
            found.append(pulse)


def read_pulse(datagram: bytes, now: float) -> Pulse | None:
    try:
        fields = json.loads(datagram)
        ended, message = fields.get("ended"), fields.get("message")
        return Pulse(
            int(fields["rank"]),
            int(fields["pid"]),
            None if fields.get("step") is None else int(fields["step"]),
            str(fields.get("phase", "start")),
            now,
            float(fields.get("progress_at", now)),
            None if ended is None else int(ended),
            None if message is None else str(message),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
