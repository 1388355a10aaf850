"""End a rank soon after its launcher, however the launcher ends: a thread watches this process's ancestors in
/proc. Without torch.

Watched are the ancestors of this process up to the outermost known launcher:

deepspeed, one host       rank ← launch.py ← deepspeed
deepspeed, several hosts  rank ← launch.py; on the host where deepspeed was typed also pdsh, found by its
                          command line, and its parent deepspeed
torchrun                  rank ← torchrun
srun, sbatch              rank ← slurmstepd
mpirun                    rank ← mpirun, or orted on other hosts
dsft launch               rank ← dsft's agent, which has its own rules for its parents; under
                          `--launcher torchrun` rank ← torchrun ← the agent

A shell, an ssh session, a terminal's session and init are never watched: a run started in the background
lives on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
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

_PROC = Path("/proc")
_MPI = frozenset({"mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy"})
_PDSH = frozenset({"pdsh", "pdsh.bin"})  # Debian's pdsh is a script that execs pdsh.bin
_NODE, _RUNNER, _AGENT = "deepspeed's launch.py", "deepspeed", "dsft's agent"


@dataclass(frozen=True)
class Ancestor:
    """A watched process above this one.

    started  start time, in clock ticks since the host booted: a later process with the same pid has another
    what     the process's name in messages
    """

    pid: int
    started: int
    what: str


def watch(stopping: Stopping) -> tuple[Ancestor, ...]:
    """Start watching this process's ancestors and return them, the nearest first.

    Once one of them has ended, the run is asked to stop; this process exits with 69 if it has not saved and
    ended within SAVES seconds, or PATIENCE seconds where it had been asked to stop before.
    """
    above = ancestors(os.getpid())
    if above and above[0].what in (_NODE, "torchrun"):
        die_with(above[0].pid)  # works even while Python is blocked; their main thread starts the ranks
    if above:
        threading.Thread(target=_watch, args=(above, stopping), name="ancestors", daemon=True).start()
    return above


def _watch(above: Sequence[Ancestor], stopping: Stopping) -> None:
    while (gone := next((each for each in above if not lives(each)), None)) is None:
        time.sleep(EVERY)
    was_asked = stopping.reason is not None
    stopping.request("the end of its launcher")
    if stopping.stage != "load":
        time.sleep(PATIENCE if was_asked else SAVES)
    message = f"{gone.what} (process {gone.pid}), which started this run, is gone, and so the run ends"
    stopping.end_now(WorldError.exit_code, message)


def lives(ancestor: Ancestor) -> bool:
    found = _stat(ancestor.pid)
    return found is not None and found == (ancestor.started, False)


def _stat(pid: int) -> tuple[int, bool] | None:
    """Return (start time in clock ticks, whether it is a zombie or dead); None if there is no such
    process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # after the name, which may contain anything; see proc(5)
    return int(fields[19]), fields[0] in "ZX"


def ancestors(pid: int) -> tuple[Ancestor, ...]:
    """Return the ancestors of process `pid` up to the outermost launcher, the nearest first; () if none of
    them is a known launcher."""
    above = _parents(pid)
    kinds = [_kind(each) for each in above]
    if _AGENT in kinds:
        return _named(above, kinds[: kinds.index(_AGENT) + 1])
    if not any(kinds):
        return ()
    top = max(number for number, kind in enumerate(kinds) if kind)
    found = _named(above, kinds[: top + 1])
    if _NODE in kinds and _RUNNER not in kinds:
        found += _runner_beside(above[kinds.index(_NODE)])
    return found


def _parents(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).parents()
    except psutil.Error:  # another user's process, or one that is just ending
        return []


def _named(above: Sequence[psutil.Process], kinds: Sequence[str | None]) -> tuple[Ancestor, ...]:
    found = []
    for process, kind in zip(above, kinds, strict=False):
        stat = _stat(process.pid)
        if stat is not None:
            found.append(Ancestor(process.pid, stat[0], kind or _name(process)))
    return tuple(found)


def _kind(process: psutil.Process) -> str | None:
    """Return which launcher the process is; None if it is none."""
    program = _program(_words(process))
    if program == "-m deepspeed.launcher.launch":
        return _NODE
    if program in ("deepspeed", "-m deepspeed.launcher.runner"):
        return _RUNNER
    if program in ("torchrun", "-m torch.distributed.run", "-m torch.distributed.launch"):
        return "torchrun"
    if program == "-m dsft.launcher.agent":
        return _AGENT
    name = _name(process)
    if name in _MPI:
        return name
    return "slurmstepd" if name == "slurmstepd" else None


def _program(words: Sequence[str]) -> str:
    """Return `-m MODULE` or the script's name where the command is Python's, else the program's own name."""
    for place, word in enumerate(words):
        if word == "-m":
            return " ".join(words[place : place + 2])
        if place and not word.startswith("-"):
            return Path(word).name
    return Path(words[0]).name if words else ""


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "a process"


def _runner_beside(node: psutil.Process) -> tuple[Ancestor, ...]:
    """Return pdsh and deepspeed on the host where deepspeed was typed. ssh is between them and the ranks, so
    they are found by the --world_info that they passed to launch.py."""
    world = next((word for word in _words(node) if word.startswith("--world_info=")), None)
    if world is None:
        return ()
    for process in psutil.process_iter():
        if _name(process) in _PDSH and world in _words(process):
            parents = _parents(process.pid)[:1]
            runner = [each for each in parents if _kind(each) == _RUNNER]
            return _named([process, *runner], ["pdsh", _RUNNER])
    return ()
