"""GPUs against slots, their kinds, and what already lies in their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsft.doctor.finding import Finding, passed
from dsft.doctor.seen import Seen

CHECK = "devices"
BUSY = 1024
"""MiB of a GPU's memory in use that are no longer a driver's own."""


def devices(seen: Seen) -> Iterator[Finding]:
    for host, part in seen.part("devices"):
        if part.get("fault"):
            yield Finding(
                CHECK, host, "failure", f"nvidia-smi failed: {part['fault']}",
                "torch will not find its GPUs either", "mend the driver, or restart the host",
            )  # fmt: skip
        elif seen.on_cpu(host):
            yield from _cores(seen, host, part)
        else:
            yield from _gpus(host, seen.slots[host], part["gpus"])
    yield from _kinds(seen)


def _cores(seen: Seen, host: str, part: Mapping[str, Any]) -> Iterator[Finding]:
    slots, cores, gpus = seen.slots[host], part["cores"], part.get("gpus") or []
    if gpus and not part.get("forced"):
        yield Finding(
            CHECK, host, "warning", f"{len(gpus)} GPU(s), and a torch that is built without CUDA",
            "the run would train on the CPU", "install torch for this CUDA: scripts/install",
        )  # fmt: skip
    accelerator = seen.needs.spec.accelerator
    if accelerator is not None and accelerator.name.lower() != "cpu":
        yield Finding(
            CHECK, host, "failure", f"no GPU that torch could use, where {accelerator.name} is promised",
            "the run would train on the CPU, many times slower",
            "install driver and a torch with CUDA there, or take the host out of cluster.hosts",
        )  # fmt: skip
    elif slots is not None and slots > cores:
        yield Finding(
            CHECK, host, "warning", f"{slots} slots and {cores} core(s)",
            "ranks share cores, and each step takes longer", "give as many slots as there are cores",
        )  # fmt: skip
    elif not gpus:
        yield passed(CHECK, host, f"CPU, {cores} core(s) for {slots or 1} slot(s)")


def _gpus(host: str, slots: int | None, gpus: list[Mapping[str, Any]]) -> Iterator[Finding]:
    names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
    if slots is not None and slots > len(gpus):
        yield Finding(
            CHECK, host, "failure", f"{slots} slots and {len(gpus)} GPU(s) ({names})",
            "ranks without a GPU of their own end with `invalid device ordinal`",
            f"set cluster.hosts.{host} to {len(gpus)}, or look at CUDA_VISIBLE_DEVICES there",
        )  # fmt: skip
    elif slots is not None and slots < len(gpus):
        yield Finding(
            CHECK, host, "warning", f"{slots} slots and {len(gpus)} GPU(s) ({names})",
            "some stay idle", f"set cluster.hosts.{host} to {len(gpus)} where they are yours",
        )  # fmt: skip
    else:
        yield passed(CHECK, host, f"{len(gpus)} × {names}")
    busy = [gpu for gpu in gpus[: slots or None] if (gpu["used"] or 0) > BUSY]
    if busy:
        told = ", ".join(f"GPU {gpu['index']} {gpu['used']:,} of {gpu['total'] or 0:,} MiB" for gpu in busy)
        yield Finding(
            CHECK, host, "warning", f"memory in use: {told}",
            "what another process holds is not there for the run", "see nvidia-smi there, and end it",
        )  # fmt: skip


def _kinds(seen: Seen) -> Iterator[Finding]:
    kinds: dict[str, list[str]] = {}
    for host, part in seen.part("devices"):
        for name in sorted({gpu["name"] for gpu in part.get("gpus") or []}):
            kinds.setdefault(name, []).append(host)
    if len(kinds) > 1:
        told = "; ".join(f"{name} on {', '.join(hosts[:4])}" for name, hosts in kinds.items())
        yield Finding(
            CHECK, None, "warning", f"several kinds of GPU: {told}",
            "all wait for the slowest one, and the smallest memory is what fits",
            "take hosts of one kind, or plan for the smallest",
        )  # fmt: skip
