"""Check the limits of open files and locked memory: `look` reads those of this process, which ranks share if
they are started the same way; `check` compares them with what a run needs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.doctor.finding import CheckResult, gib, passed
from dsft.system.disk import may_lock_all

if TYPE_CHECKING:
    from dsft.doctor.finding import ProbeResults

INFINIBAND = Path("/sys/class/infiniband")
FILES_OF_RANK = 8
"""Sockets that a rank opens to each other rank, over all process groups, with some in reserve."""
FILES = 512  # open files of a rank for data, libraries, logs


def look() -> dict[str, Any]:
    """Return the limits: files [soft, hard], locked in bytes, each None if unlimited; and the InfiniBand
    cards."""
    files, locked = (resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    cards = sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return {
        "files": [_number(limit) for limit in files],
        "locked": None if may_lock_all() else _number(locked[0]),
        "infiniband": cards,
    }


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def check(seen: ProbeResults) -> Iterator[CheckResult]:
    world = sum(count or 1 for count in seen.slots.values())
    for host, part in seen.part("limits"):
        soft, needed = part["files"][0], FILES + FILES_OF_RANK * world
        if soft is not None and soft < needed:
            yield CheckResult(
                "open files", host, "failure" if soft < FILES // 2 else "warning",
                f"{soft:,} of {needed:,} that {world} ranks may take",
                "sockets to other ranks and data files end with `Too many open files`",
                "ulimit -n 65536, nofile in /etc/security/limits.conf, LimitNOFILE of sshd or slurmd",
            )  # fmt: skip
        else:
            yield passed("open files", host, "without limit" if soft is None else f"{soft:,}")
        yield _locked(host, part["locked"], part["infiniband"], seen.needs.locked)


def _locked(host: str, limit: int | None, cards: list[str], needed: int | None) -> CheckResult:
    do = "ulimit -l unlimited, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for a container"
    if limit is None:
        return passed("locked memory", host, "without limit")
    if needed is not None and needed > limit:
        return CheckResult(
            "locked memory", host, "failure", f"{gib(limit)}, and swap buffers take {gib(needed)} a process",
            "DeepSpeed locks them, and a process that may not is aborted", do,
        )  # fmt: skip
    if cards:
        return CheckResult(
            "locked memory", host, "warning", f"{gib(limit)}, and there is InfiniBand ({', '.join(cards)})",
            "NCCL registers memory with it, and fails where it may not lock it", do,
        )  # fmt: skip
    return passed("locked memory", host, gib(limit))
