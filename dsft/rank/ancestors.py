"""End a rank soon after its launcher, however the launcher ends: a thread watches this process's ancestors.
Without torch.

Watched are the ancestors of this process up to the outermost known launcher, such as launch.py and deepspeed.
A shell, an ssh session, a terminal's session and init are no launchers: a run started in the background lives
on. Processes that are not ancestors (pdsh and deepspeed, where several hosts are used) are not watched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dsft.errors import WorldError
from dsft.rank.stopping import Stopping
from dsft.system.process import die_with

EVERY = 0.5  # seconds between two checks
SAVES = 3.0
"""Seconds that a run has to finish its step and save a checkpoint after its launcher has ended."""
PATIENCE = 30.0
"""The same, where the run had already been asked to stop: as long as deepspeed and torchrun wait for
ranks."""

LAUNCHERS = {
    "-m deepspeed.launcher.launch": "deepspeed's launch.py", "deepspeed": "deepspeed",
    "-m deepspeed.launcher.runner": "deepspeed", "torchrun": "torchrun",
    "-m torch.distributed.run": "torchrun", "-m torch.distributed.launch": "torchrun", "mpirun": "mpirun",
    "mpiexec": "mpiexec", "orterun": "mpirun", "prterun": "mpirun", "orted": "orted", "prted": "prted",
    "slurmstepd": "slurmstepd",
}  # fmt: skip
"""What each launcher is called in messages, by its program."""


def watch(stopping: Stopping) -> list[str]:
    """Start watching this process's ancestors and return their names, the nearest first.

    Once one of them has ended, the run is asked to stop; this process exits with 69 if it has not saved and
    ended within SAVES seconds, or PATIENCE seconds where it had been asked to stop before.
    """
    above = parents()
    names = [launcher_of(each) for each in above]
    above = above[: max((place for place, name in enumerate(names, 1) if name), default=0)]
    if above and names[0] in ("deepspeed's launch.py", "torchrun"):
        die_with(above[0].pid)  # works even while Python is blocked; their main thread starts the ranks
    if above:
        threading.Thread(target=_watch, args=(above, stopping), name="ancestors", daemon=True).start()
    return [name or "no launcher" for name in names[: len(above)]]


def parents() -> list[psutil.Process]:
    """Return this process's ancestors, the nearest first, up to one that this user may not see (under
    hidepid, proc(5)) or that is just ending."""
    found = [psutil.Process()]
    with suppress(psutil.Error):
        while (above := found[-1].parent()) is not None:
            found.append(above)
    return found[1:]


def _watch(above: Sequence[psutil.Process], stopping: Stopping) -> None:
    while (gone := next((each for each in above if not lives(each)), None)) is None:
        time.sleep(EVERY)
    was_asked = stopping.reason is not None
    stopping.request("the end of its launcher")
    if stopping.stage != "load":
        time.sleep(PATIENCE if was_asked else SAVES)
    stopping.end_now(WorldError.exit_code, f"this run's launcher (process {gone.pid}) has ended; stopping")


def lives(process: psutil.Process) -> bool:
    """Return whether the process runs: not a zombie, nor a later process with the same number."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def launcher_of(process: psutil.Process) -> str | None:
    """Return which launcher the process is; None if it is none, or another user's."""
    with suppress(psutil.Error):
        return LAUNCHERS.get(_program(process.cmdline())) or LAUNCHERS.get(process.name())
    return None


def _program(words: Sequence[str]) -> str:
    """Return `-m MODULE` or the script's name where the command is Python's, else the program's own name."""
    for place, word in enumerate(words):
        if word == "-m":
            return " ".join(words[place : place + 2])
        if place and not word.startswith("-"):
            return Path(word).name
    return os.path.basename(words[0]) if words else ""
