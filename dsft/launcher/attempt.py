"""Run one start on all hosts of a run, from the first message of the agents to the end of the last process:
start the agents, receive their reports, and end everything once one of them fails."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dsft.launcher.agent import PING, SILENCE
from dsft.launcher.launch_plan import LaunchPlan, address_of
from dsft.launcher.verdict import (
    STOPPED,
    Failure,
    Outcome,
    RankActivity,
    error_in,
    exit_code,
    first_cause,
    hang_message,
    hung_ranks,
    shell_code,
)
from dsft.rank.stopping import name_of
from dsft.remote import Channel, Message, NoAnswer

Log = Callable[[str], None]
Command = Callable[[str], list[str]]

ANSWER = 30.0  # seconds that an agent may take to say hello
GRACE = 1.0  # seconds for the other ranks to report, once one has failed
END = 4.0  # seconds after that in which an agent must have ended its processes
LINGER = 10.0  # seconds for processes that a rank has started (W&B's service) after a successful end
QUIET = 3.0  # seconds without a message of an agent after which ranks are not checked for hangs
STACKS = 2.0  # seconds for hung ranks to write their stacks
TOGETHER = 60.0  # seconds that ranks of a stopped run have to end after the first one
SILENT_FOR = 60.0  # seconds without a heartbeat until a warning, if there is no hang_timeout
TICK = 0.1


@dataclass
class Requests:
    """The requests of signals to this process. stops: 0 none, 1 stop, 2 end at once."""

    stops: int = 0
    signal: int = signal.SIGTERM
    first_at: float = 0.0

    def take(self, number: int) -> None:
        """Count a signal. Signals within half a second count as one, since a terminal and a scheduler may
        send two. SIGUSR1 announces the end of a job's time, so the signal after it is the first that asks to
        stop."""
        if self.stops == 0 or (self.signal == signal.SIGUSR1 != number and self.stops == 1):
            self.stops, self.signal, self.first_at = 1, number, time.monotonic()
        elif time.monotonic() > self.first_at + 0.5:
            self.stops, self.signal = 2, number


@dataclass(frozen=True)
class AttemptSettings:
    """Settings of a start.

    environ          variables for every host, beside its own
    hang_timeout     seconds; None: a hang does not end the run
    interface, port  rank 0's, where they were chosen
    """

    environ: Mapping[str, str]
    hang_timeout: float | None = None
    interface: str | None = None
    port: int | None = None


@dataclass
class _Host:
    """A host and its agent.

    received_at  time of its last message
    over   its agent has ended or is lost
    """

    name: str
    channel: Channel | None = None
    received_at: float = 0.0
    hello: Message | None = None
    greeted: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    lost: bool = False

    def send(self, message: Message) -> None:
        if self.channel is not None and not self.over:
            self.channel.send(message)


@dataclass
class _Rank:
    """A rank, and its last heartbeat, which arrived at `received_at`."""

    host: str
    pid: int | None = None
    heartbeat: Message | None = None
    received_at: float = 0.0
    died: bool = False
    code: int | None = None

    @property
    def step(self) -> int | None:
        return self.heartbeat["step"] if self.heartbeat else None


class Attempt:
    """One start. agent_command: host -> argument vector of its agent."""

    def __init__(
        self,
        plan: LaunchPlan,
        settings: AttemptSettings,
        requests: Requests,
        log: Log,
        agent_command: Command | None = None,
    ) -> None:
        self.plan = plan
        self.state = "starting"
        self.ranks = {rank: _Rank(host) for host, ranks in plan.ranks.items() for rank in ranks}
        self.failures: list[Failure] = []
        self._settings, self._requests, self.log = settings, requests, log
        self._agent_command = agent_command or plan.agent
        self._hosts = {host: _Host(host) for host in plan.hosts}
        self._last_signal: tuple[int, int] | None = None  # number of signals, and the last one
        self._ended_by_signal: int | None = None  # the exit code, if a signal ended all at once
        self._stopped = False  # a rank has ended with 75
        self._began = time.monotonic()

    async def run(self) -> Outcome:
        """Raises WorldError where the command of an agent cannot be built."""
        # All before the first agent starts, which would wait while a name service is asked for the others.
        commands = {name: self._agent_command(name) for name in self._hosts}
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(work)
                for work in (self._greet(), self._ping(), self._handle_signals(), self._watch_for_hangs())
            ]
            attended = [self._attend(host, commands[name]) for name, host in self._hosts.items()]
            await asyncio.wait([tasks.create_task(work) for work in attended])
            for helper in helpers:
                helper.cancel()
        return self._outcome()

    # A host

    async def _attend(self, host: _Host, command: list[str]) -> None:
        """Run a host's agent from its start to its end."""
        try:
            host.channel = await Channel.open(command, self._settings.environ)
            while "end" not in (message := await self._next(host, host.channel)):
                self._handle(host, message)
        except NoAnswer as error:
            if not host.lost:
                self._lose(host, str(error))
        finally:
            host.over = True
            host.greeted.set()
            if host.channel is not None:
                await host.channel.close(0 if host.lost else 2)

    async def _next(self, host: _Host, channel: Channel) -> Message:
        """Return the next message. Raises NoAnswer if the agent has ended or is silent."""
        limit = self._began + ANSWER - time.monotonic() if host.hello is None else SILENCE
        try:
            message = await asyncio.wait_for(channel.receive(), limit)
        except TimeoutError:
            what = f"has sent no message for {SILENCE:.0f} seconds"
            late = f"has not answered within {ANSWER:.0f} seconds"
            raise NoAnswer(late if host.hello is None else what, None, "") from None
        if message is not None:
            host.received_at = time.monotonic()
            return message
        reason, code = await channel.reason(), channel.code
        if code is not None and code < 0:
            raise NoAnswer(f"its agent, process {channel.pid}, was killed by signal {-code}", code, reason)
        what = "could not be reached" if host.hello is None else "was lost"
        raise NoAnswer(f"{what} ({reason})", code, reason)

    def _handle(self, host: _Host, message: Message) -> None:
        if "hello" in message:
            host.hello = message["hello"]
            host.greeted.set()
        elif "started" in message:
            for number, pid in message["started"].items():
                self.ranks[int(number)].pid = pid
        elif "heartbeats" in message:
            for heartbeat in message["heartbeats"]:
                rank = self.ranks[heartbeat["rank"]]
                rank.heartbeat, rank.received_at, rank.pid = heartbeat, time.monotonic(), heartbeat["pid"]
        elif "died" in message:
            rank = self.ranks[message["died"]]
            rank.heartbeat, rank.received_at = message["heartbeat"] or rank.heartbeat, time.monotonic()
            self._died(message["died"], message["code"], message["lines"])
        elif "all_ended" in message:
            if self.state != "ending":
                host.send({"end": LINGER})
        elif "lines" in message:
            for line in message["lines"]:
                self.log(line)
        elif "fault" in message:
            self._fail(Failure("host", host.name, None, str(message["fault"])))

    def _died(self, number: int, code: int, lines: list[str]) -> None:
        rank = self.ranks[number]
        rank.died, rank.code = True, shell_code(code)
        if code == 0:
            return
        if code == STOPPED:
            if not self._stopped:
                self._stopped = True
                asyncio.get_running_loop().call_later(TOGETHER, self._end_stragglers)
            return
        code = rank.code
        if self.state == "ending" and code == 128 + signal.SIGKILL:
            return  # killed by its agent
        message = (rank.heartbeat or {}).get("message") or (error_in(lines) if code < 128 else None)
        if code == 128 + signal.SIGTERM and self._last_signal:
            message = "was asked to stop before it could save"
        self._fail(Failure("rank", rank.host, code, message, number, rank.step, tuple(lines)))

    def _lose(self, host: _Host, why: str) -> None:
        host.over = host.lost = True
        if any(self.ranks[number].code != 0 for number in self.plan.ranks[host.name]):
            errors = tuple(host.channel.errors) if host.channel else ()
            self._fail(Failure("host", host.name, None, why, lines=errors[-20:]))

    # All hosts

    async def _greet(self) -> None:
        """Wait until every host has answered or failed to; then start all of them, or none."""
        await asyncio.gather(*(host.greeted.wait() for host in self._hosts.values()))
        if self.state != "starting":
            return
        if self.failures:
            self._end(0)
            return
        first = next(iter(self._hosts.values()))
        assert first.hello is not None
        address = "127.0.0.1"
        if len(self._hosts) > 1:
            address = address_of(first.name, first.hello["addresses"], self._settings.interface)
        port = self._settings.port or int(first.hello["port"])
        for host in self._hosts.values():
            host.send({"command": asdict(self.plan.command_of(host.name, address, port))})
        self.state = "running"

    async def _ping(self) -> None:
        while True:
            self._send({"ping": 1})
            await asyncio.sleep(PING)

    async def _handle_signals(self) -> None:
        """Act on signals. The first is passed on to the ranks, which save and end; if none of them has sent a
        heartbeat there is nothing to save, and all are ended. SIGUSR1 lets every rank finish its first
        step."""
        while True:
            await asyncio.sleep(TICK)
            stops, number = self._requests.stops, self._requests.signal
            waits = stops == 1 and number == signal.SIGUSR1
            if (stops, number) == self._last_signal or (waits and self.state == "starting") or not stops:
                continue
            self._last_signal = stops, number
            if self.state == "ending":
                continue
            name = name_of(number)
            if stops == 1 and (waits or any(rank.heartbeat for rank in self.ranks.values())):
                self.state = "stopping"
                step = "the next step" if waits else "this step, if one has begun"
                self.log(
                    f"{name}: saving at the end of {step}, then ending; a second signal (Ctrl-C) ends at once"
                )
                # Not SIGHUP: a rank may ignore it, where this process does not.
                self._send({"signal": signal.SIGTERM if number == signal.SIGHUP else number})
            else:
                self._ended_by_signal = STOPPED if stops == 1 else 128 + number
                self.log(f"{name}: ending at once{', before any rank has started' if stops == 1 else ''}")
                self._end(0)

    async def _watch_for_hangs(self) -> None:
        """Watch for ranks that hang."""
        warned: set[int] = set()
        limit = self._settings.hang_timeout
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            quiet = any(now > host.received_at + QUIET for host in self._hosts.values() if not host.over)
            # While a host is quiet, its ranks' ages are unknown and the others may wait for it, so no rank is
            # blamed. This ends within SILENCE seconds: the host speaks again, or is lost and the run ends.
            if self.state not in {"running", "stopping"} or quiet:
                continue
            found = hung_ranks(self._activity(), limit or SILENT_FOR)
            if limit is None:
                for each in found:
                    if each.silent > SILENT_FOR and each.rank not in warned:
                        warned.add(each.rank)
                        self.log(
                            f"warning: rank {each.rank} on {each.host} has sent no heartbeat for "
                            f"{SILENT_FOR:.0f} seconds; cluster.hang_timeout would end the run"
                        )
            elif found:
                first = found[0]
                failure = Failure(
                    "hang", first.host, None, hang_message(found, limit), first.rank, first.step
                )
                self.log(f"{failure.headline()}; saving the stacks of all ranks")
                self._send({"stacks": 1})
                await asyncio.sleep(STACKS)
                self._fail(failure)

    def _activity(self) -> list[RankActivity]:
        """Return step, phase and ages as last reported by each living rank. Ranks that have sent no heartbeat
        yet are left out."""
        return [
            RankActivity(number, rank.host, beat["step"], beat["phase"], beat["silent"], beat["idle"])
            for number, rank in self.ranks.items()
            if (beat := rank.heartbeat) is not None and not rank.died and beat["ended"] is None
        ]

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self.state in {"running", "stopping"}:
            if not failure.is_consequence():
                self.log(f"{failure.headline()}; ending all others")
            self._end(0 if failure.kind == "hang" else GRACE)

    def _end_stragglers(self) -> None:
        if self.state != "ending" and not all(host.over for host in self._hosts.values()):
            self.log(f"some ranks have not ended {TOGETHER:.0f} seconds after the others; ending them")
            self._end(0)

    def _end(self, grace: float) -> None:
        self.state = "ending"
        self._send({"end": grace})
        asyncio.get_running_loop().call_later(grace + END, self._give_up)

    def _give_up(self) -> None:
        """Cut the connection to hosts that have not ended by now."""
        for host in self._hosts.values():
            if not host.over:
                host.lost = True
                if host.channel is not None:
                    host.channel.cut()

    def _send(self, message: Message) -> None:
        for host in self._hosts.values():
            host.send(message)

    def _outcome(self) -> Outcome:
        failure = first_cause(self.failures)
        code = exit_code(failure)
        if failure is None and self._stopped:
            code = STOPPED
        if self._ended_by_signal is not None:
            failure, code = None, self._ended_by_signal
        elif failure is None and code == 0 and any(rank.code != 0 for rank in self.ranks.values()):
            code = 128 + self._requests.signal
        lost = tuple(host.name for host in self._hosts.values() if host.lost)
        is_hung = any(each.kind == "hang" for each in self.failures)
        stacks = tuple(number for number, rank in self.ranks.items() if rank.heartbeat) if is_hung else ()
        return Outcome(code, failure, lost, time.monotonic() - self._began, stacks)

    def facts(self) -> dict[str, Any]:
        """Return the state and the ranks for status.json."""
        now = time.monotonic()
        ranks = {}
        for number, rank in self.ranks.items():
            heartbeat = rank.heartbeat or {}
            since = now - rank.received_at
            ranks[str(number)] = {
                "host": rank.host, "pid": rank.pid, "step": rank.step, "phase": heartbeat.get("phase"),
                "pulse_age": round(heartbeat["silent"] + since, 1) if heartbeat else None,
                "progress_age": round(heartbeat["idle"] + since, 1) if heartbeat else None,
            }  # fmt: skip
        return {"state": self.state, "ranks": ranks}
