"""Being asked to stop: takes signals, a time limit and the launcher's end, gives the reason, for which the
loop asks at each step. Without torch.

What SIGTERM, SIGINT (Ctrl-C) and SIGHUP (the terminal is gone; not where it was ignored, as under nohup) do
depends on the stage:

    load    nothing is to be saved yet: the process ends at once, with 75, since the same command does it all
    train   the step is finished, a checkpoint saved, and the run ends with 75
    end     all is saved: what is left (an export) is finished

A second one ends the process at once with 128 + its number, as a shell tells of a signal; what follows the
first within SAME seconds is still the first, since a terminal and `deepspeed` both send one. SIGUSR1, with
which Slurm announces the end of a job's time, and `cluster.time_limit` wait for the first step, so that every
start gets somewhere, and count as nobody's first.

In a process that has called `hold`, signals wait until `listen`: one that comes during the imports, by which
Python would end, is treated as one before the first step.

Python runs its handlers in the main thread, between two of its instructions: never, while that waits in a
collective. So the handlers do nothing, and a thread reads what the kernel has C code write (set_wakeup_fd).
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
"""What ranks agree on by number, the first of them being 1: of several the highest is told."""

Stage = Literal["load", "train", "end"]


_PROMISE: dict[Stage, str] = {
    "train": "the run saves at the end of its step and stops",
    "end": "the run finishes what it has begun to write",
}


def hold() -> None:
    """Let these signals wait until `listen`. To be called before anything else is imported."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*HARD, *SOFT))


def release() -> None:
    """Handle the signals that `hold` has kept, and all later ones: before this process becomes another."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*HARD, *SOFT))


def ignore(code: int, message: str) -> None:
    """Nobody is told."""


class Stopping:
    """Of one process. It only remembers, unless `listen` was called."""

    def __init__(self, told: Callable[[int, str], None] = ignore, *, speaks: bool = False) -> None:
        """told: is called with exit code and message before the process ends at once; speaks: on standard
        error, one process for all."""
        self.stage: Stage = "load"
        self.asked_at: float | None = None  # time.monotonic()
        self._told, self._speaks = told, speaks
        self._reason: str | None = None
        self._first: float | None = None  # of a signal in HARD
        self._began, self._limit = time.monotonic(), float("inf")

    def limit(self, seconds: float | None) -> None:
        """From this object's beginning on; None: no limit."""
        self._limit = float("inf") if seconds is None else seconds

    def ask(self, reason: str) -> None:
        """One of REASONS. The first one stays."""
        if self._reason is None:
            self._reason, self.asked_at = reason, time.monotonic()

    @property
    def reason(self) -> str | None:
        """Why this process is to stop, one of REASONS; None: it is not."""
        if self._reason is None and time.monotonic() - self._began >= self._limit:
            self.ask("cluster.time_limit")
        return self._reason

    def listen(self) -> None:
        """To the signals, from now on, in a thread of its own; to be called in the main thread. Processes
        that this one forks hear them as if it had not been called."""
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
        self._say(f"{asked.name}: {_PROMISE[self.stage]}; a second one ends it at once")

    def now(self, code: int, message: str, *, speaks: bool = False) -> NoReturn:
        """End this process, whatever its other threads do. speaks: though it is not the one that does."""
        self._say(message, speaks=speaks)
        self._told(code, message)
        os._exit(code)

    def _say(self, text: str, *, speaks: bool = False) -> None:
        if self._speaks or speaks:
            with suppress(OSError):
                os.write(2, text.encode() + b"\n")  # no buffer, whose lock the main thread may hold
