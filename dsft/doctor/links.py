"""Judge what `dsft.engine.links` has measured between hosts: report slow and far links, and format the
figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.doctor.results import CheckResult, passed

HALF = 0.5  # a link slower than this fraction of the fastest one is reported
FAR = 0.005
"""Seconds of a message of 4 bytes above which a link is reported: no two hosts of one data center need
them."""
TABLE = 16  # hosts up to which all links are printed, as a table
SLOWEST = 12  # links printed above that


@dataclass(frozen=True)
class Link:
    """One direction between two hosts. seconds: of a message of 4 bytes; gbit: 10⁹ bits per second."""

    sender: str
    receiver: str
    seconds: float
    gbit: float


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of one size. bus_gbit: 2 (n − 1) / n · bytes ÷ seconds in Gbit/s, which does not depend
    on n if the links are the limit (nccl-tests, doc/PERFORMANCE.md)."""

    bytes: int
    seconds: float
    bus_gbit: float


@dataclass(frozen=True)
class Network:
    hosts: tuple[str, ...]
    links: tuple[Link, ...]
    reduces: tuple[AllReduce, ...]
    backend: str
    processes: int


def network_of(hosts: Sequence[str], measured: Mapping[str, Any]) -> Network:
    size = measured["processes"]
    reduces = (
        AllReduce(count, seconds, 2 * (size - 1) / size * count * 8e-9 / seconds)
        for count, seconds in measured["reduces"]
    )
    links = (Link(hosts[sender], hosts[receiver], *rest) for sender, receiver, *rest in measured["links"])
    return Network(tuple(hosts), tuple(links), tuple(reduces), measured["backend"], size)


def judged(network: Network, expect_gbit: float | None) -> Iterator[CheckResult]:
    """Yield a warning for each slow or far direction, one pass for all if there is none, and the all-reduce.
    expect_gbit: least Gbit/s of a link, in place of HALF of the fastest one's."""
    speeds, trips = [link.gbit for link in network.links], [link.seconds for link in network.links]
    least = expect_gbit or HALF * max(speeds, default=0)
    bad = False
    for link in network.links:
        what, why, do = "", "", ""
        if link.gbit < least:
            what = f"{link.gbit:.3g} Gbit/s, less than " + (
                f"the {least:g} expected" if expect_gbit else f"half of the fastest link's {least / HALF:.3g}"
            )
            why = "each step waits for its slowest link, so all hosts train at the pace of this one"
            do = (
                "check the link's speed (`ethtool`), errors (`ip -s link`) and switch port, other traffic, "
                "and whether cluster.interface is the fast one"
            )
        elif link.seconds > FAR:
            what = f"{1e3 * link.seconds:.3g} ms for a message of 4 bytes"
            why = "a step has hundreds of small exchanges under ZeRO 3, and each takes as long"
            do = "check whether both are in one place, and for a tunnel, a proxy or a busy switch between"
        if what:
            bad = True
            value = f"{link.sender} → {link.receiver}: {what}"
            yield CheckResult("links", link.sender, "warning", value, why, do)
    if speeds and not bad:
        yield passed(
            "links", None, f"{len(speeds)} directions, {min(speeds):.3g} to {max(speeds):.3g} Gbit/s, "
            f"{1e3 * min(trips):.3g} to {1e3 * max(trips):.3g} ms for a message",
        )  # fmt: skip
    small, large = network.reduces[0], network.reduces[-1]
    yield passed(
        "all-reduce", None,
        f"{network.backend}, {network.processes} processes: {1e6 * small.seconds:.0f} µs for {small.bytes} "
        f"bytes, {large.bus_gbit:.3g} Gbit/s on the bus for {large.bytes / 2**20:.3g} MiB",
    )  # fmt: skip


def network_lines(network: Network) -> Iterator[str]:
    """Yield the lines of a table of links, and one of all-reduces."""
    cells = {
        (link.sender, link.receiver): f"{link.gbit:.3g} ({1e3 * link.seconds:.3g})" for link in network.links
    }
    if len(network.hosts) > TABLE:
        yield f"Gbit/s (ms for 4 bytes), the {SLOWEST} slowest of {len(cells)} directions"
        for link in sorted(network.links, key=lambda each: each.gbit)[:SLOWEST]:
            yield f"{link.sender} → {link.receiver}: {cells[link.sender, link.receiver]}"
    elif cells:
        rows = [["Gbit/s (ms for 4 bytes)", *(f"→ {host}" for host in network.hosts)]]
        rows += [[one, *(cells.get((one, other), "") for other in network.hosts)] for one in network.hosts]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield f"all-reduce over {network.backend}, {network.processes} processes"
    yield f"{'bytes':>12}  {'time':>10}  bus Gbit/s"
    for each in network.reduces:
        yield f"{each.bytes:>12,}  {1e6 * each.seconds:>7,.0f} µs  {each.bus_gbit:>10.3g}"
