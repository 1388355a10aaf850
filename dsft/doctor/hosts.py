"""Ask a module on all hosts at once (`HostChannels`), and ask `dsft.doctor.probe` its two questions
(`ask_probes`): what a host is like, and what it sees of the others. Leaves no process behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dsft.errors import WorldError
from dsft.remote import Channel, NoAnswer

PROBE = "dsft.doctor.probe"
ANSWER = 30.0
"""Seconds that a reachable host has to answer: a disk or the name service may hang."""

Facts = Mapping[str, Any]
Command = Callable[[str], Sequence[str]]
"""Return host -> the argument vector that starts the module there."""


@dataclass(frozen=True)
class NoResponse:
    """Why a host did not answer.

    code    exit code of the process that was started; None if it had to be killed
    output  what else it printed
    """

    code: int | None
    output: str

    def __str__(self) -> str:
        lines = self.output.splitlines()
        return lines[-1] if lines else "no answer" if self.code is None else f"exit code {self.code}"


@dataclass(frozen=True)
class ProbeAnswers:
    """All answers. first, second: by host; silent: hosts without a first or second answer."""

    first: Mapping[str, Facts]
    second: Mapping[str, Facts]
    silent: Mapping[str, NoResponse]


class HostChannels:
    """Channels to a module on several hosts. silent: hosts that did not answer; they are not asked again."""

    def __init__(self, command: Command, environ: Mapping[str, str]) -> None:
        self._command, self._environ = command, environ
        self._channels: dict[str, Channel] = {}
        self.silent: dict[str, NoResponse] = {}

    async def __aenter__(self) -> HostChannels:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def ask(
        self,
        questions: Mapping[str, Facts],
        seconds: float,
        answered: Callable[[str], None] = lambda host: None,
    ) -> dict[str, Facts]:
        """Ask each host its question. Returns host -> answer for hosts that answered in time, in the same
        order."""
        found = await asyncio.gather(
            *(self._ask(host, question, seconds, answered) for host, question in questions.items())
        )
        return {host: facts for host, facts in zip(questions, found, strict=True) if facts is not None}

    async def _ask(
        self, host: str, question: Facts, seconds: float, answered: Callable[[str], None]
    ) -> Facts | None:
        if host in self.silent:
            return None
        try:
            if host not in self._channels:  # in a thread: it asks the name service
                argv = await asyncio.to_thread(self._command, host)
                self._channels[host] = await Channel.open(argv, self._environ)
            facts = await self._channels[host].ask(question, seconds)
        except NoAnswer as error:
            self.silent[host] = NoResponse(error.code, error.output)
            return None
        except WorldError as error:  # not a host name
            self.silent[host] = NoResponse(1, str(error))
            return None
        if set(facts) == {"fault"}:
            self.silent[host] = NoResponse(1, facts["fault"].partition("\n")[0])  # without torch's stack
            return None
        answered(host)
        return facts


def ask_probes(
    orders: Mapping[str, Facts],
    wanted: Callable[[Mapping[str, Facts]], Mapping[str, Facts]],
    command: Command,
    environ: Mapping[str, str],
    answered: Callable[[str], None] = lambda host: None,
) -> ProbeAnswers:
    """Ask the probes both questions.

    orders    host -> the first question
    wanted    all first answers -> the second question per host
    environ   variables of the probes
    answered  called with each host that gave its first answer
    """

    async def both() -> ProbeAnswers:
        async with HostChannels(command, environ) as channels:
            first = await channels.ask(orders, ANSWER, answered)
            second = await channels.ask(wanted(first), ANSWER)
            return ProbeAnswers(first, second, channels.silent)

    return asyncio.run(both())
