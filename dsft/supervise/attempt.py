"""One start of a run on all of its hosts, from the agents' first word to the end of the last process. Takes
what each host is to run; starts agents, hears them, and ends all of it when one part of it fails.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dsft.remote import ROOT
from dsft.supervise.hang import Seen, hung, sentence
from dsft.supervise.logs import HEADING, error_in
from dsft.supervise.parts import World, address_of, orders
from dsft.supervise.verdict import STOPPED, Failure, exit_code, first_cause, shell_code
from dsft.supervise.wire import PING, SILENCE, Inbox, Message, Outbox

Tell = Callable[[str], None]

ANSWER = 30.0  # seconds that an agent may take to say hello
GRACE = 1.0  # seconds for ranks to say what they have to say, once one has failed
END = 4.0  # seconds after it in which an agent ends its part
LINGER = 10.0  # seconds for what a rank has started (W&B's service) after a part that ended well
UNHEARD = 3.0  # seconds without a word of an agent in which no rank is called silent
STACKS = 2.0  # seconds for hung ranks to write their stacks
TOGETHER = 60.0  # seconds between the first and the last part of a run that was stopped
SILENT_FOR = 60.0  # seconds without a pulse after which it is told, where no hang_timeout ends the run
TICK = 0.25


@dataclass
class Requests:
    """What signals have asked of this process: none, to stop (`stops` 1), to end at once (2)."""

    stops: int = 0
    signal: int = signal.SIGTERM
    first_at: float = 0.0

    def take(self, number: int) -> None:
        """A terminal and a scheduler may send two that mean one. SIGUSR1 announces the end of a job's time,
        so the signal after it is the first that asks for a stop."""
        if self.stops == 0 or (self.signal == signal.SIGUSR1 != number and self.stops == 1):
            self.stops, self.signal, self.first_at = 1, number, time.monotonic()
        elif time.monotonic() > self.first_at + 0.5:
            self.stops, self.signal = 2, number


@dataclass(frozen=True)
class Outcome:
    """code: of the command. failure: the first real one. lost: hosts that did not answer or went away. left:
    what could not be seen to end, in words."""

    code: int
    failure: Failure | None
    lost: tuple[str, ...]
    left: tuple[str, ...]
    seconds: float
    stacks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Terms:
    """environ: the ranks' variables beside their host's own. hang_timeout: seconds. interface, port: of
    rank 0, where they were chosen."""

    environ: Mapping[str, str]
    hang_timeout: float | None = None
    interface: str | None = None
    port: int | None = None


@dataclass
class _Host:
    name: str
    process: subprocess.Popen[bytes]
    inbox: Inbox
    outbox: Outbox
    errors: Inbox
    heard: float
    said: list[str] = field(default_factory=list)  # on its error output, and what is no message
    hello: Message | None = None
    part: int | None = None  # the exit code of its launcher
    tail: list[str] = field(default_factory=list)  # of the launcher's log
    over: bool = False
    lost: bool = False


@dataclass
class _Rank:
    host: str
    pid: int | None = None
    pulse: Message | None = None
    heard: float = 0.0
    told: Message | None = None
    tail: list[str] = field(default_factory=list)
    died: bool = False
    code: int | None = None

    @property
    def step(self) -> int | None:
        last = self.told or self.pulse
        return None if last is None else last.get("step")


class Attempt:
    """commands: host -> argument vector of its agent. seen: called every loop, for whoever writes down the
    state."""

    def __init__(
        self,
        world: World,
        commands: Mapping[str, list[str]],
        terms: Terms,
        requests: Requests,
        tell: Tell,
        seen: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        self.world = world
        self.state = "starting"
        self._commands, self._terms, self._requests, self._tell = commands, terms, requests, tell
        self._seen = seen
        self._hosts: dict[str, _Host] = {}
        self.ranks = {rank: _Rank(host) for host, ranks in world.ranks.items() for rank in ranks}
        self.failures: list[Failure] = []
        self._deadline: float | None = None  # of the end of all
        self._stacks_until: float | None = None
        self._hung: Failure | None = None
        self._stopped_at: float | None = None  # the first rank that ended with 75
        self._asked: tuple[int, int] | None = None  # how many signals, and the last of them
        self._ended_as_asked: int | None = None  # the exit code, where a signal ended all at once
        self._warned: set[int] = set()
        self._began = time.monotonic()

    def run(self, wake: int | None = None) -> Outcome:
        """wake: a descriptor that can be read when a signal has come."""
        try:
            for name, argv in self._commands.items():
                self._hosts[name] = _opened(name, argv)
            pinged = 0.0
            while not all(host.over for host in self._hosts.values()):
                self._wait(wake)
                now = time.monotonic()
                for host in self._hosts.values():
                    self._hear(host, now)
                self._look(now)
                if now >= pinged + PING:
                    pinged = now
                    self._send({"ping": 1})
                self._seen(self)
        finally:
            for host in self._hosts.values():
                _close(host)
        return self._outcome()

    def silence(self) -> list[Seen]:
        """Of the ranks that have pulsed and live, as their agents told it last."""
        found = []
        for number, rank in self.ranks.items():
            if rank.pulse is None or rank.died or rank.told is not None:
                continue
            pulse = rank.pulse
            found.append(
                Seen(number, rank.host, int(pulse["pid"]), pulse["step"], str(pulse["phase"]),
                     pulse["silent"], pulse["idle"])
            )  # fmt: skip
        return found

    # What the agents say

    def _hear(self, host: _Host, now: float) -> None:
        if host.over:
            return
        for message in host.inbox.read():
            host.heard = now
            if isinstance(message, dict):
                self._take(host, message, now)
            else:
                host.said.append(message)
        host.said += [line.decode(errors="replace").rstrip() for line in host.errors.lines()]
        host.outbox.flush()
        if host.inbox.ended and not host.over:
            self._lose(host, self._why_lost(host))

    def _take(self, host: _Host, message: Message, now: float) -> None:
        if "hello" in message:
            host.hello = message["hello"]
        elif "part" in message:
            self._part_ended(host, int(message["part"]), now)
        elif "fault" in message:
            self._fail(Failure("host", host.name, None, str(message["fault"])))
        elif "end" in message:
            host.over = True
        elif message.get("tail", 0) is None:
            host.tail = message["lines"]
        else:
            self._take_of_ranks(message, now)

    def _take_of_ranks(self, message: Message, now: float) -> None:
        if "pulses" in message:
            for pulse in message["pulses"]:
                rank = self.ranks[pulse["rank"]]
                rank.pulse, rank.heard, rank.pid = pulse, now, pulse["pid"]
        elif "pid" in message:
            self.ranks[message["rank"]].pid = message["pid"]
        elif "tail" in message:
            self.ranks[message["tail"]].tail = message["lines"]
        elif "lines" in message:
            for _, line in message["lines"]:
                if not line.startswith(HEADING):
                    self._tell(line)
        elif "told" in message:
            self.ranks[message["told"]["rank"]].told = message["told"]
        elif "died" in message:
            rank = self.ranks[message["died"]]
            rank.pulse, rank.heard = message["pulse"] or rank.pulse, now
            self._died(message["died"], message["code"], now)

    def _died(self, number: int, code: int | None, now: float) -> None:
        rank = self.ranks[number]
        if rank.died:
            return
        if code is None and rank.told is not None:
            code = int(rank.told["ended"])
        rank.died, rank.code = True, code
        if code is None or code == 0:  # unseen: its launcher's code says how it was
            return
        code = rank.code = shell_code(code)
        is_stopped = self._asked or self._stopped_at is not None
        if is_stopped and code == 128 + signal.SIGTERM and rank.pulse is None:
            code = rank.code = STOPPED  # ended by its launcher with the others, during its imports
        if code == STOPPED:
            self._stopped_at = self._stopped_at or now
            return
        if self.state == "ending" and code in (128 + signal.SIGKILL, 128 + signal.SIGTERM):
            return  # by us, or by its launcher
        message = (rank.told or {}).get("message") or (error_in(rank.tail) if code < 128 else None)
        if code == 128 + signal.SIGTERM and self._asked:
            message = "was asked to stop before it could save"
        self._fail(
            Failure("rank", rank.host, code, message, number, rank.step, tuple(rank.tail)),
        )

    def _part_ended(self, host: _Host, code: int, now: float) -> None:
        host.part = code
        own = [number for number in self.world.ranks[host.name] if not self.ranks[number].died]
        for number in own:
            if self.ranks[number].told is not None:
                self._died(number, None, now)
        known = [self.ranks[number].code for number in self.world.ranks[host.name]]
        explained = any(found not in (None, 0) for found in known) or self.state == "ending"
        if code != 0 and not explained:
            self._fail(
                Failure("launcher", host.name, shell_code(code), error_in(host.tail), lines=tuple(host.tail))
            )
        elif self.state != "ending":
            host.outbox.put({"end": LINGER})

    def _why_lost(self, host: _Host) -> str:
        with suppress(subprocess.TimeoutExpired):
            host.process.wait(1)
        code, said = host.process.poll(), [line for line in host.said if line.strip()]
        if code is not None and code < 0:
            return f"its agent, process {host.process.pid}, was killed by signal {-code}"
        what = "could not be reached" if host.hello is None else "was lost"
        return f"{what} ({said[-1] if said else f'its channel ended with exit code {code}'})"

    def _lose(self, host: _Host, why: str) -> None:
        host.over = host.lost = True
        if host.part is None or host.part != 0:
            self._fail(Failure("host", host.name, None, why, lines=tuple(host.said[-20:])))

    # What follows

    def _look(self, now: float) -> None:
        if self.state == "starting":
            self._greet(now)
        for host in self._hosts.values():
            if not host.over and host.hello is not None and now > host.heard + SILENCE:
                self._lose(host, f"has given no sign of life for {SILENCE:.0f} seconds")
        self._obey()
        if self.state in {"running", "stopping"}:
            self._look_for_hangs(now)
        if self._stacks_until is not None and now > self._stacks_until and self._hung is not None:
            self._stacks_until = None
            self._fail(self._hung)
        if self._stopped_at is not None and now > self._stopped_at + TOGETHER and self.state != "ending":
            self._tell(f"some ranks have not ended {TOGETHER:.0f} seconds after the others; ending them")
            self._end(0)
        if self._deadline is not None and now > self._deadline:
            for host in self._hosts.values():
                if not host.over:
                    host.over = host.lost = True

    def _greet(self, now: float) -> None:
        """Once every host has answered or failed to: all start together, or none."""
        waiting = [host for host in self._hosts.values() if host.hello is None and not host.over]
        if waiting and now < self._began + ANSWER:
            return
        for host in waiting:
            self._lose(host, f"has not answered within {ANSWER:.0f} seconds")
        if self.failures:
            self._end(0)
            return
        first = next(iter(self._hosts.values()))
        assert first.hello is not None
        alone = len(self._hosts) == 1
        address = (
            "127.0.0.1" if alone else address_of(first.name, first.hello["addresses"], self._terms.interface)
        )
        port = self._terms.port or int(first.hello["port"])
        for name, order in orders(self.world, address, port, self._terms.environ).items():
            self._hosts[name].outbox.put(order.message())
        self.state = "running"

    def _obey(self) -> None:
        """A first signal is passed on to the ranks, which save and end; where none of them has given a sign
        of life there is nothing to save, and all is ended. SIGUSR1 lets every rank do its first step."""
        stops, number = self._requests.stops, self._requests.signal
        waits = stops == 1 and number == signal.SIGUSR1
        if (stops, number) == self._asked or (waits and self.state == "starting") or not stops:
            return
        self._asked = stops, number
        if self.state == "ending":
            return
        name = signal.Signals(number).name
        if stops == 1 and (waits or any(rank.pulse for rank in self.ranks.values())):
            self.state = "stopping"
            step = "the next step" if waits else "this step, if one has begun"
            self._tell(f"{name}: saving at the end of {step}, then ending; once more (Ctrl-C) ends at once")
            self._send({"signal": signal.SIGUSR1 if waits else signal.SIGTERM})
        else:
            self._ended_as_asked = STOPPED if stops == 1 else 128 + number
            self._tell(f"{name}: ending at once{', before any rank has started' if stops == 1 else ''}")
            self._end(0)

    def _look_for_hangs(self, now: float) -> None:
        unheard = any(now > host.heard + UNHEARD for host in self._hosts.values() if not host.over)
        if self._stacks_until is not None or unheard:  # the host may be lost, and its ranks with it
            return
        limit = self._terms.hang_timeout
        if limit is None:
            for each in hung(self.silence(), SILENT_FOR):
                if each.silent > SILENT_FOR and each.rank not in self._warned:
                    self._warned.add(each.rank)
                    self._tell(
                        f"warning: rank {each.rank} on {each.host} has given no sign of life for "
                        f"{SILENT_FOR:.0f} seconds; cluster.hang_timeout would end the run"
                    )
            return
        found = hung(self.silence(), limit)
        if found:
            first = found[0]
            self._hung = Failure("hang", first.host, None, sentence(found, limit), first.rank, first.step)
            self._tell(f"{self._hung.text()}; saving the stacks of all ranks")
            self._send({"stacks": 1})
            self._stacks_until = now + STACKS

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self.state in {"running", "stopping"} and not failure.is_consequence():
            self._tell(f"{failure.text()}; ending all others")
        if self.state in {"running", "stopping"}:
            self._end(0 if failure.kind == "hang" else GRACE)

    def _end(self, grace: float) -> None:
        self.state = "ending"
        self._send({"end": grace})
        self._deadline = time.monotonic() + grace + END

    def _send(self, message: Message) -> None:
        for host in self._hosts.values():
            if not host.over:
                host.outbox.put(message)

    def _wait(self, wake: int | None) -> None:
        poll = select.poll()
        for host in self._hosts.values():
            if not host.over:
                poll.register(host.inbox.descriptor, select.POLLIN)
                if not host.errors.ended:
                    poll.register(host.errors.descriptor, select.POLLIN)
                if host.outbox.waits:
                    poll.register(host.outbox.descriptor, select.POLLOUT)
        if wake is not None:
            poll.register(wake, select.POLLIN)
        poll.poll(TICK * 1000)
        if wake is not None:
            with suppress(BlockingIOError):
                os.read(wake, 4096)

    def _outcome(self) -> Outcome:
        failure = first_cause(self.failures)
        code = exit_code(failure)
        if failure is None and self._stopped_at is not None:
            code = STOPPED
        if self._ended_as_asked is not None:
            failure, code = None, self._ended_as_asked
        elif failure is None and code == 0 and not self._all_done():
            code = 128 + self._requests.signal
        lost = tuple(host.name for host in self._hosts.values() if host.lost)
        stacks = tuple(number for number, rank in self.ranks.items() if rank.pulse) if self._hung else ()
        return Outcome(code, failure, lost, (), time.monotonic() - self._began, stacks)

    def _all_done(self) -> bool:
        return all(host.part == 0 for host in self._hosts.values())


def _opened(host: str, argv: list[str]) -> _Host:
    """In a session of its own: a terminal's Ctrl-C is for the supervisor alone."""
    process = subprocess.Popen(
        argv, cwd=ROOT, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    return _Host(
        host, process, Inbox(process.stdout.fileno()), Outbox(process.stdin.fileno()),
        Inbox(process.stderr.fileno()), time.monotonic(),
    )  # fmt: skip


def _close(host: _Host) -> None:
    """Closing its input ends an agent that still lives; what does not end is killed."""
    process = host.process
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        with suppress(OSError):
            stream.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(0 if host.lost else 2)
    if process.poll() is None:
        process.kill()
        process.wait()


def facts(attempt: Attempt) -> dict[str, Any]:
    """What status.json says of the ranks, and of the state."""
    now = time.monotonic()
    ranks = {}
    for number, rank in attempt.ranks.items():
        pulse = rank.pulse or {}
        since = now - rank.heard
        ranks[str(number)] = {
            "host": rank.host, "pid": rank.pid, "step": rank.step, "phase": pulse.get("phase"),
            "pulse_age": round(pulse["silent"] + since, 1) if pulse else None,
            "progress_age": round(pulse["idle"] + since, 1) if pulse else None,
        }  # fmt: skip
    return {"state": attempt.state, "ranks": ranks}
