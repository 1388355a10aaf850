"""How fast the hosts reach each other: takes their names, starts programs on them (`dsft.doctor.link`, then
`dsft.engine.links`), gives every link's latency and bandwidth, an all-reduce's, and findings that name a slow
or dead link. Leaves no process behind.

Transfers are between two hosts at a time, one direction after the other, so that no link is measured under
the load of another. The all-reduce is the real backend's, with one process a host on CPUs and else one a GPU.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import random
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import psutil

from dsft.doctor.finding import Finding, passed
from dsft.remote import ROOT, module_command

LINK, BACKEND = "dsft.doctor.link", "dsft.engine.links"
Command = Callable[[str, str], Sequence[str]]
"""Host and module -> what starts it there."""

ALL_PAIRS = 16
"""Hosts up to which every pair is measured; above, each with its two neighbours and one drawn."""
SECONDS = 0.3  # of a transfer, one direction
TRIES = 3  # of a link that is a little too slow at first: another program may have had the core
START, BACKEND_START = 15.0, 60.0  # seconds for a host to answer first, and for all to have imported torch
HALF = 0.5
"""A link slower than this part of the others' median is named; with two hosts, of what is expected of it."""
LEAST_GBIT = 1.0
"""Expected of a link where nothing says more: the slowest that servers have had for twenty years. The bf16
gradients of a billion parameters are 2 GB, sent and received: 16 s and more a step at that speed."""
MOST_GBIT = 10.0
"""Expected at most of a faster interface: the one TCP stream of the measurement may not fill more."""
FAR, FAR_TIMES = 0.005, 5.0
"""A round trip in seconds that no two hosts of one data centre need, and times the others' median."""
SIZES = {"gloo": (4, 65_536, 1 << 20, 1 << 24), "nccl": (4, 1 << 20, 1 << 24, 1 << 28)}
FORWARDED = ("NCCL_", "GLOO_", "UCX_", "TORCH_NCCL_")
FORWARDED_TOO = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Link:
    """One direction. interface: the sender's; address: the receiver's; round_trip in seconds; gbit: 10⁹ bits
    a second. error: why there are none."""

    sender: str
    receiver: str
    interface: str | None
    address: str
    round_trip: float | None = None
    gbit: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class AllReduce:
    """bus_gbit: 2 (n − 1) / n · bytes ÷ seconds, which does not depend on n where the links are what limits
    (nccl-tests, doc/PERFORMANCE.md)."""

    bytes: int
    seconds: float
    bus_gbit: float


@dataclass(frozen=True)
class Network:
    """sampled: not every pair was measured."""

    hosts: tuple[str, ...]
    links: tuple[Link, ...]
    reduces: tuple[AllReduce, ...]
    backend: str | None
    processes: int
    findings: tuple[Finding, ...]
    sampled: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    hosts: Mapping[str, int],
    *,
    interface: str | None = None,
    environ: Mapping[str, str] | None = None,
    expect_gbit: float | None = None,
    command: Command = module_command,
    told: Callable[[str], None] = lambda text: None,
) -> Network:
    """hosts: host -> slots; interface: that of all hosts, None: the one that the way to a host takes;
    environ: what the ranks would get beside this process's NCCL_ and GLOO_; told: what is measured now."""
    began = time.monotonic()
    names = list(hosts)
    variables = _environ(environ or {}, interface)
    interface = interface or variables.get("GLOO_SOCKET_IFNAME") or None
    with ExitStack() as started:
        remotes = {host: started.enter_context(Remote(command(host, LINK))) for host in names}
        there = _listening(remotes)
        findings = list(_silent(remotes, there))
        pairs = pairs_of([host for host in names if host in there])
        links: list[Link] = []
        for number, (one, other) in enumerate(pairs, start=1):
            told(f"{one} ⇄ {other}, pair {number} of {len(pairs)}")
            for sender, receiver in ((one, other), (other, one)):
                links.append(_transfer(remotes, there, sender, receiver, interface))
        expected = expect_gbit or _expected(there, links)

        def again(link: Link) -> Link:
            return _transfer(remotes, there, link.sender, link.receiver, interface)

        links = [_best(link, again, links, expected, expect_gbit is not None) for link in links]
        findings += judged(links, expected, given=expect_gbit is not None)
        first = names[0] if names and names[0] in there else None
        port = remotes[first].ask({"do": "free_port"}, START).get("port", 0) if first else 0
    whole = bool(names) and len(there) == len(names) and not any(link.error for link in links)
    reduces: list[AllReduce] = []
    backend, processes = None, 0
    if whole and (len(names) > 1 or max(hosts.values()) > 1):
        backend, ranks = ranks_of(hosts, {host: there[host]["gpus"] for host in names}, variables)
        processes = sum(map(len, ranks.values()))
        told(f"all-reduce over {backend}, {processes} processes")
        address = _address(there[names[0]], interface) or (names[0] if len(names) > 1 else "127.0.0.1")
        sizes = sizes_for(backend, links)
        reduces, finding = _all_reduce(ranks, backend, sizes, (address, port), variables, command)
        findings.append(finding)
    return Network(
        tuple(names), tuple(links), tuple(reduces), backend, processes, tuple(findings),
        sampled=len(names) > ALL_PAIRS, seconds=time.monotonic() - began,
    )  # fmt: skip


def pairs_of(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """All; above ALL_PAIRS hosts a ring and as many pairs again, drawn anew at each call."""
    if len(hosts) <= ALL_PAIRS:
        return list(itertools.combinations(hosts, 2))
    ring = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return ring + [(host, random.choice([h for h in hosts if h != host])) for host in hosts]  # noqa: S311


def ranks_of(
    hosts: Mapping[str, int], gpus: Mapping[str, int], environ: Mapping[str, str]
) -> tuple[str, dict[str, list[int]]]:
    """The backend, and each host's ranks: one a GPU where every slot has one; else one a host, and all slots
    of a host that is alone."""
    on_gpu = environ.get("DS_ACCELERATOR") != "cpu" and all(
        gpus[host] >= slots for host, slots in hosts.items()
    )
    numbers = itertools.count()
    each = {host: slots if on_gpu or len(hosts) == 1 else 1 for host, slots in hosts.items()}
    return "nccl" if on_gpu else "gloo", {h: list(itertools.islice(numbers, n)) for h, n in each.items()}


def sizes_for(backend: str, links: Sequence[Link]) -> list[int]:
    """Bytes of the all-reduces: those that the slowest link lets through in a third of a second."""
    slowest = min((link.gbit for link in links if link.gbit), default=math.inf)
    return [size for number, size in enumerate(SIZES[backend]) if not number or size * 48e-9 < slowest]


def unreached(host: str, reason: str) -> Finding:
    """A host on which nothing could be started from here."""
    here = socket.gethostname()
    return Finding(
        "links", host, "failure",
        f"{here}{_way_to(host)} → {host}: no program could be started there ({reason})",
        "no rank could be started there either, and none of its links was measured",
        "see whether it is up, whether the way from here to there is, and what `reach` says of it",
    )  # fmt: skip


def _way_to(host: str) -> str:
    """` (interface)` through which this machine would send to the host; nothing where it cannot be told. No
    packet is sent: a datagram socket that is connected knows its own address."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == own for address in addresses):
                return f" ({name})"
    return ""


def judged(links: Sequence[Link], expected: float, *, given: bool) -> Iterator[Finding]:
    """A finding for each dead or slow direction; one for all where there is none."""
    if not links:
        yield passed("links", None, "no two hosts that answer, so no link to measure")
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


def _dead(link: Link) -> Finding:
    return Finding(
        "links", link.sender, "failure",
        f"{_named(link)}: no transfer, {link.error}",
        "the ranks of these two hosts would not find each other, and all would wait until a timeout",
        "look at that cable or port, at a firewall (ports above 1023 must be open between the hosts), at "
        "routes (`ip route get`), and at cluster.interface",
    )  # fmt: skip


def _slow(link: Link, links: Sequence[Link], expected: float, given: bool) -> Finding | None:
    assert link.gbit is not None
    least, than = _least(link, links, expected, given)
    if link.gbit >= least:
        return None
    return Finding(
        "links", link.sender, "warning",
        f"{_named(link)}: {link.gbit:.3g} Gbit/s, less than {than}",
        "each step waits for its slowest link, so all hosts train at the pace of this one",
        "look at the link's speed (`ethtool`), errors (`ip -s link`) and switch port, at other traffic, and "
        "whether cluster.interface is the fast one; --expect-gbit says what to expect",
    )  # fmt: skip


def _far(link: Link, links: Sequence[Link]) -> Finding | None:
    others = [o.round_trip for o in links if o.round_trip is not None and _ends(o) != _ends(link)]
    assert link.round_trip is not None
    if link.round_trip < FAR or (others and link.round_trip < FAR_TIMES * statistics.median(others)):
        return None
    return Finding(
        "links", link.sender, "warning",
        f"{_named(link)}: a round trip of {1e3 * link.round_trip:.3g} ms",
        "a step has hundreds of small exchanges under ZeRO 3, and each takes at least half of that",
        "look whether both are in one place, and for a tunnel, a proxy or a busy switch between them",
    )  # fmt: skip


def _least(link: Link, links: Sequence[Link], expected: float, given: bool) -> tuple[float, str]:
    """In Gbit/s, and in words."""
    if given:
        return expected, f"the {expected:g} expected"
    others = sorted(o.gbit for o in links if o.gbit is not None and _ends(o) != _ends(link))
    if len(others) == 4:  # three hosts: where one is slow, so are half of the others
        others = others[2:]
    if others:
        median = statistics.median(others)
        return HALF * median, f"half of the other links' {median:.3g}"
    return HALF * expected, f"half of the {expected:g} that is expected of it"


def _ends(link: Link) -> frozenset[str]:
    return frozenset((link.sender, link.receiver))


def _named(link: Link) -> str:
    through = f" ({link.interface})" if link.interface else ""
    return f"{link.sender}{through} → {link.receiver} ({link.address})"


def _best(
    link: Link, again: Callable[[Link], Link], links: Sequence[Link], expected: float, given: bool
) -> Link:
    """Of TRIES, where the first was slow, but not by far."""
    for _ in range(TRIES - 1):
        least = _least(link, links, expected, given)[0]
        if link.gbit is None or not least / 4 < link.gbit < least:
            break
        other = again(link)
        if other.gbit is not None and other.gbit > link.gbit:
            link = other
    return link


def _expected(there: Mapping[str, Mapping[str, Any]], links: Sequence[Link]) -> float:
    """Gbit/s, from what the interfaces that were used say of themselves."""
    told = [there[link.sender]["interfaces"].get(link.interface, {}).get("mbit", 0) / 1000 for link in links]
    known = [speed for speed in told if speed > 0]
    return min(*known, MOST_GBIT) if known else LEAST_GBIT


def _environ(environ: Mapping[str, str], interface: str | None) -> dict[str, str]:
    own = {
        name: value for name, value in os.environ.items()
        if name.startswith(FORWARDED) or name in FORWARDED_TOO
    }  # fmt: skip
    named = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    return own | named | dict(environ)


def _listening(remotes: Mapping[str, Remote]) -> dict[str, dict[str, Any]]:
    """Host -> what it said when it began to listen; without those that said nothing. All at once."""
    for remote in remotes.values():
        remote.tell({"do": "listen"})
    until = time.monotonic() + START
    found = {}
    for host, remote in remotes.items():
        answer = remote.hear(max(until - time.monotonic(), 0.1))
        if "error" not in answer:
            found[host] = answer
    return found


def _silent(remotes: Mapping[str, Remote], there: Mapping[str, Any]) -> Iterator[Finding]:
    for host, remote in remotes.items():
        if host not in there:
            yield unreached(host, remote.reason())


def _transfer(
    remotes: Mapping[str, Remote], there: Mapping[str, Mapping[str, Any]], sender: str, receiver: str,
    interface: str | None,
) -> Link:  # fmt: skip
    address = _address(there[receiver], interface) or receiver
    order = {"do": "send", "address": address, "port": there[receiver]["port"], "seconds": SECONDS}
    sent = remotes[sender].ask(order, 15.0)
    own = sent.get("sender")
    through = next((n for n, i in there[sender]["interfaces"].items() if own in i["addresses"]), interface)
    place = (sender, receiver, through, address)
    if "error" in sent:
        return Link(*place, error=sent["error"])
    received = remotes[receiver].ask({"do": "received"}, 10.0)
    if "error" in received or not received["bytes"]:
        return Link(*place, error=received.get("error", "a connection, but no data arrived"))
    return Link(*place, sent["round_trip"], received["bytes"] * 8 / received["seconds"] / 1e9)


def _address(there: Mapping[str, Any], interface: str | None) -> str | None:
    """Of the interface on that host, IPv4 first."""
    addresses = there["interfaces"].get(interface, {}).get("addresses", ())
    return next(iter(sorted(addresses, key=lambda address: ":" in address)), None)


def _all_reduce(
    ranks: Mapping[str, Sequence[int]], backend: str, sizes: Sequence[int], rendezvous: tuple[str, int],
    environ: Mapping[str, str], command: Command,
) -> tuple[list[AllReduce], Finding]:  # fmt: skip
    size = sum(map(len, ranks.values()))
    order = {
        "world_size": size, "address": rendezvous[0], "port": rendezvous[1], "backend": backend,
        "environ": environ, "sizes": sizes, "seconds": SECONDS,
    }  # fmt: skip
    found: list[AllReduce] = []
    wanted = len(sizes)
    with ExitStack() as started:
        remotes = [started.enter_context(Remote(command(host, BACKEND))) for host in ranks]
        for remote, own in zip(remotes, ranks.values(), strict=True):
            remote.tell(order | {"ranks": list(own)})
        answer = remotes[0].hear(BACKEND_START)
        while "error" not in answer:
            if "bytes" in answer:
                bits = 2 * (size - 1) / size * answer["bytes"] * 8
                found.append(AllReduce(answer["bytes"], answer["seconds"], bits / answer["seconds"] / 1e9))
                if len(found) == wanted:
                    break
            answer = remotes[0].hear(BACKEND_START)
        if len(found) < wanted:
            reasons = [
                f"{host}: {r}" for host, remote in zip(ranks, remotes, strict=True) if (r := remote.reason())
            ]
            return found, Finding(
                "all-reduce", None, "failure",
                f"{backend}, {size} processes on {len(ranks)} hosts: " + "; ".join(reasons),
                "a run's ranks would come no further",
                "look at cluster.interface and the backend's variables (NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME)",
            )  # fmt: skip
    last = found[-1]
    return found, passed(
        "all-reduce", None,
        f"{backend}, {size} processes: {1e6 * found[0].seconds:.0f} µs for {found[0].bytes} bytes, "
        f"{last.bus_gbit:.3g} Gbit/s on the bus for {last.bytes / 2**20:.0f} MiB",
    )  # fmt: skip


class Remote:
    """A program that takes JSON lines and gives JSON lines; killed at the end."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._late = False

    def __enter__(self) -> Remote:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()  # its program ends with it, on this host and on others
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._listening.join(1.0)
        self._process.stdout.close()
        self._errors.close()

    def tell(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # `hear` finds that it has ended
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any]:
        """Its next answer; `error` where there is none in this time: later ones are lost then."""
        if self._late:
            return {"error": "no answer"}
        try:
            return self._heard.get(timeout=seconds)
        except queue.Empty:
            self._late = True
            return {"error": f"no answer within {seconds:.0f} s"}

    def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        self.tell(order)
        return self.hear(seconds)

    def reason(self) -> str:
        """The last thing that it said on its standard error, or how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        code = self._process.poll()
        return lines[-1].strip()[:300] if lines else "no answer" if code is None else f"exit code {code}"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # a banner of a login shell is no answer
                answer = json.loads(line)
                if isinstance(answer, dict):
                    self._heard.put(answer)
        self._heard.put({"error": "it has ended"})
