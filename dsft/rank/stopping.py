"""Turn signals, a time limit and the launcher's end into one request to stop, which the training loop checks
at each step. Without torch.

The effect of SIGTERM, SIGINT (Ctrl-C) and SIGHUP (the terminal closed; not if it was ignored, as under nohup)
depends on the stage:

load    there is nothing to save yet: the process exits at once with 75; the same command starts over
train   the run finishes the step, saves a checkpoint and exits with 75
end     everything is saved: the run finishes what is left (an export)

A second such signal ends the process at once with 128 + its number, the shell's convention. Signals within
SAME_REQUEST seconds of the first count as the first, since a terminal and `deepspeed` both send one. SIGUSR1,
which Slurm sends before a job's time ends, and `cluster.time_limit` take effect only after the first step, so
that every start makes progress, and do not count as a first signal.

After `block_signals`, signals are blocked until `listen`: one that arrives during the imports, where Python
would end, is treated as one before the first step.

Python runs signal handlers in the main thread between two bytecodes, so never while that waits in a
collective. The handlers therefore do nothing; a thread reads the signal numbers that C code writes
(set_wakeup_fd).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn

from dsft.errors import StoppedError

SAME_REQUEST = 2.0  # seconds
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOTICE_SIGNALS = (signal.SIGUSR1,)


def name_of(number: int) -> str:
    """Return what a signal is called in messages."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


REASONS = ("SIGUSR1", "cluster.time_limit", "the end of its launcher", *map(name_of, STOP_SIGNALS))
"""Reasons to stop. Ranks agree on one by its number, from 1; if they differ, the highest is reported."""

Stage = Literal["load", "train", "end"]


_NEXT: dict[Stage, str] = {
    "train": "the run saves at the end of its step and stops",
    "end": "the run finishes what it has begun to write",
}


def block_signals() -> None:
    """Block these signals until `listen`. Call before anything else is imported."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, *NOTICE_SIGNALS))


def unblock_signals() -> None:
    """Unblock these signals, those that have arrived meanwhile too. For a process about to exec."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, *NOTICE_SIGNALS))


class Stopping:
    """The stop request of one process. Handles no signals until `listen` is called."""

    def __init__(
        self, on_end: Callable[[int, str], object] = lambda code, message: None, *, prints: bool = False
    ) -> None:
        """on_end: called with exit code and message before the process ends at once. prints: whether this
        process prints messages to standard error; True on one rank."""
        self.stage: Stage = "load"
        self._on_end, self._prints = on_end, prints
        self._reason: str | None = None
        self._first: float | None = None  # time of the first signal in STOP_SIGNALS
        self._began, self._limit = time.monotonic(), float("inf")

    def limit(self, seconds: float | None) -> None:
        """Set the time limit, in seconds since this object was created; None: no limit."""
        self._limit = float("inf") if seconds is None else seconds

    def request(self, reason: str) -> None:
        """Request a stop. reason: one of REASONS; the first one is kept."""
        if self._reason is None:
            self._reason = reason

    @property
    def reason(self) -> str | None:
        """The reason to stop, one of REASONS; None: no stop was requested."""
        if self._reason is None and time.monotonic() - self._began >= self._limit:
            self.request("cluster.time_limit")
        return self._reason

    def listen(self) -> None:
        """Handle signals from now on, in a separate thread. Call in the main thread. Forked children get the
        previous handlers back."""
        stop_signals = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.getsignal(each) for each in (*stop_signals, *NOTICE_SIGNALS)}
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for each in before:
            signal.signal(each, lambda number, frame: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def forget() -> None:
            signal.set_wakeup_fd(-1)
            for each, handler in before.items():
                signal.signal(each, handler)

        os.register_at_fork(after_in_child=forget)
        threading.Thread(target=self._read_signals, args=(reading,), name="stopping", daemon=True).start()
        unblock_signals()

    def _read_signals(self, reading: int) -> None:
        while number := os.read(reading, 1):
            if number[0] in STOP_SIGNALS:
                self._take(number[0])
            elif number[0] in NOTICE_SIGNALS:
                self.request(name_of(number[0]))

    def _take(self, number: int) -> None:
        if self._first is not None:
            if time.monotonic() - self._first > SAME_REQUEST:
                self.end_now(128 + number, f"ended at once by a second {name_of(number)}")
            return
        if self.stage == "load":
            same = "the same command starts it again"
            self.end_now(
                StoppedError.exit_code, f"stopped by {name_of(number)} before its first step; {same}"
            )
        self._first = time.monotonic()
        self.request(name_of(number))
        self._print(f"{name_of(number)}: {_NEXT[self.stage]}; a second signal ends it at once")

    def end_now(self, code: int, message: str, *, prints: bool = False) -> NoReturn:
        """End this process at once, whatever its other threads do. prints: print the message even if this
        process is not the one that prints."""
        self._print(message, prints=prints)
        self._on_end(code, message)
        os._exit(code)

    def _print(self, text: str, *, prints: bool = False) -> None:
        if self._prints or prints:
            with suppress(OSError):
                os.write(2, text.encode() + b"\n")  # unbuffered: the main thread may have a buffer's lock
