"""The memory of this host, as far as this process may use it. Reads /proc and /sys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def host_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: all that the host has, or what its control groups leave this process of it."""
    return min((int(psutil.virtual_memory().total), *_limits(own, root)))


def _limits(own: Path, root: Path) -> Iterator[int]:
    """Of the process's group and all above it: cgroup v2 in `0::/group`, v1 in `N:memory:/group`."""
    for line in own.read_text(encoding="ascii").splitlines() if own.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / controllers
            inner = top / group.strip("/")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            for place in (inner, *inner.parents):
                if place.is_relative_to(top) and (place / name).is_file():
                    text = (place / name).read_text(encoding="ascii").strip()
                    yield from (int(text),) if text.isdecimal() else ()  # "max": no limit
