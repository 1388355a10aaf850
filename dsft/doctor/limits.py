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
    """Return the soft limits, None if unlimited (files; locked in bytes), and the InfiniBand cards."""
    files, locked = (
        resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    return {
        "files": None if files == resource.RLIM_INFINITY else files,
        "locked": None if may_lock_all() or locked == resource.RLIM_INFINITY else locked,
        "infiniband": sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else [],
    }


def check(probed: ProbeResults) -> Iterator[CheckResult]:
    world, wanted = sum(count or 1 for count in probed.slots.values()), probed.needs.locked or 0
    needed = FILES + FILES_OF_RANK * world
    for host, part in probed.part("limits"):
        open_files, locked, cards = part["files"], part["locked"], ", ".join(part["infiniband"])
        if open_files is not None and open_files < needed:
            yield CheckResult(
                "open files", host, "failure" if open_files < FILES // 2 else "warning",
                f"{open_files:,}, and {world} ranks may need {needed:,}",
                "sockets to other ranks and data files end with `Too many open files`",
                "ulimit -n 65536, nofile in /etc/security/limits.conf, LimitNOFILE of sshd or slurmd",
            )  # fmt: skip
        else:
            yield passed("open files", host, "unlimited" if open_files is None else f"{open_files:,}")
        is_short = locked is not None and wanted > locked
        value = "unlimited" if locked is None else size_text(locked, 2)
        if locked is not None and (is_short or cards):
            yield CheckResult(
                "locked memory", host, "failure" if is_short else "warning",
                f"{value}, and " + (
                    f"swap buffers need {size_text(wanted, 2)} per process" if is_short
                    else f"there is InfiniBand ({cards})"
                ),
                "DeepSpeed and NCCL lock memory, and a process that may not lock it is aborted",
                "ulimit -l unlimited, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for a "
                "container",
            )  # fmt: skip
        else:
            yield passed("locked memory", host, value)
