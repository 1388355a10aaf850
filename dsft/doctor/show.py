"""Print the doctor's findings, for people or as one JSON object, to standard output, and its progress to
standard error."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from dsft.doctor.links import Network, network_lines
from dsft.doctor.results import CheckResult, ProbeResults, failures
from dsft.doctor.software import differing, table
from dsft.errors import WorldError, printable
from dsft.rank.launched import counted


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
    for line in ["", *network_lines(network)] if network else ():
        print(printable(line))
    counts = Counter(finding.level for finding in found)
    summary = ", ".join(counted(counts[level], level) for level in ("failure", "warning"))
    print(f"\n{counted(len(probed.slots), 'host')} in {seconds:.1f} s: {summary}, {counts['pass']} passed")


def _wrapped(begin: str, text: str) -> None:
    text = printable(text)
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 160))
    if not sys.stdout.isatty():  # one line each, for grep
        print(f"{begin}{text}")
        return
    print(textwrap.fill(text, width, initial_indent=begin, subsequent_indent=" " * len(begin)))


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
