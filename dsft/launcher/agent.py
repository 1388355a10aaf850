"""Run on each host of a run: start the host's ranks, report what happens to them, and end them all when asked
to, or when the supervisor falls silent.

python -m dsft.launcher.agent    a module of `dsft.remote`, which exchanges messages with the supervisor

To it:    {"command": HostCommand} once, then {"ping": 1} each second, {"signal": n}, {"stacks": 1},
          {"end": seconds}; or only {"sweep": job}: kill the processes that a lost agent has left.
From it:  {"hello": {addresses, port}}, {"started": {rank: pid}}, {"heartbeats": [heartbeat, …]} each second
          and at a rank's first one, {"lines": [text, …]} of rank 0, {"died": rank, "code", "heartbeat": its
          last, "lines": the end of its log}, {"exit_code": of all that was started, "lines"},
          {"fault": text}, and last {"end": number of processes that are left}.
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
from dsft.launcher.processes import JOB, code_of_ended, is_alive, is_stopped, job_processes, kill_job, send
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
        connection.send({"end": len(await self._processes.end()) if self._processes else 0})
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
        if "sweep" in message:
            connection.send({"end": len(kill_job(str(message["sweep"])))})
            self._finish.set()
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
    """A rank of this host.

    process  None if a launcher that the agent started has started the rank in turn (as torchrun does); the
             rank is then known from its first heartbeat
    """

    output: OutputLog
    process: subprocess.Popen[bytes] | None = None
    pid: int | None = None
    heartbeat: ReceivedHeartbeat | None = None
    signalled: bool = False
    ended: bool = False


class HostProcesses:
    """The processes of one run on this host: one per rank or, if the command says so, a launcher that starts
    them, whose ranks are known from their heartbeats."""

    def __init__(self, command: HostCommand, scratch: Path, connection: Lines, finish: asyncio.Event) -> None:
        self._command, self._connection, self._finish = command, connection, finish
        self._scratch, self._path = scratch, str(scratch / "heartbeat")
        self.ranks: dict[int, LocalRank] = {}
        self._launcher_output: OutputLog | None = None
        self._loop = asyncio.get_running_loop()
        self._signal_to_send: int | None = None  # the signal to send to every rank
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ending: asyncio.Task[None] | None = None

    @property
    def _outputs(self) -> list[OutputLog]:
        launchers = [self._launcher_output] if self._launcher_output else []
        return [*launchers, *(rank.output for rank in self.ranks.values())]

    def start(self) -> None:
        """Start the processes. Raises OSError if one cannot be started or a file cannot be written."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._take_heartbeats)
        logs = Path(self._command.logs)
        logs.mkdir(parents=True, exist_ok=True)
        for number in self._command.ranks:
            (self._scratch / f"rank-{number}.stack").symlink_to(logs / f"rank-{number}.stack")
            name, shown = f"rank-{number}.log", (self._show,) if number == 0 else ()
            self.ranks[number] = LocalRank(OutputLog(self._scratch / name, logs / name, *shown))
        if self._command.starts_ranks:
            name = f"launcher-{self._command.host}.log"
            self._launcher_output = OutputLog(self._scratch / name, logs / name)
            self._start(self._launcher_output, {})
        else:
            for local, (number, rank) in enumerate(self.ranks.items()):
                rank.process = self._start(rank.output, {"RANK": str(number), "LOCAL_RANK": str(local)})
                rank.pid = rank.process.pid
                self._watch(rank.pid, number)
            self._connection.send({"started": {number: rank.pid for number, rank in self.ranks.items()}})
        for output in self._outputs:
            output.start()
        self._ending = asyncio.create_task(self._until_ended())

    def _start(self, output: OutputLog, place: dict[str, str]) -> subprocess.Popen[bytes]:
        own = {JOB: self._command.job, LOGS: str(self._scratch), SOCKET: self._path}
        parent = os.getpid()
        process = subprocess.Popen(
            self._command.argv,
            cwd=self._command.folder,
            env={**os.environ, **self._command.environ, **place, **own},
            stdin=subprocess.DEVNULL,
            stdout=output.writing,
            stderr=output.writing,
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),  # safe: this process has no other threads yet
        )
        self._processes.append(process)
        return process

    def _watch(self, pid: int, number: int) -> None:
        """Call `_died` as soon as the kernel reports the process's end."""
        with suppress(OSError):  # a rank of a launcher that has just ended
            descriptor = os.pidfd_open(pid)
            self._loop.add_reader(descriptor, self._died, number, descriptor)

    def _died(self, number: int, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._take_heartbeats()
        rank = self.ranks[number]
        if rank.ended:
            return
        rank.ended = True
        if rank.process is not None:
            code: int | None = rank.process.wait()
        else:
            code = code_of_ended(rank.pid) if rank.pid else None
        last = rank.heartbeat.as_message() if rank.heartbeat else None
        if code is None and rank.heartbeat:
            code = rank.heartbeat.ended
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
                if rank.pid is None:
                    rank.pid = heartbeat.pid
                    self._watch(heartbeat.pid, heartbeat.rank)
                self._connection.send({"heartbeats": [heartbeat.as_message()]})
        self._pass_on()

    def signal(self, number: int) -> None:
        """Send a signal once to every rank, after the rank's first heartbeat: before that it does not handle
        signals. A launcher does not get it, since each launcher reacts differently."""
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
            if rank.heartbeat and rank.pid and not rank.ended:
                if is_stopped(rank.pid):
                    send(rank.pid, signal.SIGCONT)
                send(rank.pid, signal.SIGUSR2)

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
        """Wait for the processes started here, then for those that they have started (W&B's service)."""
        while any(process.poll() is None for process in self._processes):
            for number, rank in self.ranks.items():  # where the kernel gave no pidfd
                if rank.pid is not None and not rank.ended and not is_alive(rank.pid):
                    self._died(number)
            await asyncio.sleep(TICK)
        for number, rank in self.ranks.items():
            if rank.pid is not None:
                self._died(number)
        if 0 in self.ranks:
            await asyncio.to_thread(self.ranks[0].output.last_lines)
            await asyncio.sleep(0)  # let the callbacks of its thread run
        codes = [process.returncode for process in self._processes]
        code = next((code for code in codes if code), 0)
        lines = self._launcher_output.last_lines() if self._launcher_output and code else []
        self._connection.send({"exit_code": code, "lines": lines})
        while job_processes(self._command.job):
            await asyncio.sleep(TICK)
        self._finish.set()

    async def end(self) -> list[int]:
        """Kill all processes of the job on this host. Returns the pids that could not be killed."""
        if self._ending is not None:
            self._ending.cancel()
        left = kill_job(self._command.job, [each.pid for each in self._processes if each.poll() is None])
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0 if left else 1)
        if self._ending is not None:
            until = time.monotonic() + PATIENCE
            for output in self._outputs:
                output.close()
            while not all(output.ended.is_set() for output in self._outputs) and time.monotonic() < until:
                await asyncio.sleep(TICK / 10)
            await asyncio.sleep(0)  # let the callbacks of their threads run
        return left


if __name__ == "__main__":
    sys.exit(main())
