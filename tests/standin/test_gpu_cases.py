"""`scripts/gpu` on the stand-in GPU, from a bare clone: a case of each kind before it meets a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT
from tests.standin.gpu import environ

pytestmark = [pytest.mark.standin, pytest.mark.timeout(3600)]

CASES = (
    "environment", "ceilings", "doctor", "attention-bf16", "parity-bf16-zero2-packed",
    "documents-dsft", "documents-plain",
)  # fmt: skip


def test_cases_are_rehearsed_from_a_bare_clone(tmp_path: Path) -> None:
    clone, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    made = environ("numbers")
    kept = [path for path in made["PYTHONPATH"].split(os.pathsep) if path != str(ROOT)]
    done = subprocess.run(
        [clone / "scripts" / "gpu", "all", "--rehearse", "--out", str(out), "--only", *CASES], cwd=clone,
        env=made | {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(kept)}, capture_output=True,
        text=True,
    )  # fmt: skip
    results = {one["case"]: one for one in json.loads((out / "results.json").read_text())}
    assert {name: one["reason"] for name, one in results.items()} == dict.fromkeys(CASES, ""), done.stdout
    assert results["documents-dsft"]["loss_difference"] < 1e-4
    assert {path.name for path in out.iterdir()} == {"results.json", "results.md", "log.txt"}
