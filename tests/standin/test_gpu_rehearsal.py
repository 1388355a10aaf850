"""`scripts/gpu` on the stand-in GPU, from a bare clone: no case fails before it meets a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.cases import CASES
from tests.launching import ROOT
from tests.standin.gpu import environ

pytestmark = [pytest.mark.standin, pytest.mark.timeout(3600)]


def test_every_case_is_rehearsed_from_a_bare_clone(tmp_path: Path) -> None:
    clone, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    made = environ("numbers")
    kept = [path for path in made["PYTHONPATH"].split(os.pathsep) if path != str(ROOT)]
    done = subprocess.run(
        [clone / "scripts" / "gpu", "all", "--rehearse", "--out", str(out)], cwd=clone, text=True,
        env=made | {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(kept)}, capture_output=True,
    )  # fmt: skip
    results = {one["case"]: one for one in json.loads((out / "results.json").read_text())}
    assert results.keys() == {case.name for case in CASES}
    assert not {name: one["reason"] for name, one in results.items() if one["pass"] is False}, done.stdout
    ran = {case.stage for case in CASES if results[case.name]["pass"]}
    assert ran >= {"setup", "correct", "speed", "large", "preferences"}
    assert {path.name for path in out.iterdir()} == {"results.json", "results.md", "log.txt"}
