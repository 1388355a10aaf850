"""Check GPUs and cores of a host: `look` asks nvidia-smi if it is on PATH, `check` compares the devices with
the slots and warns of GPUs of several kinds and of memory in use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsft.doctor.finding import CheckResult, passed

if TYPE_CHECKING:
    from dsft.doctor.finding import ProbeResults

ASKED = ("index", "name", "memory.total", "memory.used", "driver_version", "uuid")
TIMEOUT = 5.0  # seconds; after that a hanging driver is reported
CHECK = "devices"
BUSY = 1024
"""MiB of a GPU's memory in use above which it is not the driver's own."""


def look(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return facts about this host's devices.

    gpus    GPUs visible to a process with this environment, memory in MiB; None without a driver
    fault   what nvidia-smi printed if it failed
    cores   number of cores that this process may use
    forced  DS_ACCELERATOR
    """
    facts: dict[str, Any] = {"gpus": None, "fault": None, "cores": len(os.sched_getaffinity(0))}
    facts["forced"] = environ.get("DS_ACCELERATOR")
    program = shutil.which("nvidia-smi")
    if program is None:
        return facts
    try:
        gpus = _parsed(_asked(program, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"))
        chosen = environ.get("CUDA_VISIBLE_DEVICES")
        parts = _parts(_asked(program, "-L"), gpus) if "MIG-" in (chosen or "") else []
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**facts, "fault": str(error)}
    return {**facts, "gpus": _visible([*gpus, *parts], chosen)}


def _asked(program: str, *words: str) -> str:
    """Run nvidia-smi and return its output. Raises OSError with its last line if it failed."""
    told = subprocess.run([program, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if told.returncode:
        said = (told.stdout + told.stderr).strip().splitlines()
        raise OSError(said[-1] if said else f"exit code {told.returncode}")
    return told.stdout


def _parsed(text: str) -> list[dict[str, Any]]:
    rows = ([part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip())
    return [
        {
            "index": row[0],
            "name": row[1],
            "total": _number(row[2]),
            "used": _number(row[3]),
            "driver": row[4],
            "uuid": row[5],
        }
        for row in rows
        if len(row) == len(ASKED)
    ]


def _number(text: str) -> int | None:
    """Return the number; None for `[N/A]`, on devices that use host memory."""
    return int(text) if text.isdecimal() else None


def _parts(text: str, gpus: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parse the MIG instances that `nvidia-smi -L` lists below each divided GPU, in lines such as `MIG
    1g.10gb Device 0: (UUID: MIG-…)`, where the profile gives the memory in GB."""
    found, whole = [], dict[str, Any]()
    for line in text.splitlines():
        if number := re.match(r"GPU (\d+):", line):
            whole = next((gpu for gpu in gpus if gpu["index"] == number[1]), {})
        elif whole and (part := re.search(r"MIG (\S+?(\d+)gb\S*) .*UUID: (MIG-[^)]+)\)", line)):
            name, memory = f"{whole['name']} {part[1]}", int(part[2]) * 1024
            found.append(
                {**whole, "index": None, "name": name, "total": memory, "used": None, "uuid": part[3]}
            )
    return found


def _visible(gpus: list[dict[str, Any]], chosen: str | None) -> list[dict[str, Any]]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, by index or by a prefix of their UUID (GPU-…,
    MIG-…). As CUDA does, stop at the first entry that does not exist."""
    if chosen is None:
        return gpus
    found = []
    for word in filter(None, (word.strip() for word in chosen.split(","))):
        named = word.startswith(("GPU-", "MIG-"))
        match = (gpu for gpu in gpus if (gpu["uuid"].startswith(word) if named else gpu["index"] == word))
        gpu = next(match, None)
        if gpu is None:
            break
        found.append(gpu)
    return found


def check(seen: ProbeResults) -> Iterator[CheckResult]:
    for host, part in seen.part("devices"):
        if part.get("fault"):
            yield CheckResult(
                CHECK, host, "failure", f"nvidia-smi failed: {part['fault']}",
                "torch will not find its GPUs either", "mend the driver, or restart the host",
            )  # fmt: skip
        elif seen.on_cpu(host):
            yield from _cores(seen, host, part)
        else:
            yield from _gpus(host, seen.slots[host], part["gpus"])
    yield from _kinds(seen)


def _cores(seen: ProbeResults, host: str, part: Mapping[str, Any]) -> Iterator[CheckResult]:
    slots, cores, gpus = seen.slots[host], part["cores"], part.get("gpus") or []
    if gpus and not part.get("forced"):
        yield CheckResult(
            CHECK, host, "warning", f"{len(gpus)} GPU(s), and a torch that is built without CUDA",
            "the run would train on the CPU", "install torch for this CUDA: scripts/install",
        )  # fmt: skip
    accelerator = seen.needs.spec.accelerator
    if accelerator is not None and accelerator.name.lower() != "cpu":
        yield CheckResult(
            CHECK, host, "failure", f"no GPU that torch could use, where {accelerator.name} is promised",
            "the run would train on the CPU, many times slower",
            "install driver and a torch with CUDA there, or take the host out of cluster.hosts",
        )  # fmt: skip
    elif slots is not None and slots > cores:
        yield CheckResult(
            CHECK, host, "warning", f"{slots} slots and {cores} core(s)",
            "ranks share cores, and each step takes longer", "give as many slots as there are cores",
        )  # fmt: skip
    elif not gpus:
        yield passed(CHECK, host, f"CPU, {cores} core(s) for {slots or 1} slot(s)")


def _gpus(host: str, slots: int | None, gpus: list[Mapping[str, Any]]) -> Iterator[CheckResult]:
    names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
    if slots is not None and slots > len(gpus):
        yield CheckResult(
            CHECK, host, "failure", f"{slots} slots and {len(gpus)} GPU(s) ({names})",
            "ranks without a GPU of their own end with `invalid device ordinal`",
            f"set cluster.hosts.{host} to {len(gpus)}, or look at CUDA_VISIBLE_DEVICES there",
        )  # fmt: skip
    elif slots is not None and slots < len(gpus):
        yield CheckResult(
            CHECK, host, "warning", f"{slots} slots and {len(gpus)} GPU(s) ({names})",
            "some stay idle", f"set cluster.hosts.{host} to {len(gpus)} where they are yours",
        )  # fmt: skip
    else:
        yield passed(CHECK, host, f"{len(gpus)} × {names}")
    busy = [gpu for gpu in gpus[: slots or None] if (gpu["used"] or 0) > BUSY]
    if busy:
        told = ", ".join(f"GPU {gpu['index']} {gpu['used']:,} of {gpu['total'] or 0:,} MiB" for gpu in busy)
        yield CheckResult(
            CHECK, host, "warning", f"memory in use: {told}",
            "what another process holds is not there for the run", "see nvidia-smi there, and end it",
        )  # fmt: skip


def _kinds(seen: ProbeResults) -> Iterator[CheckResult]:
    kinds: dict[str, list[str]] = {}
    for host, part in seen.part("devices"):
        for name in sorted({gpu["name"] for gpu in part.get("gpus") or []}):
            kinds.setdefault(name, []).append(host)
    if len(kinds) > 1:
        told = "; ".join(f"{name} on {', '.join(hosts[:4])}" for name, hosts in kinds.items())
        yield CheckResult(
            CHECK, None, "warning", f"several kinds of GPU: {told}",
            "all wait for the slowest one, and the smallest memory is what fits",
            "take hosts of one kind, or plan for the smallest",
        )  # fmt: skip
