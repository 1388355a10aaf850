"""Print the doctor's findings, for people or as one JSON object, to standard output, and its progress to
standard error."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from dsft.doctor.links import Link, Network
from dsft.doctor.results import CheckResult, ProbeResults, failures, listed
from dsft.doctor.software import differing, table
from dsft.errors import WorldError, printable

SLOWEST = 12  # directions listed if there are too many hosts for a table


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows one transient line on a terminal, replacing the last one; the line is
    erased at the end. Shows nothing if `quiet`, or if standard error is not a terminal."""

    def show(text: str) -> None:
        if not quiet and sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


def print_findings(
    probed: ProbeResults, found: Sequence[CheckResult], seconds: float, network: Network | None = None
) -> None:
    for finding in found:
        place = f"{finding.check} on {finding.host}" if finding.host else finding.check
        _wrapped(f"{finding.level:<8} ", f"{place}: {finding.value}")
        if finding.level != "pass":
            _wrapped("         why: ", finding.why)
            _wrapped("         do:  ", finding.do)
    different = differing(table(probed))
    if different:
        print()
        _print_table(different)
    for line in ["", *network_lines(network)] if network else ():
        print(printable(line))
    counts = Counter(finding.level for finding in found)
    summary = ", ".join(_counted(counts[level], level) for level in ("failure", "warning"))
    print(f"\n{_counted(len(probed.slots), 'host')} in {seconds:.1f} s: {summary}, {counts['pass']} passed")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _wrapped(begin: str, text: str) -> None:
    text = printable(text)
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 160))
    if not sys.stdout.isatty():  # one line each, for grep
        print(f"{begin}{text}")
        return
    print(textwrap.fill(text, width, initial_indent=begin, subsequent_indent=" " * len(begin)))


def _print_table(different: Mapping[str, Mapping[str, str]]) -> None:
    """Print a row per version and a column per group of hosts with the same versions."""
    hosts = list(next(iter(different.values())))
    groups: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        groups.setdefault(tuple(row.get(host, "") for row in different.values()), []).append(host)
    rows = [["versions that differ", *map(listed, groups.values())]]
    rows += [[name, *(group[index] for group in groups)] for index, name in enumerate(different)]
    for line in _columns(rows):
        print(printable(line))


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def network_lines(network: Network) -> Iterator[str]:
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
            f"{len(network.links)} directions of {len(network.hosts)} hosts: each with two neighbors and "
            f"a random one; the {SLOWEST} slowest"
        )
        for link in sorted(network.links, key=lambda each: each.gbit or 0.0)[:SLOWEST]:
            yield f"{link.sender} → {link.receiver}: {_cell(link)}"
        return
    found = {(link.sender, link.receiver): _cell(link) for link in network.links}
    head = ["Gbit/s (round trip, ms)", *(f"→ {host}" for host in network.hosts)]
    rows = [head]
    rows += [[one, *(found.get((one, other), "") for other in network.hosts)] for one in network.hosts]
    yield from _columns(rows)


def _cell(link: Link) -> str:
    if link.gbit is None or link.round_trip is None:
        return "dead"
    return f"{link.gbit:.3g} ({1e3 * link.round_trip:.3g})"


def as_json(
    probed: ProbeResults, found: Sequence[CheckResult], seconds: float, network: Network | None = None
) -> str:
    """Return the JSON text. versions: package -> host -> version; differing: names of those that differ
    between hosts; network: None if it was not measured."""
    versions = table(probed)
    return json.dumps(
        {
            "name": probed.needs.spec.name,
            "hosts": dict(probed.slots),
            "seconds": round(seconds, 2),
            "exit_code": WorldError.exit_code if failures(found) else 0,
            "findings": [asdict(finding) for finding in found],
            "versions": versions,
            "differing": list(differing(versions)),
            "network": asdict(network) if network else None,
        },
        indent=2,
        ensure_ascii=False,
    )
