"""Run `dsft hostfile`: build a hostfile from words such as `node[01-16]:8` or from Slurm's variables, and
print or write it. An existing file with other content is not overwritten without --force."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsft.errors import Problem, SpecError, StorageError
from dsft.generate.hostfile import of_words, render
from dsft.rank.launched import counted
from dsft.rank.slurm import allocation


def hosts_of(
    words: Sequence[str], environ: Mapping[str, str], slots: int | None, *, from_slurm: bool
) -> Mapping[str, int]:
    """Return host -> slots. Raises SpecError where both sources are given, or none, and whatever they
    raise."""
    if from_slurm == bool(words):
        given = f"{' '.join(words)} and --from-slurm" if words else "nothing"
        raise SpecError(
            "These hosts cannot be used.",
            [Problem("hosts", f"{given} was given; give hosts such as node[01-16]:8, or --from-slurm")],
        )
    if not from_slurm:
        return of_words(words, slots)
    found = allocation(environ, slots)
    print(f"slots from {found.source}", file=sys.stderr)
    return found.hosts


def write_hostfile(hosts: Mapping[str, int], out: Path | None, *, force: bool) -> None:
    """Print the hostfile, or write it to `out`. Raises StorageError where `out` cannot be written, or exists
    with other content and force is not set."""
    text = render(hosts)
    if out is None:
        print(text, end="")
        return
    try:
        if out.exists() and not force and out.read_bytes() != text.encode():
            raise StorageError(f"{out} has other content; give another name, or --force to overwrite it.")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}); give another --out.") from error
    processes = sum(hosts.values())
    print(f"wrote {out}: {counted(len(hosts), 'host')}, {counted(processes, 'process')}")
