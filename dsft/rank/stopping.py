"""Turn signals, a time limit and the launcher's end into one request to stop, which the training loop checks
at each step. Without torch.

The effect of SIGTERM, SIGINT (Ctrl-C) and SIGHUP (the terminal closed; not if it was ignored, as under nohup)
depends on the stage:

load    there is nothing to save yet: the process exits at once with 75; the same command starts over
train   the run finishes the step, saves a checkpoint and exits with 75
end     everything is saved: the run finishes what is left (an export)

A second such signal ends the process at once with 128 + its number, the shell's convention. Signals within
SAME seconds of the first count as the first, since a terminal and `deepspeed` both send one. SIGUSR1, which
Slurm sends before a job's time ends, and `cluster.time_limit` take effect only after the first step, so that
every start makes progress, and do not count as a first signal.

After `hold`, signals are blocked until `listen`: one that arrives during the imports, where Python would end,
is treated as one before the first step.

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

SAME = 2.0  # seconds
HARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SOFT = (signal.SIGUSR1,)

REASONS = (
    "SIGUSR1",
    "cluster.time_limit",
    "the end of its launcher",
    *(each.name for each in HARD),
)
"""Reasons to stop. Ranks agree on one by its number, from 1; if they differ, the highest is reported."""

Stage = Literal["load", "train", "end"]


_PROMISE: dict[Stage, str] = {
    "train": "the run saves at the end of its step and stops",
    "end": "the run finishes what it has begun to write",
}


def hold() -> None:
    """Block these signals until `listen`. Call before anything else is imported."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*HARD, *SOFT))


def release() -> None:
    """Unblock these signals: those that arrived since `hold` and all later ones. For a process about to
    exec."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*HARD, *SOFT))


def ignore(code: int, message: str) -> None:
    """Do nothing: the default callback of Stopping."""


class Stopping:
    """The stop request of one process. Handles no signals until `listen` is called."""

    def __init__(self, told: Callable[[int, str], None] = ignore, *, speaks: bool = False) -> None:
        """told: called with exit code and message before the process ends at once. speaks: whether this
        process prints messages to standard error; True on one rank."""
        self.stage: Stage = "load"
        self.asked_at: float | None = None  # time.monotonic()
        self._told, self._speaks = told, speaks
        self._reason: str | None = None
        self._first: float | None = None  # time of the first signal in HARD
        self._began, self._limit = time.monotonic(), float("inf")

    def limit(self, seconds: float | None) -> None:
        """Set the time limit, in seconds since this object was created; None: no limit."""
        self._limit = float("inf") if seconds is None else seconds

    def ask(self, reason: str) -> None:
        """Request a stop. reason: one of REASONS; the first one is kept."""
        if self._reason is None:
            self._reason, self.asked_at = reason, time.monotonic()

    @property
    def reason(self) -> str | None:
        """The reason to stop, one of REASONS; None: no stop was requested."""
        if self._reason is None and time.monotonic() - self._began >= self._limit:
            self.ask("cluster.time_limit")
        return self._reason

    def listen(self) -> None:
        """Handle signals from now on, in a separate thread. Call in the main thread. Forked children get the
        previous handlers back."""
        hard = [each for each in HARD if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.getsignal(each) for each in (*hard, *SOFT)}
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
        threading.Thread(target=self._hear, args=(reading,), name="stopping", daemon=True).start()
        release()

    def _hear(self, reading: int) -> None:
        while number := os.read(reading, 1):
            if number[0] in HARD:
                self._take(signal.Signals(number[0]))
            elif number[0] in SOFT:
                self.ask(signal.Signals(number[0]).name)

    def _take(self, asked: signal.Signals) -> None:
        if self._first is not None:
            if time.monotonic() - self._first > SAME:
                self.now(128 + asked, f"ended at once by a second {asked.name}")
            return
        if self.stage == "load":
            same = "the same command starts it again"
            self.now(StoppedError.exit_code, f"stopped by {asked.name} before its first step; {same}")
        self._first = time.monotonic()
        self.ask(asked.name)
        self._say(f"{asked.name}: {_PROMISE[self.stage]}; a second signal ends it at once")

    def now(self, code: int, message: str, *, speaks: bool = False) -> NoReturn:
        """End this process at once, whatever its other threads do. speaks: print the message even if this
        process is not the one that prints."""
        self._say(message, speaks=speaks)
        self._told(code, message)
        os._exit(code)

    def _say(self, text: str, *, speaks: bool = False) -> None:
        if self._speaks or speaks:
            with suppress(OSError):
                os.write(2, text.encode() + b"\n")  # unbuffered: the main thread may have a buffer's lock
