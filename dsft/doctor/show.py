"""What the doctor prints: findings for people, or one JSON object for programs. Writes standard output, and
while it waits standard error."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType

from dsft.doctor.checks.software import differing, table
from dsft.doctor.finding import Finding, failures
from dsft.doctor.network import Network
from dsft.doctor.seen import Seen, listed
from dsft.doctor.show_network import lines as network_lines
from dsft.errors import WorldError, plain


class Progress:
    """On a terminal one line that changes, and is gone at the end; elsewhere nothing, as all is said in
    seconds."""

    def __init__(self, hosts: Sequence[str], *, quiet: bool) -> None:
        self._waiting = list(hosts)
        self._shows = not quiet and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def answered(self, host: str) -> None:
        self._waiting.remove(host)
        self._show()

    def doing(self, text: str) -> None:
        if self._shows:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def _show(self) -> None:
        if self._shows:
            text = f"waiting for {listed(self._waiting)} …" if self._waiting else "the answers are compared …"
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


def print_findings(
    seen: Seen, found: Sequence[Finding], seconds: float, network: Network | None = None
) -> None:
    for finding in found:
        place = f"{finding.check} on {finding.host}" if finding.host else finding.check
        _wrapped(f"{finding.level:<8} ", f"{place}: {finding.value}")
        if finding.level != "pass":
            _wrapped("         why: ", finding.why)
            _wrapped("         do:  ", finding.do)
    different = differing(table(seen))
    if different:
        print()
        _print_table(different)
    for line in ["", *network_lines(network)] if network else ():
        print(plain(line))
    counts = Counter(finding.level for finding in found)
    told = ", ".join(_counted(counts[level], level) for level in ("failure", "warning"))
    print(f"\n{_counted(len(seen.slots), 'host')} in {seconds:.1f} s: {told}, {counts['pass']} passed")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _wrapped(begin: str, text: str) -> None:
    text = plain(text)
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 160))
    if not sys.stdout.isatty():  # a line each, for grep
        print(f"{begin}{text}")
        return
    print(textwrap.fill(text, width, initial_indent=begin, subsequent_indent=" " * len(begin)))


def _print_table(different: Mapping[str, Mapping[str, str]]) -> None:
    """A row a version, a column a host; hosts of the same versions share a column."""
    hosts = list(next(iter(different.values())))
    groups: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        groups.setdefault(tuple(row.get(host, "") for row in different.values()), []).append(host)
    rows = [["versions that differ", *map(listed, groups.values())]]
    rows += [[name, *(group[index] for group in groups)] for index, name in enumerate(different)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(plain(line.rstrip()))


def as_json(seen: Seen, found: Sequence[Finding], seconds: float, network: Network | None = None) -> str:
    """versions: what -> host -> version; differing: those of them that are not the same everywhere; network:
    None where it was not measured."""
    versions = table(seen)
    return json.dumps(
        {
            "name": seen.needs.spec.name,
            "hosts": dict(seen.slots),
            "seconds": round(seconds, 2),
            "exit_code": WorldError.exit_code if failures(found) else 0,
            "findings": [finding.as_json() for finding in found],
            "versions": versions,
            "differing": list(differing(versions)),
            "network": network.as_json() if network else None,
        },
        indent=2,
        ensure_ascii=False,
    )
