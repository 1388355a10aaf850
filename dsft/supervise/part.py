"""What runs on one host: the launcher's process in a session of its own, and the ranks that it starts. Takes
an Order; starts, watches, signals and ends these processes, and reads their logs.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from dsft.launch.pulse import LOGS, SOCKET
from dsft.supervise.aside import Follower
from dsft.supervise.logs import last_lines
from dsft.supervise.processes import (
    JOB,
    children,
    code_of_ended,
    is_alive,
    is_stopped,
    job_processes,
    kill_job,
    variable,
)
from dsft.supervise.pulses import Pulse, listen, received
from dsft.supervise.wire import Message, Order
from dsft.system.process import die_with

OF_A_LAUNCHER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|MASTER_ADDR|MASTER_PORT|CROSS_RANK|CROSS_SIZE|GROUP_.*|"
    r"ROLE_.*|TORCHELASTIC_.*|OMPI_.*|PMIX?_.*|NODE_RANK|NNODES|NPROC_PER_NODE|ADDR|PORT|DSFT_(?:JOB|LOGS|PULSE)|"
    r"SLURM_(?:PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_.*|STEPID|TASKS_PER_NODE|NTASKS_PER_NODE|GTIDS|TASK_PID)"
)
"""Variables that tell a process its place: those of whoever started the supervisor or the agent are not the
ranks'."""


class Part:
    """ranks: global rank -> process id, as far as they were found. code: of the launcher that has ended."""

    def __init__(self, order: Order, scratch: Path) -> None:
        self.order = order
        self.ranks: dict[int, int] = {}
        self.pulses: dict[int, Pulse] = {}
        self.code: int | None = None
        self.log = Path(order.logs, f"launcher-{order.host}.log")
        logs = {rank: Path(order.logs, f"rank-{rank}.log") for rank in order.ranks}
        self._starts = {path: _size(path) for path in (self.log, *logs.values())}
        self._logs = logs
        self._ended: set[int] = set()
        self._asked: int | None = None  # the signal that every rank is to get
        self._signalled: set[int] = set()
        self._watched: dict[int, int] = {}  # rank -> pidfd
        self._socket = listen(scratch)
        environ = part_environment(order, os.environ)
        environ[SOCKET] = str(scratch / "pulse")
        parent = os.getpid()
        with self.log.open("ab") as log:
            self._launcher = subprocess.Popen(
                order.argv,
                cwd=order.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),  # before this process has a second thread
            )
        self._shown = Follower(logs[0]) if 0 in logs else None

    @property
    def pid(self) -> int:
        return self._launcher.pid

    def descriptors(self) -> list[int | socket.socket]:
        """Those that can be read when something has happened."""
        return [self._socket, *self._watched.values()]

    def events(self) -> Iterator[Message]:
        """What has happened since the last call. Ranks before their launcher, which ends after them."""
        ended = self._launcher.poll() if self.code is None else None
        yield from self._found()
        yield from self._pulses()
        yield from self._deaths(all_of_them=ended is not None)
        if self._shown is not None:
            lines = self._shown.lines(end=ended is not None)
            if lines:
                yield {"lines": [[0, line] for line in lines]}
        if ended is not None:
            self.code = ended
            if ended != 0:
                yield {"tail": None, "lines": last_lines(self.log, self._starts[self.log])}
            yield {"part": ended}

    def signal(self, number: int) -> None:
        """Send it once to every rank, as soon as the rank has pulsed: before that it does not handle signals.
        Launchers do not get it, since each of them reacts in another way."""
        self._asked = number
        self._pass_on()

    def _pass_on(self) -> None:
        for rank, pulse in self.pulses.items():
            if self._asked is not None and rank not in self._signalled | self._ended:
                self._signalled.add(rank)
                _send(pulse.pid, self._asked)

    def stacks(self) -> None:
        """Ask the ranks that pulse for their stacks; a stopped one is woken for it."""
        for rank in self.pulses:
            if rank in self.ranks and rank not in self._ended:
                stopped = is_stopped(self.ranks[rank])
                _send(self.ranks[rank], signal.SIGUSR2)
                if stopped:
                    _send(self.ranks[rank], signal.SIGCONT)

    def living(self) -> list[int]:
        return job_processes(self.order.job)

    def end(self) -> list[int]:
        """Kill all that there is of the job on this host. What could not be killed."""
        left = kill_job(self.order.job, self.pid if self.code is None else None)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(1)
        return left

    def _found(self) -> Iterator[Message]:
        if self.code is not None or len(self.ranks) == len(self.order.ranks):
            return
        for pid in children(self.pid):
            text = variable(pid, "RANK")
            rank = int(text) if text and text.isdecimal() else None
            if rank in self.order.ranks and rank not in self.ranks:
                assert rank is not None
                with suppress(OSError):  # it has just ended
                    self._watched[rank] = os.pidfd_open(pid)
                self.ranks[rank] = pid
                yield {"rank": rank, "pid": pid}

    def _pulses(self) -> Iterator[Message]:
        for pulse in received(self._socket):
            if pulse.rank in self.order.ranks:
                is_first = pulse.rank not in self.pulses
                self.pulses[pulse.rank] = pulse
                if is_first:
                    yield {"pulses": [pulse.told()]}
                if pulse.ended is not None:
                    yield {"told": pulse.told()}
        self._pass_on()

    def _deaths(self, *, all_of_them: bool) -> Iterator[Message]:
        for rank, pid in self.ranks.items():
            if rank in self._ended or (is_alive(pid) and not all_of_them):
                continue
            self._ended.add(rank)
            code = code_of_ended(pid)
            if rank in self._watched:
                os.close(self._watched.pop(rank))
            if code not in (0, None):
                path = self._logs[rank]
                yield {"tail": rank, "lines": last_lines(path, self._starts[path])}
            last = self.pulses.get(rank)
            yield {"died": rank, "code": code, "pulse": last and last.told()}


def part_environment(order: Order, own: Mapping[str, str]) -> dict[str, str]:
    """This host's variables but those of another launcher, then the order's. Its own Python leads PATH."""
    kept = {name: value for name, value in own.items() if not OF_A_LAUNCHER.fullmatch(name)}
    path = kept.get("PATH", os.defpath).split(os.pathsep)
    paths = dict.fromkeys([str(Path(sys.executable).parent), *path])
    return {**kept, "PATH": os.pathsep.join(paths), **order.environ, JOB: order.job, LOGS: order.logs}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
