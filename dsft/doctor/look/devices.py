"""GPUs, as `nvidia-smi` tells of them, and cores. Starts nvidia-smi where it is on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

ASKED = ("index", "name", "memory.total", "memory.used", "driver_version")
TIMEOUT = 5.0  # seconds; a driver that hangs is told, and waited for no longer


def devices(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """gpus: those that a process of this environment sees, memory in MiB; None without a driver; fault: what
    nvidia-smi said where it failed."""
    facts: dict[str, Any] = {"gpus": None, "fault": None, "cores": len(os.sched_getaffinity(0))}
    facts["forced"] = environ.get("DS_ACCELERATOR")
    program = shutil.which("nvidia-smi")
    if program is None:
        return facts
    command = [program, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**facts, "fault": str(error)}
    if told.returncode:
        said = (told.stdout + told.stderr).strip().splitlines()
        return {**facts, "fault": said[-1] if said else f"exit code {told.returncode}"}
    return {**facts, "gpus": _visible(_parsed(told.stdout), environ.get("CUDA_VISIBLE_DEVICES"))}


def _parsed(text: str) -> list[dict[str, Any]]:
    rows = ([part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip())
    return [
        {"index": row[0], "name": row[1], "total": _number(row[2]), "used": _number(row[3]), "driver": row[4]}
        for row in rows
        if len(row) == len(ASKED)
    ]


def _number(text: str) -> int | None:
    """`[N/A]` where memory is the host's."""
    return int(text) if text.isdecimal() else None


def _visible(gpus: list[dict[str, Any]], chosen: str | None) -> list[dict[str, Any]]:
    """CUDA_VISIBLE_DEVICES by numbers; CUDA stops at the first that is not there. Names (GPU-…, MIG-…) are
    counted, and taken as they come."""
    if chosen is None:
        return gpus
    by_index = {gpu["index"]: gpu for gpu in gpus}
    named = [word.strip() for word in chosen.split(",") if word.strip()]
    if any(not word.lstrip("-").isdecimal() for word in named):
        return gpus[: len(named)]
    found = []
    for word in named:
        if word not in by_index:
            break
        found.append(by_index[word])
    return found
