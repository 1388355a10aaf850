"""Find out what this process may use of its host: cores, memory, a free port. Reads /proc and /sys."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CPUS = Path("/sys/devices/system/cpu")
GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def cores(own: Path = GROUP, root: Path = GROUPS) -> int:
    """Count the cores that this process may use, by its affinity and its control groups (cgroup v2)."""
    count = len(os.sched_getaffinity(0))
    with suppress(OSError):
        group = own.read_text(encoding="ascii").strip().rpartition("::")[2].strip("/")
        places = [root / group, *(root / group).parents]
        for place in places[: len(places) - len(root.parents)]:
            with suppress(OSError, ValueError):  # the root group has no such file; "max" means no limit
                quota, period = (place / "cpu.max").read_text(encoding="ascii").split()
                count = min(count, max(1, int(quota) // int(period)))
    return count


def physical_cores(allowed: Collection[int], root: Path = CPUS) -> list[tuple[int, ...]]:
    """Group the processors in `allowed` by physical core; cores of one NUMA node are adjacent."""
    found: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        nodes = [int(path.name[4:]) for path in (root / f"cpu{cpu}").glob("node[0-9]*")]
        found.setdefault((min(nodes, default=0), _first_sibling(root / f"cpu{cpu}", cpu)), []).append(cpu)
    return [tuple(found[place]) for place in sorted(found)]


def _first_sibling(cpu: Path, number: int) -> int:
    """Return the lowest processor of a core (the file has `0,64` or `0-1`), itself where there is no file."""
    with suppress(OSError, ValueError):
        text = (cpu / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        return int(text.replace("-", ",").split(",")[0])
    return number


def host_memory(own: Path = GROUP, root: Path = GROUPS) -> int:
    """Return the bytes of memory of this host, or the control groups' limit where that is smaller."""
    return min((int(psutil.virtual_memory().total), *_limits(own, root)))


def _limits(own: Path, root: Path) -> Iterator[int]:
    """Yield the memory limits of this process's group and its parents: cgroup v2 `0::/group`, v1
    `N:memory:/group`."""
    for line in own.read_text(encoding="ascii").splitlines() if own.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / controllers
            inner = top / group.strip("/")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            for place in (inner, *inner.parents):
                if place.is_relative_to(top) and (place / name).is_file():
                    text = (place / name).read_text(encoding="ascii").strip()
                    yield from (int(text),) if text.isdecimal() else ()  # "max" means no limit


def free_port() -> int:
    """Return a port of this host at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
