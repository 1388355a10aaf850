"""Compiled operations: what is still to be compiled, whether that can be, and locks of builds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsft.doctor.finding import Finding, passed
from dsft.doctor.seen import Seen


def compiler(seen: Seen) -> Iterator[Finding]:
    for host, part in seen.part("build"):
        lacking = ", ".join(part["lacking"])
        if not part["ops"]:
            yield passed("compiler", host, "nothing has to be compiled")
        elif not part["lacking"]:
            yield passed("compiler", host, f"{', '.join(part['ops'])}: compiled in {part['root']}")
        elif part["fault"] is None:
            yield passed("compiler", host, f"{part['compiler']}, for {lacking} (about a minute, once)")
        else:
            cause, _, do = part["fault"].partition("; ")
            allowed = part["lacking"] == ["cpu_adam"] and seen.needs.spec.parallel.allow_torch_adam
            yield Finding(
                "compiler", host, "warning" if allowed else "failure",
                f"{lacking} cannot be compiled: {cause}",
                "by parallel.allow_torch_adam torch's slower AdamW would step" if allowed
                else "DeepSpeed compiles them at the start, and the run needs them",
                do or "see the compiler's own words",
            )  # fmt: skip


def left_over(first: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Host -> locks that it may remove: nobody holds them on any host that has one under this path, since
    hosts may share the folder. Each is one host's alone."""
    by_path = _by_path({host: facts.get("build", {}).get("locks", []) for host, facts in first.items()})
    found: dict[str, list[str]] = {}
    for path, told in by_path.items():
        if not any(lock["holders"] for lock in told.values()):
            for host, lock in told.items():
                if lock["over"]:
                    found.setdefault(host, []).append(path)
    return found


def locks(seen: Seen) -> Iterator[Finding]:
    """A lock that is under one path on several hosts is told of once."""
    parts = dict(seen.part("build"))
    by_path = _by_path({host: part["locks"] for host, part in parts.items()})
    for path, told in by_path.items():
        cleared = {
            host: said["cleared"][path]
            for host, said in seen.visits.second.items()
            if path in said.get("cleared", {})
        }
        yield _lock(path, told, cleared)
    for host, part in parts.items():
        if not part["locks"]:
            yield passed("lock", host, f"none is left in {part['root']}")


def _by_path(locks: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for host, each in locks.items():
        for lock in each:
            found.setdefault(lock["path"], {})[host] = lock
    return found


def _lock(path: str, told: Mapping[str, Mapping[str, Any]], cleared: Mapping[str, str]) -> Finding:
    host = next(iter(told))
    if "removed" in cleared.values():
        return passed("lock", host, f"removed {path}, which a build that was killed had left")
    for builder, lock in told.items():
        if lock["holders"]:
            return passed("lock", builder, f"process {lock['holders'][0]} builds under {path} now")
    if "held" in cleared.values():
        return passed("lock", host, f"a process builds under {path} now")
    since = f"{path}, for {min(lock['age'] for lock in told.values()) / 60:.0f} min"
    if not all(lock["over"] for lock in told.values()):
        return Finding(
            "lock", host, "warning", f"{since}; its holder cannot be seen from here",
            "whoever builds on another host may hold it; if nobody does, a start waits half an hour for it",
            f"where nothing builds there, remove {path}",
        )  # fmt: skip
    refused = f" (it could not be removed: {', '.join(cleared.values())})" if cleared else ""
    return Finding(
        "lock", host, "warning", f"{since}, is left of a build that was killed{refused}",
        "torch waits for it without end and without a word; dsft's own start removes it",
        "dsft doctor SPEC --fix removes it",
    )  # fmt: skip
