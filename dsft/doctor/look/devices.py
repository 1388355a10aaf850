"""GPUs, as `nvidia-smi` tells of them, and cores. Starts nvidia-smi where it is on PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

ASKED = ("index", "name", "memory.total", "memory.used", "driver_version", "uuid")
TIMEOUT = 5.0  # seconds; a driver that hangs is told, and waited for no longer


def devices(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """gpus: those that a process of this environment sees, memory in MiB; None without a driver; fault: what
    nvidia-smi said where it failed."""
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
    """Raises OSError with what nvidia-smi said where it failed."""
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
    """`[N/A]` where memory is the host's."""
    return int(text) if text.isdecimal() else None


def _parts(text: str, gpus: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of GPUs that are divided (MIG), as `nvidia-smi -L` lists them below each: a line such as
    `MIG 1g.10gb Device 0: (UUID: MIG-…)`, whose profile names the memory in GB."""
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
    """Those of CUDA_VISIBLE_DEVICES, by their numbers or by the first letters of their names (GPU-…, MIG-…);
    CUDA stops at the first that is not there."""
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
