"""How `dsft doctor --network` looks on a terminal: takes a `Network`, gives lines."""

from __future__ import annotations

from collections.abc import Iterator

from dsft.doctor.network import Link, Network

SLOWEST = 12  # directions that are listed where there are too many hosts for a table


def lines(network: Network) -> Iterator[str]:
    yield from _links(network)
    if network.reduces:
        yield ""
        yield f"all-reduce over {network.backend}, {network.processes} processes"
        yield f"{'bytes':>12}  {'time':>10}  bus Gbit/s"
        for each in network.reduces:
            yield f"{each.bytes:>12,}  {1e6 * each.seconds:>7,.0f} µs  {each.bus_gbit:>10.3g}"


def _links(network: Network) -> Iterator[str]:
    if not network.links:
        return
    if network.sampled:
        yield (
            f"{len(network.links)} directions of {len(network.hosts)} hosts: each with two neighbours and "
            f"one drawn; the {SLOWEST} slowest"
        )
        for link in sorted(network.links, key=lambda each: each.gbit or 0.0)[:SLOWEST]:
            yield f"{link.sender} → {link.receiver}: {_cell(link)}"
        return
    found = {(link.sender, link.receiver): _cell(link) for link in network.links}
    head = ["Gbit/s (round trip, ms)", *(f"→ {host}" for host in network.hosts)]
    rows = [head]
    rows += [[one, *(found.get((one, other), "") for other in network.hosts)] for one in network.hosts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cell(link: Link) -> str:
    if link.gbit is None or link.round_trip is None:
        return "dead"
    return f"{link.gbit:.3g} ({1e3 * link.round_trip:.3g})"
