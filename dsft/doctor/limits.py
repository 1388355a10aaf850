"""Check the limits of open files and locked memory: `look` reads those of this process, which ranks share if
they are started the same way; `check` compares them with what a run needs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.doctor.results import CheckResult, passed
from dsft.system.disk import may_lock_all, size_text

if TYPE_CHECKING:
    from dsft.doctor.results import ProbeResults

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


def check(probed: ProbeResults) -> Iterator[CheckResult]:
    world = sum(count or 1 for count in probed.slots.values())
    for host, part in probed.part("limits"):
        soft, needed = part["files"][0], FILES + FILES_OF_RANK * world
        if soft is not None and soft < needed:
            yield CheckResult(
                "open files", host, "failure" if soft < FILES // 2 else "warning",
                f"{soft:,}, and {world} ranks may need {needed:,}",
                "sockets to other ranks and data files end with `Too many open files`",
                "ulimit -n 65536, nofile in /etc/security/limits.conf, LimitNOFILE of sshd or slurmd",
            )  # fmt: skip
        else:
            yield passed("open files", host, "unlimited" if soft is None else f"{soft:,}")
        yield _locked(host, part["locked"], part["infiniband"], probed.needs.locked)


def _locked(host: str, limit: int | None, cards: list[str], needed: int | None) -> CheckResult:
    do = "ulimit -l unlimited, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for a container"
    if limit is None:
        return passed("locked memory", host, "unlimited")
    if needed is not None and needed > limit:
        return CheckResult(
            "locked memory", host, "failure",
            f"{size_text(limit, 2)}, and swap buffers need {size_text(needed, 2)} per process",
            "DeepSpeed locks this memory, and a process that may not lock it is aborted", do,
        )  # fmt: skip
    if cards:
        return CheckResult(
            "locked memory", host, "warning",
            f"{size_text(limit, 2)}, and there is InfiniBand ({', '.join(cards)})",
            "NCCL locks the memory that it registers with the card, and fails if it may not", do,
        )  # fmt: skip
    return passed("locked memory", host, size_text(limit, 2))
