"""Starts commands over the stand-in GPU and returns their reports, for the tests of this folder.

The tests' own torch has no CUDA, so whatever meets the device runs in a process of its own, of which a module
beside the test is the code: `answer("some_worker", "case")` does what `python -m tests.standin.some_worker
case` would, in a fork of a process that has imported torch and dsft; the module ends with
`inside.report(result)`. `inside.py` has what such a module counts with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, alone

HERE = Path(__file__).resolve().parent
PREFIX = "stand-in: "
"""Prefix of the line with a worker's report."""


def torch_version() -> str:
    """Return the version that is installed for the tests: constraints.txt's, or STANDIN_TORCH."""
    if chosen := os.environ.get("STANDIN_TORCH"):
        return chosen
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(pin.removeprefix("torch==") for pin in pins if pin.startswith("torch=="))


def folder() -> Path:
    """Return where scripts/standin installs; DSFT_STANDIN names another place."""
    return Path(os.environ.get("DSFT_STANDIN", ROOT / ".cache" / "standin")) / torch_version()


def why_not() -> str | None:
    """Return why no test can run on the stand-in GPU; None where one can."""
    if (folder() / "lib").is_dir():
        return None
    return f"needs the stand-in GPU with torch {torch_version()}: scripts/standin installs it (530 MB)"


def environ(mode: str = "fast", *, devices: int = 1, gib: float | None = None, **more: str) -> dict[str, str]:
    """Return the variables of a process over the stand-in GPU. `mode`: `fast` (kernels compute nothing,
    memory costs nothing) or `numbers` (right numbers); `gib`: memory of each device; `more`: other
    variables."""
    made = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "CUDA_HOME")}
    place = folder()
    for name, first in (
        ("PYTHONPATH", [ROOT, HERE / "site", place / "site"]),
        ("LD_LIBRARY_PATH", [place / "lib"]),
    ):
        made[name] = os.pathsep.join([*map(str, first), *filter(None, [made.get(name)])])
    made["TORCH_EXTENSIONS_DIR"] = str(place / "extensions")
    made |= {"STANDIN_MODE": mode, "STANDIN_DEVICES": str(devices), "OMP_NUM_THREADS": "1"}
    return made | ({"STANDIN_GIB": str(gib)} if gib is not None else {}) | more


def run(worker: str, *words: str, mode: str = "fast", **settings: Any) -> subprocess.CompletedProcess[str]:
    """A module of this folder over the stand-in GPU, with words. Settings as in `environ`."""
    return alone(HERE / f"{worker}.py", words, standin=environ(mode, **settings))


def answer(worker: str, *words: str, **settings: Any) -> Any:
    """Return what a module of this folder reports with `inside.report`."""
    return reported(run(worker, *words, **settings))


def reported(done: subprocess.CompletedProcess[str]) -> Any:
    """Return a worker's report; without one fail the test, with the worker's output."""
    reports = [line.removeprefix(PREFIX) for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if done.returncode or not reports:
        output = f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        pytest.fail(f"{done.args} ended with {done.returncode}:\n{output}", pytrace=False)
    return json.loads(reports[-1])
