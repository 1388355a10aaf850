"""What the system allows a process of this host: open files, locked memory. Reads them as this process has
them, which a launcher's processes share when they are started the same way."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from dsft.system.disk import may_lock_all

INFINIBAND = Path("/sys/class/infiniband")


def limits() -> dict[str, Any]:
    """files: open at once, soft and hard; locked: bytes; each None where there is no limit."""
    files, locked = (resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    cards = sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return {
        "files": [_number(limit) for limit in files],
        "locked": None if may_lock_all() else _number(locked[0]),
        "infiniband": cards,
    }


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
