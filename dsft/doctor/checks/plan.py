"""What can be told on this machine alone: the hostfile, the programs of the launcher, and whether the hosts
have the folder that the run starts in. Reads the hostfile and PATH."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsft.doctor.finding import Finding, passed
from dsft.doctor.seen import Seen
from dsft.errors import SpecError
from dsft.plan.hostfile import parse


def folders(seen: Seen) -> Iterator[Finding]:
    for host, facts in seen.visits.first.items():
        if facts.get("folder") is not None:
            yield Finding(
                "folder", host, "failure", f"{os.getcwd()} cannot be entered ({facts['folder']})",
                "the run starts there on every host", "put it there at the same path, or on a shared disk",
            )  # fmt: skip


def hostfile(seen: Seen) -> Iterator[Finding]:
    """`hostfiles/NAME`, where it is there, says what the spec says."""
    cluster, file = seen.needs.spec.cluster, Path("hostfiles", seen.needs.spec.name)
    if cluster is None or cluster.launcher not in {"dsft", "deepspeed"} or not file.is_file():
        return
    try:
        hosts = parse(file.read_text(encoding="utf-8"), str(file))
    except (SpecError, OSError, UnicodeDecodeError) as error:
        why = error.problems[0] if isinstance(error, SpecError) else error
        yield Finding(
            "hostfile", None, "warning", f"{file} cannot be used ({why})", "deepspeed --hostfile would fail",
            "write it again: dsft generate SPEC",
        )  # fmt: skip
        return
    if hosts != cluster.hosts:
        yield Finding(
            "hostfile", None, "warning", f"{file} has other hosts or slots than cluster.hosts",
            "a run that is started with it stops in its first second", "write it again: dsft generate SPEC",
        )  # fmt: skip
    else:
        yield passed("hostfile", None, f"{file} has the spec's hosts")


def programs(seen: Seen) -> Iterator[Finding]:
    """Of the launcher, on this machine."""
    cluster = seen.needs.spec.cluster
    if cluster is None or len(cluster.hosts) < 2:
        return
    program = {"dsft": "pdsh", "deepspeed": "pdsh", "slurm": "srun"}.get(cluster.launcher)
    if program is None:
        return
    if shutil.which(program) is None:
        is_pdsh = program == "pdsh"
        yield Finding(
            "programs", None, "warning", f"{program} is not on PATH here",
            f"{'deepspeed --hostfile' if is_pdsh else 'cluster.launcher slurm'} starts processes with it",
            f"install {program}" + (", or start with dsft launch, which needs none" if is_pdsh else ""),
        )  # fmt: skip
    else:
        yield passed("programs", None, f"{program} is here")
