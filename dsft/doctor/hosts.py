"""Ask the doctor's program (`dsft.doctor.probe`) its two questions on all hosts at once: what a host is like,
and what it sees of the others. Leaves no process behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.errors import WorldError
from dsft.remote import Channel, NoAnswer

PROBE = "dsft.doctor.probe"
ANSWER = 30.0
"""Seconds that a reachable host has to answer: a disk or the name service may hang."""

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class ProbeAnswers:
    """All answers. first, second: by host; silent: hosts without a first or second answer."""

    first: Mapping[str, Facts]
    second: Mapping[str, Facts]
    silent: Mapping[str, NoAnswer]


def ask_probes(
    orders: Mapping[str, Facts],
    wanted: Callable[[Mapping[str, Facts]], Mapping[str, Facts]],
    command: Callable[[str], Sequence[str]],
    environ: Mapping[str, str],
    answered: Callable[[str], None] = lambda host: None,
) -> ProbeAnswers:
    """Ask the probes both questions.

    orders    host -> the first question
    wanted    all first answers -> the second question per host
    command   host -> the argument vector that starts the probe there
    environ   variables of the probes
    answered  called with each host that gave its first answer
    """
    channels: dict[str, Channel] = {}
    silent: dict[str, NoAnswer] = {}

    async def ask(host: str, question: Facts) -> Facts | None:
        try:
            if host not in channels:  # in a thread: it asks the name service
                argv = await asyncio.to_thread(command, host)
                channels[host] = await Channel.open(argv, environ)
            return await channels[host].ask(question, ANSWER)
        except NoAnswer as error:
            silent[host] = error
        except WorldError as error:  # not a host name
            silent[host] = NoAnswer(str(error), 1, str(error))
        return None

    def answers(found: Sequence[Facts | None], hosts: Iterable[str]) -> dict[str, Facts]:
        return {host: facts for host, facts in zip(hosts, found, strict=True) if facts is not None}

    async def both() -> ProbeAnswers:
        async def first_of(host: str) -> Facts | None:
            facts = await ask(host, orders[host])
            if facts is not None:
                answered(host)
            return facts

        try:
            first = answers(await asyncio.gather(*map(first_of, orders)), orders)
            questions = wanted(first)
            second = answers(await asyncio.gather(*map(ask, questions, questions.values())), questions)
            return ProbeAnswers(first, second, silent)
        finally:
            await asyncio.gather(*(channel.close() for channel in channels.values()))

    return asyncio.run(both())
