"""Send a rank's heartbeats: one datagram per second with its phase and step. Also begins its log. Without
torch.

DSFT_HEARTBEAT   path of a Unix datagram socket (AF_UNIX, SOCK_DGRAM); if not set, nothing is sent
DSFT_LOGS        folder of rank-N.stack; `dsft launch`, which sets it, writes the output to rank-N.log there

A datagram is one JSON object:

{"rank": 3, "local_rank": 1, "host": "node2", "pid": 4711, "step": 120, "phase": "step",
 "progress_at": 8143.25}
{"ended": 75, "message": "stopped by …", …the same}     the last one of a rank that ends by itself

phase is one of PHASES; step counts finished optimizer steps; progress_at is the time.monotonic() of the last
`mark`, a clock that all processes of a host share. A living rank sends even while its main thread waits in a
collective: then only progress_at stops advancing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["start", "load", "data", "step", "evaluate", "save", "export"]
PHASES: tuple[str, ...] = get_args(Phase)

SOCKET, LOGS = "DSFT_HEARTBEAT", "DSFT_LOGS"
EVERY = 1.0  # seconds between two datagrams


class Heartbeat:
    """The heartbeat of one rank. `mark` is called by the main thread and costs one assignment."""

    def __init__(self, rank: int, local_rank: int, path: str | None) -> None:
        """path: of the socket; None or empty: nothing is ever sent."""
        self._who = {
            "rank": rank, "local_rank": local_rank, "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        self._at: tuple[Phase, int, float] = ("start", 0, time.monotonic())
        self._path = path
        self._socket: socket.socket | None = None
        if path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def start(self) -> None:
        """Send the first datagram, then one per second from a separate thread until the process ends."""
        if self._path:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def mark(self, phase: Phase, step: int | None = None) -> None:
        """Record progress: the phase that begins now. step: number of finished steps; None: unchanged."""
        self._at = (phase, self._at[1] if step is None else step, time.monotonic())

    @property
    def phase(self) -> Phase:
        return self._at[0]

    def end(self, code: int, message: str | None = None) -> None:
        """Send the last datagram: this rank ends by itself with this exit code. message: the error, in one
        sentence."""
        self._send({"ended": code, "message": message} | self._now())

    def _beat(self) -> None:
        while True:
            self._send(self._now())
            time.sleep(EVERY)

    def _now(self) -> dict[str, object]:
        phase, step, at = self._at
        return self._who | {"step": step, "phase": phase, "progress_at": at}

    def _send(self, message: Mapping[str, object]) -> None:
        if self._socket is None or not self._path:
            return
        with contextlib.suppress(OSError):  # no listener, or it is too busy to read: not an error
            self._socket.sendto(json.dumps(message).encode(), self._path)


def begin_log(folder: str | None, rank: int, world_size: int) -> None:
    """Print a heading, and on SIGUSR2 append every thread's stack to folder/rank-N.stack. Does nothing if the
    folder is None or empty; if it cannot be written, prints a warning instead."""
    if not folder:
        return
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        # Not inherited by children: only this process writes to it.
        stack = os.open(place / f"rank-{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"warning: {LOGS}: {folder} cannot be written ({error.strerror})", file=sys.stderr, flush=True)
        return
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    host = socket.gethostname()
    print(f"--- rank {rank} of {world_size} on {host}, process {os.getpid()}, {now} ---", flush=True)
