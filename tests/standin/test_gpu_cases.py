"""`scripts/gpu` on the stand-in GPU, from a bare clone: a case of each kind before it meets a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT
from tests.selected import tiered
from tests.standin.gpu import environ

pytestmark = [pytest.mark.standin, pytest.mark.timeout(3600)]

ALWAYS = ("environment",)
ALL = (
    *ALWAYS, "attention-bf16", "ceilings", "doctor", "parity-bf16-zero2-packed", "documents-dsft",
    "documents-plain",
)  # fmt: skip


@pytest.mark.parametrize("cases", tiered([ALWAYS, ALL], [ALWAYS]), ids=["some", "all"])
def test_cases_are_rehearsed_from_a_bare_clone(tmp_path: Path, cases: tuple[str, ...]) -> None:
    """Where there is no git."""
    clone, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    made = environ("numbers")
    kept = [path for path in made["PYTHONPATH"].split(os.pathsep) if path != str(ROOT)]
    without_git = tmp_path / "bin"
    without_git.mkdir()
    for program in (
        "bash",
        "dirname",
        "mkdir",
        "sed",
        "grep",
        "cat",
        "gcc",
        "g++",
        "c++",
        "as",
        "ld",
        "env",
        "lscpu",
        "date",
    ):
        if found := shutil.which(program):
            (without_git / program).symlink_to(found)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(without_git)])
    done = subprocess.run(
        [clone / "scripts" / "gpu", "all", "--rehearse", "--out", str(out), "--only", *cases], cwd=clone,
        env=made | {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(kept), "PATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (out / "results.json").exists(), done.stderr[-3000:]
    results = {one["case"]: one for one in json.loads((out / "results.json").read_text())}
    assert {name: one["reason"] for name, one in results.items()} == dict.fromkeys(cases, ""), done.stdout
    assert "documents-dsft" not in cases or results["documents-dsft"]["loss_difference"] < 1e-4
    assert {path.name for path in out.iterdir()} == {"results.json", "results.md", "log.txt"}
    assert {one["commit"] for one in results.values()} == {"no commit"}
