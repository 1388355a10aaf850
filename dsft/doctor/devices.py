"""Check GPUs and cores of a host: `look` asks nvidia-smi if it is on PATH, `check` compares the devices with
the slots and warns of GPUs of several kinds and of memory in use."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dsft.doctor.results import CheckResult, passed

if TYPE_CHECKING:
    from dsft.doctor.results import ProbeResults

QUERY = {
    "index": "index", "name": "name", "total": "memory.total", "used": "memory.used",
    "driver": "driver_version", "uuid": "uuid",
}  # fmt: skip
"""Facts of a GPU, by their names here: what nvidia-smi calls them."""
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
        query = f"--query-gpu={','.join(QUERY.values())}"
        gpus = _parsed(_run(program, query, "--format=csv,noheader,nounits"))
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**facts, "fault": str(error)}
    return {**facts, "gpus": _visible(gpus, environ.get("CUDA_VISIBLE_DEVICES"))}


def _run(program: str, *words: str) -> str:
    """Run nvidia-smi and return its output. Raises OSError with its last line if it failed."""
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise OSError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


def _parsed(text: str) -> list[dict[str, Any]]:
    """Return the GPUs, with the keys of QUERY; memory is None for `[N/A]`, on devices that use the host's."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    gpus = [dict[str, Any](zip(QUERY, row, strict=True)) for row in rows if len(row) == len(QUERY)]
    memory = ("total", "used")
    return [gpu | {key: int(gpu[key]) if gpu[key].isdecimal() else None for key in memory} for gpu in gpus]


def _visible(gpus: list[dict[str, Any]], chosen: str | None) -> list[dict[str, Any]]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, by index or by a prefix of their UUID (GPU-…). As
    CUDA does, stop at the first entry that does not exist. A MIG instance (MIG-…) is taken to exist."""
    if chosen is None:
        return gpus
    found = []
    for word in filter(None, (word.strip() for word in chosen.split(","))):
        named = word.startswith("GPU-")
        match = (gpu for gpu in gpus if (gpu["uuid"].startswith(word) if named else gpu["index"] == word))
        gpu = next(match, None)
        if word.startswith("MIG-") and gpus:
            gpu = {
                **gpus[0],
                "index": word,
                "name": "MIG instance",
                "total": None,
                "used": None,
                "uuid": word,
            }
        if gpu is None:
            break
        found.append(gpu)
    return found


def check(probed: ProbeResults) -> Iterator[CheckResult]:
    for host, part in probed.part("devices"):
        if part.get("fault"):
            yield CheckResult(
                CHECK, host, "failure", f"nvidia-smi failed: {part['fault']}",
                "torch will not find its GPUs either", "repair the driver, or restart the host",
            )  # fmt: skip
        elif probed.on_cpu(host):
            yield from _cores(probed, host, part)
        else:
            yield from _gpus(host, probed.slots[host], part["gpus"])
    yield from _kinds(probed)


def _cores(probed: ProbeResults, host: str, part: Mapping[str, Any]) -> Iterator[CheckResult]:
    slots, cores, gpus = probed.slots[host], part["cores"], part.get("gpus") or []
    if gpus and not part.get("forced"):
        yield CheckResult(
            CHECK, host, "warning", f"{len(gpus)} GPU(s), but torch is built without CUDA",
            "the run would train on the CPU", "install torch with CUDA (docs/install.md)",
        )  # fmt: skip
    accelerator = probed.needs.spec.accelerator
    if accelerator is not None and accelerator.name.lower() != "cpu":
        yield CheckResult(
            CHECK, host, "failure", f"torch can use no GPU, and cluster.accelerator is {accelerator.name}",
            "the run would train on the CPU, many times slower",
            "install the driver and torch with CUDA there, or remove the host from cluster.hosts",
        )  # fmt: skip
    elif slots is not None and slots > cores:
        yield CheckResult(
            CHECK, host, "warning", f"{slots} slots and {cores} core(s)",
            "ranks share cores, and each step takes longer", "set as many slots as there are cores",
        )  # fmt: skip
    elif not gpus:
        yield passed(CHECK, host, f"CPU, {cores} core(s) for {slots or 1} slot(s)")


def _gpus(host: str, slots: int | None, gpus: list[Mapping[str, Any]]) -> Iterator[CheckResult]:
    names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
    if slots is not None and slots > len(gpus):
        yield CheckResult(
            CHECK, host, "failure", f"{slots} slots and {len(gpus)} GPU(s) ({names})",
            "ranks without a GPU of their own end with `invalid device ordinal`",
            f"set cluster.hosts.{host} to {len(gpus)}, or check CUDA_VISIBLE_DEVICES there",
        )  # fmt: skip
    elif slots is not None and slots < len(gpus):
        yield CheckResult(
            CHECK, host, "warning", f"{slots} slots and {len(gpus)} GPU(s) ({names})",
            "some stay idle", f"set cluster.hosts.{host} to {len(gpus)} if you may use them all",
        )  # fmt: skip
    else:
        yield passed(CHECK, host, f"{len(gpus)} × {names}")
    busy = [gpu for gpu in gpus[: slots or None] if (gpu["used"] or 0) > BUSY]
    if busy:
        used = ", ".join(f"GPU {gpu['index']} {gpu['used']:,} of {gpu['total'] or 0:,} MiB" for gpu in busy)
        yield CheckResult(
            CHECK, host, "warning", f"memory in use: {used}",
            "the run cannot use that memory", "find the process with nvidia-smi there, and end it",
        )  # fmt: skip


def _kinds(probed: ProbeResults) -> Iterator[CheckResult]:
    kinds: dict[str, list[str]] = {}
    for host, part in probed.part("devices"):
        for name in sorted({gpu["name"] for gpu in part.get("gpus") or []}):
            kinds.setdefault(name, []).append(host)
    if len(kinds) > 1:
        names = "; ".join(f"{name} on {', '.join(hosts[:4])}" for name, hosts in kinds.items())
        yield CheckResult(
            CHECK, None, "warning", f"several kinds of GPU: {names}",
            "all wait for the slowest one, and the model must fit into the smallest memory",
            "use hosts of one kind, or plan for the smallest",
        )  # fmt: skip
