"""Measure the network between the hosts: start `dsft.engine.links` on each, measure every link's latency and
bandwidth and an all-reduce, and report slow or dead links. Leaves no process behind.

Only two hosts transfer at a time, one direction after the other, so that no link is measured under the load
of another.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dsft.doctor.hosts import Facts, HostChannels
from dsft.doctor.results import CheckResult, passed
from dsft.rank.route import address_towards, interface_of
from dsft.remote import forwarded, module_command

PROGRAM = "dsft.engine.links"
ALL_PAIRS = 16
"""Number of hosts up to which every pair is measured; above, each host with its two neighbors and a random
one."""
SECONDS = 0.3  # seconds of an all-reduce of one size
TRIES = 3  # measurements of a link that is slow or far at first
START, REACH, PAIR, REDUCE = 60.0, 10.0, 60.0, 180.0
"""Seconds that hosts have to import torch and answer, to connect, to measure both directions of a pair, and
for the all-reduces."""
HALF = 0.5
"""A link slower than this fraction of the others' median is reported; with two hosts, of the expected
speed."""
LEAST_GBIT = 1.0
"""Expected speed of a link in Gbit/s if the interface reports none: the slowest that servers have had for
twenty years. The bf16 gradients of a billion parameters are 2 GB, sent and received: 16 s and more per step
at that speed."""
MOST_GBIT = 10.0
"""Upper limit of the expected speed in Gbit/s: the single TCP stream of the measurement may not fill a faster
interface."""
FAR, FAR_TIMES = 0.005, 5.0
"""A link is far if its round trip exceeds both: seconds that no two hosts of one data center need, and a
multiple of the others' median."""
SIZES = {"gloo": (4, 65_536, 1 << 20, 1 << 24), "nccl": (4, 1 << 20, 1 << 24, 1 << 28)}


@dataclass(frozen=True)
class Link:
    """One direction between two hosts.

    interface   the sender's
    address     the receiver's
    round_trip  seconds
    gbit        10⁹ bits per second
    error       why there is no measurement
    """

    sender: str
    receiver: str
    interface: str | None
    address: str
    round_trip: float | None = None
    gbit: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class AllReduce:
    """Result of an all-reduce of one size. bus_gbit: 2 (n − 1) / n · bytes ÷ seconds in Gbit/s, which does
    not depend on n if the links are the limit (nccl-tests, doc/PERFORMANCE.md)."""

    bytes: int
    seconds: float
    bus_gbit: float


@dataclass(frozen=True)
class Network:
    """The results. sampled: not every pair was measured."""

    hosts: tuple[str, ...]
    links: tuple[Link, ...]
    reduces: tuple[AllReduce, ...]
    backend: str | None
    processes: int
    findings: tuple[CheckResult, ...]
    sampled: bool
    seconds: float = 0.0


def measure(
    hosts: Mapping[str, int],
    *,
    interface: str | None = None,
    environ: Mapping[str, str] | None = None,
    expect_gbit: float | None = None,
    through: Literal["ssh", "srun"] = "ssh",
    progress: Callable[[str], None] = lambda text: None,
) -> Network:
    """Measure the links between the hosts, and an all-reduce.

    hosts        host -> slots
    interface    used on all hosts; None: the one on the route to each host
    environ      variables of the ranks, by default those that `dsft.remote.forwarded` selects here
    expect_gbit  expected Gbit/s of each link, in place of the default
    progress     called with a line about the current measurement
    """
    named = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    variables = named | dict(forwarded(os.environ, None) if environ is None else environ)

    began = time.monotonic()

    async def measured() -> Network:
        async with HostChannels(lambda host: module_command(host, PROGRAM, through), variables) as channels:
            there = await channels.ask({host: {"do": "listen"} for host in hosts}, START)
            own = interface or variables.get("GLOO_SOCKET_IFNAME") or None
            found = await _Measurement(channels, there, own, expect_gbit, progress).all(hosts, variables)
            return replace(found, seconds=time.monotonic() - began)

    return asyncio.run(measured())


@dataclass(frozen=True)
class _Measurement:
    """The measurement on open channels. there: host -> its store's port, interfaces and GPUs, for hosts that
    answer."""

    channels: HostChannels
    there: Mapping[str, Facts]
    interface: str | None
    expect_gbit: float | None
    progress: Callable[[str], None]
    names: Iterator[int] = field(default_factory=itertools.count)

    async def all(self, hosts: Mapping[str, int], variables: Mapping[str, str]) -> Network:
        findings = [unreached(host, str(why)) for host, why in self.channels.silent.items()]
        links = await self._links(pairs_of([host for host in hosts if host in self.there]))
        findings += judged(links, self._expected(links), given=self.expect_gbit is not None)
        reduces: list[AllReduce] = []
        backend, processes = None, 0
        is_whole = len(self.there) == len(hosts) and not any(link.error for link in links)
        if is_whole and sum(hosts.values()) > 1:
            backend, ranks = ranks_of(hosts, {host: self.there[host]["gpus"] for host in hosts}, variables)
            processes = sum(map(len, ranks.values()))
            self.progress(f"all-reduce over {backend}, {processes} processes")
            reduces, finding = await self._all_reduce(ranks, backend, sizes_for(backend, links))
            findings.append(finding)
        return Network(
            tuple(hosts), tuple(links), tuple(reduces), backend, processes, tuple(findings),
            sampled=len(hosts) > ALL_PAIRS,
        )  # fmt: skip

    async def _links(self, pairs: Sequence[tuple[str, str]]) -> list[Link]:
        """Measure both directions of all pairs. A link that would be reported is measured up to TRIES times,
        and its best result counts: another program may have occupied the core."""
        links: dict[tuple[str, str], Link] = {}
        for number, (one, other) in enumerate(pairs, start=1):
            self.progress(f"{one} ⇄ {other}, pair {number} of {len(pairs)}")
            links |= {(link.sender, link.receiver): link for link in await self._pair(one, other)}
        given = self.expect_gbit is not None
        for _ in range(TRIES - 1):
            found = [link for link in links.values() if not link.error]
            expected = self._expected(found)
            bad = (link for link in found if _slow(link, found, expected, given) or _far(link, found))
            for one, other in map(sorted, {_ends(link) for link in bad}):
                for link in await self._pair(one, other):
                    links[link.sender, link.receiver] = _best(links[link.sender, link.receiver], link)
        return list(links.values())

    async def _pair(self, one: str, other: str) -> list[Link]:
        """Measure one's link to the other, and back. First each connects to the other."""
        to, port = {one: other, other: one}, {host: self.there[host]["port"] for host in (one, other)}
        address = {host: _address(self.there[host], self.interface) or host for host in to}
        found = await self._ask(
            {host: {"do": "reach", "address": address[to[host]], "port": port[to[host]]} for host in to},
            REACH,
        )
        interface = {host: found[host].get("interface", self.interface) for host in to}
        errors = {host: found[host]["error"] for host in to if "error" in found[host]}
        if not errors:
            order = {"do": "pair", "name": str(next(self.names)), "address": address[one], "port": port[one]}
            ranked = enumerate(to)
            found = await self._ask(
                {host: {**order, "rank": rank, "peer": address[to[host]]} for rank, host in ranked}, PAIR
            )
            errors = {host: found[host]["error"] for host in to if "error" in found[host]}
        links = [Link(host, to[host], interface[host], address[to[host]]) for host in (one, other)]
        if errors:
            return [replace(link, error=errors.get(link.sender) or errors[link.receiver]) for link in links]
        return [
            replace(link, round_trip=found[link.sender]["round_trip"], gbit=found[link.receiver]["gbit"])
            for link in links
        ]

    async def _ask(self, questions: Mapping[str, Facts], seconds: float) -> dict[str, Facts]:
        answers = await self.channels.ask(questions, seconds)
        silent = self.channels.silent
        return {host: answers.get(host) or {"error": str(silent[host])} for host in questions}

    def _expected(self, links: Sequence[Link]) -> float:
        """Return the expected Gbit/s of a link: the given one, else from the speeds of the interfaces that
        were used."""
        used = (self.there[link.sender]["interfaces"].get(link.interface, {}) for link in links)
        speeds = [each["speed"] / 1000 for each in used if each.get("speed", 0) > 0]
        return self.expect_gbit or (min(*speeds, MOST_GBIT) if speeds else LEAST_GBIT)

    async def _all_reduce(
        self, ranks: Mapping[str, Sequence[int]], backend: str, sizes: Sequence[int]
    ) -> tuple[list[AllReduce], CheckResult]:
        size, hosts = sum(map(len, ranks.values())), list(ranks)
        first = hosts[0]
        place = {host: _address(self.there[host], self.interface) or host for host in hosts}
        if len(hosts) == 1:
            place[first] = "127.0.0.1"
        order = {
            "do": "all_reduce", "name": str(next(self.names)), "world_size": size, "backend": backend,
            "address": place[first], "port": self.there[first]["port"], "sizes": sizes, "seconds": SECONDS,
        }  # fmt: skip
        questions = {  # peer: another host, since a host may resolve its own name to 127.0.1.1
            host: {**order, "ranks": list(own), "peer": place[first if host != first else hosts[-1]]}
            for host, own in ranks.items()
        }
        answers = await self.channels.ask(questions, REDUCE)
        if len(answers) < len(ranks):
            reasons = [f"{host}: {why}" for host, why in self.channels.silent.items()]
            return [], CheckResult(
                "all-reduce", None, "failure",
                f"{backend}, {size} processes on {len(ranks)} hosts: " + "; ".join(reasons),
                "a run's ranks would fail in the same way",
                "check cluster.interface and the backend's variables (NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME)",
            )  # fmt: skip
        found = [
            AllReduce(bytes_, seconds, 2 * (size - 1) / size * bytes_ * 8 / seconds / 1e9)
            for bytes_, seconds in answers[first]["reduces"]
        ]
        return found, passed(
            "all-reduce", None,
            f"{backend}, {size} processes: {1e6 * found[0].seconds:.0f} µs for {found[0].bytes} bytes, "
            f"{found[-1].bus_gbit:.3g} Gbit/s on the bus for {found[-1].bytes / 2**20:.0f} MiB",
        )  # fmt: skip


def pairs_of(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return all pairs; above ALL_PAIRS hosts, a ring and one random partner per host, new ones at each
    call."""
    if len(hosts) <= ALL_PAIRS:
        return list(itertools.combinations(hosts, 2))
    ring = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return ring + [(host, random.choice([h for h in hosts if h != host])) for host in hosts]  # noqa: S311


def ranks_of(
    hosts: Mapping[str, int], gpus: Mapping[str, int], environ: Mapping[str, str]
) -> tuple[str, dict[str, list[int]]]:
    """Return the backend and each host's ranks: one per GPU if every slot has a GPU; else one per host, or
    all slots of a single host."""
    on_gpu = environ.get("DS_ACCELERATOR") != "cpu" and all(
        gpus[host] >= slots for host, slots in hosts.items()
    )
    numbers = itertools.count()
    each = {host: slots if on_gpu or len(hosts) == 1 else 1 for host, slots in hosts.items()}
    return "nccl" if on_gpu else "gloo", {h: list(itertools.islice(numbers, n)) for h, n in each.items()}


def sizes_for(backend: str, links: Sequence[Link]) -> list[int]:
    """Return the all-reduce sizes in bytes: those that the slowest link transfers in about a third of a
    second."""
    slowest = min((link.gbit for link in links if link.gbit), default=math.inf)
    return [size for number, size in enumerate(SIZES[backend]) if not number or size * 48e-9 < slowest]


def unreached(host: str, reason: str) -> CheckResult:
    """Return the finding for a host on which no program could be started from here."""
    here, own = socket.gethostname(), address_towards(host)
    through = f" ({interface_of(own)})" if own and interface_of(own) else ""
    return CheckResult(
        "links", host, "failure",
        f"{here}{through} → {host}: no program could be started there ({reason})",
        "no rank could be started there either, and none of its links was measured",
        "check that it is up and can be reached from here, and see the finding of `reach`",
    )  # fmt: skip


def judged(links: Sequence[Link], expected: float, *, given: bool) -> Iterator[CheckResult]:
    """Yield a finding for each dead, slow or far direction; one pass for all if there is none."""
    if not links:
        yield passed("links", None, "fewer than two hosts answer, so there is no link to measure")
    bad = False
    for link in links:
        found = _dead(link) if link.error else _slow(link, links, expected, given) or _far(link, links)
        if found:
            bad = True
            yield found
    speeds = [link.gbit for link in links if link.gbit is not None]
    if not bad and speeds:
        trips = [link.round_trip for link in links if link.round_trip is not None]
        yield passed(
            "links", None,
            f"{len(links)} directions, {min(speeds):.3g} to {max(speeds):.3g} Gbit/s, round trips of "
            f"{1e3 * min(trips):.3g} to {1e3 * max(trips):.3g} ms",
        )  # fmt: skip


def _dead(link: Link) -> CheckResult:
    return CheckResult(
        "links", link.sender, "failure",
        f"{_named(link)}: no transfer, {link.error}",
        "the ranks of these two hosts would not find each other, and all would wait until a timeout",
        "check that cable or port, the firewall (ports above 1023 must be open between the hosts), the "
        "routes (`ip route get`), and cluster.interface",
    )  # fmt: skip


def _slow(link: Link, links: Sequence[Link], expected: float, given: bool) -> CheckResult | None:
    assert link.gbit is not None
    least, than = _least(link, links, expected, given)
    if link.gbit >= least:
        return None
    return CheckResult(
        "links", link.sender, "warning",
        f"{_named(link)}: {link.gbit:.3g} Gbit/s, less than {than}",
        "each step waits for its slowest link, so all hosts train at the pace of this one",
        "check the link's speed (`ethtool`), errors (`ip -s link`) and switch port, other traffic, and "
        "whether cluster.interface is the fast one; --expect-gbit sets the expected speed",
    )  # fmt: skip


def _far(link: Link, links: Sequence[Link]) -> CheckResult | None:
    others = [o.round_trip for o in links if o.round_trip is not None and _ends(o) != _ends(link)]
    assert link.round_trip is not None
    if link.round_trip < FAR or (others and link.round_trip < FAR_TIMES * statistics.median(others)):
        return None
    return CheckResult(
        "links", link.sender, "warning",
        f"{_named(link)}: a round trip of {1e3 * link.round_trip:.3g} ms",
        "a step has hundreds of small exchanges under ZeRO 3, and each takes at least half of that",
        "check whether both are in one place, and for a tunnel, a proxy or a busy switch between them",
    )  # fmt: skip


def _least(link: Link, links: Sequence[Link], expected: float, given: bool) -> tuple[float, str]:
    """Return the least acceptable Gbit/s, and its description."""
    if given:
        return expected, f"the {expected:g} expected"
    others = sorted(o.gbit for o in links if o.gbit is not None and _ends(o) != _ends(link))
    if len(others) == 4:  # three hosts: if one of them is slow, so is half of these links
        others = others[2:]
    if others:
        median = statistics.median(others)
        return HALF * median, f"half of the other links' {median:.3g}"
    return HALF * expected, f"half of the expected {expected:g}"


def _ends(link: Link) -> frozenset[str]:
    return frozenset((link.sender, link.receiver))


def _named(link: Link) -> str:
    through = f" ({link.interface})" if link.interface else ""
    return f"{link.sender}{through} → {link.receiver} ({link.address})"


def _best(link: Link, other: Link) -> Link:
    if link.gbit is None or link.round_trip is None or other.gbit is None or other.round_trip is None:
        return link
    return replace(link, gbit=max(link.gbit, other.gbit), round_trip=min(link.round_trip, other.round_trip))


def _address(there: Facts, interface: str | None) -> str | None:
    """Return the address of the interface on that host, IPv4 first; None without one."""
    addresses = there["interfaces"].get(interface, {}).get("addresses", ())
    return next(iter(sorted(addresses, key=lambda address: ":" in address)), None)
