"""Run on each host of a run: start the host's ranks, report what happens to them, and end them all when asked
to, or when the supervisor falls silent.

python -m dsft.launcher.agent    a module of `dsft.remote`, which exchanges messages with the supervisor

To it:    {"command": HostCommand} once, then {"ping": 1} each second, {"signal": n}, {"stacks": 1},
          {"end": seconds}.
From it:  {"hello": {addresses, port}}, {"started": {rank: pid}}, {"heartbeats": [heartbeat, …]} each second
          and at a rank's first one, {"lines": [text, …]} of rank 0, {"died": rank, "code", "heartbeat": its
          last, "lines": the end of its log}, {"all_ended": true}, {"fault": text}, and last {"end": true}.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from dsft.launcher.launch_plan import HostCommand
from dsft.launcher.output import PATIENCE, OutputLog
from dsft.launcher.processes import JOB, is_stopped, job_processes, kill_job, send
from dsft.launcher.verdict import shown_lines
from dsft.rank.heartbeat import LOGS, SOCKET
from dsft.remote import Lines, Message, own_connection
from dsft.system.host import free_port
from dsft.system.json_file import parse_json
from dsft.system.process import die_with

PING = 1.0  # seconds
SILENCE = 15.0
"""Seconds without a message after which an agent considers the supervisor lost, or the supervisor an
agent."""

TICK = 0.1
LARGEST = 2**16  # bytes of a datagram


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        # Sent by a terminal or scheduler; the supervisor decides. Not SIG_IGN, which ranks would inherit.
        signal.signal(number, lambda number, frame: None)
    is_short = len(os.fsencode(tempfile.gettempdir())) < 78  # a socket's path has 107 bytes at most
    scratch = Path(tempfile.mkdtemp(prefix="dsft-agent-", dir=None if is_short else "/tmp"))  # noqa: S108
    try:
        asyncio.run(Agent(scratch).run())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


class Agent:
    """The agent of one host. scratch: folder of the heartbeat socket; must not be writable by other users."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._processes: HostProcesses | None = None
        self._finish = asyncio.Event()

    async def run(self) -> None:
        try:
            connection = await asyncio.wait_for(own_connection(), SILENCE)
        except TimeoutError:
            return
        connection.send({"hello": hello()})
        tasks = [
            asyncio.create_task(work)
            for work in (self._receive(connection), self._send_heartbeats(connection))
        ]
        await self._finish.wait()
        for task in tasks:
            task.cancel()
        if self._processes:
            await self._processes.end()
        connection.send({"end": True})
        await connection.flush(1.0)

    async def _receive(self, connection: Lines) -> None:
        try:
            while (message := await asyncio.wait_for(connection.receive(), SILENCE)) is not None:
                self._handle(message, connection)
        except TimeoutError:
            pass  # the supervisor is lost: end
        finally:
            self._finish.set()

    def _handle(self, message: Message, connection: Lines) -> None:
        if "command" in message:
            self._processes = HostProcesses(
                HostCommand(**message["command"]), self._scratch, connection, self._finish
            )
            try:
                self._processes.start()
            except OSError as error:
                connection.send({"fault": f"{error.filename or 'the ranks'}: {error.strerror or error}"})
                self._finish.set()
        if "signal" in message and self._processes:
            self._processes.signal(int(message["signal"]))
        if "stacks" in message and self._processes:
            self._processes.stacks()
        if "end" in message:
            asyncio.get_running_loop().call_later(float(message["end"]), self._finish.set)

    async def _send_heartbeats(self, connection: Lines) -> None:
        while True:
            ranks = self._processes.ranks.values() if self._processes else ()
            heartbeats = [rank.heartbeat.as_message() for rank in ranks if rank.heartbeat]
            connection.send({"heartbeats": heartbeats}, may_drop=True)
            await asyncio.sleep(PING)


def hello() -> Message:
    """Return this host's addresses per interface, and a free port."""
    addresses = {
        name: [each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }
    return {"addresses": addresses, "port": free_port()}


@dataclass(frozen=True)
class ReceivedHeartbeat:
    """A rank's last heartbeat, as sent by `dsft.rank.heartbeat`.

    received_at, progress_at  on this host's monotonic clock
    ended, message         exit code and error of a rank that ends by itself
    """

    rank: int
    pid: int
    step: int | None
    phase: str
    received_at: float
    progress_at: float
    ended: int | None = None
    message: str | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the heartbeat as a message, with ages in seconds instead of times: hosts' clocks differ."""
        now = time.monotonic()
        facts = {"rank": self.rank, "pid": self.pid, "step": self.step, "phase": self.phase}
        ages = {"silent": round(now - self.received_at, 1), "idle": round(now - self.progress_at, 1)}
        return {**facts, **ages, "ended": self.ended, "message": self.message}


def read_heartbeat(datagram: bytes, now: float) -> ReceivedHeartbeat | None:
    """Parse a datagram; None if it is not a heartbeat."""
    try:
        fields = parse_json(datagram.decode())
        ended, message = fields.get("ended"), fields.get("message")
        return ReceivedHeartbeat(
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


@dataclass
class LocalRank:
    """A rank of this host."""

    output: OutputLog
    process: subprocess.Popen[bytes]
    heartbeat: ReceivedHeartbeat | None = None
    signalled: bool = False
    ended: bool = False


class HostProcesses:
    """The ranks of one run on this host."""

    def __init__(self, command: HostCommand, scratch: Path, connection: Lines, finish: asyncio.Event) -> None:
        self._command, self._connection, self._finish = command, connection, finish
        self._scratch, self._path = scratch, str(scratch / "heartbeat")
        self.ranks: dict[int, LocalRank] = {}
        self._loop = asyncio.get_running_loop()
        self._signal_to_send: int | None = None  # the signal to send to every rank
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the ranks. Raises OSError if one cannot be started or a file cannot be written."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._take_heartbeats)
        logs = Path(self._command.logs) if self._command.logs else self._scratch / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for local, number in enumerate(self._command.ranks):
            output = OutputLog(logs / f"rank-{number}.log", *([self._show] if number == 0 else []))
            place = {"RANK": str(number), "LOCAL_RANK": str(local), LOGS: str(logs)}
            process = self._start(output, place)
            self.ranks[number] = LocalRank(output, process)
            with suppress(OSError):  # Linux before 5.3 has none: `_until_ended` looks for ends too
                descriptor = os.pidfd_open(process.pid)  # readable once the process has ended
                self._loop.add_reader(descriptor, self._died, number, descriptor)
        self._connection.send({"started": {number: each.process.pid for number, each in self.ranks.items()}})
        for rank in self.ranks.values():
            rank.output.start()
        self._ending = asyncio.create_task(self._until_ended())

    def _start(self, output: OutputLog, place: dict[str, str]) -> subprocess.Popen[bytes]:
        own = {JOB: self._command.job, SOCKET: self._path}
        parent = os.getpid()
        return subprocess.Popen(
            self._command.argv,
            cwd=self._command.folder,
            env={**os.environ, **self._command.environ, **place, **own},
            stdin=subprocess.DEVNULL,
            stdout=output.writing,
            stderr=output.writing,
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),  # safe: this process has no other threads yet
        )

    def _died(self, number: int, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        rank = self.ranks[number]
        if rank.ended:
            return
        self._take_heartbeats()
        rank.ended, code = True, rank.process.wait()
        last = rank.heartbeat.as_message() if rank.heartbeat else None
        lines = rank.output.last_lines() if code != 0 else []
        self._connection.send({"died": number, "code": code, "heartbeat": last, "lines": lines})

    def _take_heartbeats(self) -> None:
        while True:
            try:
                heartbeat = read_heartbeat(self._socket.recv(LARGEST), time.monotonic())
            except OSError:
                break
            rank = self.ranks.get(heartbeat.rank) if heartbeat else None
            if rank is None or heartbeat is None:
                continue
            is_first, last = rank.heartbeat is None, rank.heartbeat
            if last and last.ended is not None and heartbeat.ended is None:
                heartbeat = replace(heartbeat, ended=last.ended, message=last.message)
            rank.heartbeat = heartbeat
            if is_first:
                self._connection.send({"heartbeats": [heartbeat.as_message()]})
        self._pass_on()

    def signal(self, number: int) -> None:
        """Send a signal once to every rank, after the rank's first heartbeat: before that it does not handle
        signals."""
        self._signal_to_send = number
        self._pass_on()

    def _pass_on(self) -> None:
        for rank in self.ranks.values():
            if self._signal_to_send is not None and rank.heartbeat and not rank.signalled and not rank.ended:
                rank.signalled = True
                send(rank.heartbeat.pid, self._signal_to_send)

    def stacks(self) -> None:
        """Ask the ranks that have sent heartbeats to write their stacks; wake stopped ones first: a signal
        that waits for a stopped process is taken by any of its threads, and the main one, which then runs
        on, has no readable stack."""
        for rank in self.ranks.values():
            if rank.heartbeat and not rank.ended:
                if is_stopped(rank.process.pid):
                    send(rank.process.pid, signal.SIGCONT)
                send(rank.process.pid, signal.SIGUSR2)

    def _show(self, lines: list[str]) -> None:
        """Send lines of rank 0, but for its error, which its last heartbeat has and the supervisor prints at
        the end. Called in the thread of its output."""

        def send() -> None:
            self._take_heartbeats()
            heartbeat = self.ranks[0].heartbeat
            shown = shown_lines(lines, heartbeat.message if heartbeat else None)
            self._connection.send({"lines": shown}, may_drop=True)

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(send)

    async def _until_ended(self) -> None:
        """Wait for the ranks, then for the processes that they have started (W&B's service)."""
        while not all(rank.ended for rank in self.ranks.values()):
            await asyncio.sleep(TICK)
            for number, rank in self.ranks.items():
                if not rank.ended and rank.process.poll() is not None:
                    self._died(number)
        if 0 in self.ranks:
            await asyncio.to_thread(self.ranks[0].output.last_lines)
            await asyncio.sleep(0)  # let the callbacks of its thread run
        self._connection.send({"all_ended": True})
        while job_processes(self._command.job):
            await asyncio.sleep(TICK)
        self._finish.set()

    async def end(self) -> None:
        """Kill all processes of the job on this host."""
        if self._ending is not None:
            self._ending.cancel()
        ranks = self.ranks.values()
        left = kill_job(
            self._command.job, [each.process.pid for each in ranks if each.process.poll() is None]
        )
        for each in ranks:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(0 if left else 1)
        if self._ending is not None:
            until = time.monotonic() + PATIENCE
            for each in ranks:
                each.output.close()
            while not all(each.output.ended.is_set() for each in ranks) and time.monotonic() < until:
                await asyncio.sleep(TICK / 10)
            await asyncio.sleep(0)  # let the callbacks of their threads run


if __name__ == "__main__":
    sys.exit(main())
