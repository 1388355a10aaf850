"""Runs whose operations are not there yet, cannot be compiled, or were left locked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsft.engine.toolchain import build_folder
from tests.launching import ROOT, forked

KEPT = build_folder()
WORDS = [
    str(ROOT / "specs" / "quickstart.yaml"), "train.max_steps=2", "train.eval_every=null",
    "parallel.zero_stage=2", "parallel.offload_optimizer.device=cpu", "model.from_config.hidden_size=16",
    "model.from_config.num_hidden_layers=1", "wandb.mode=disabled",
]  # fmt: skip


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """dsft's folder; cpu_adam cannot be compiled, since a file is in its folder's place."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    folder = build_folder()
    folder.mkdir(parents=True)
    (folder / "cpu_adam").touch()
    return folder


def test_missing_compiler_stops_the_start(
    extensions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    done = forked(ROOT / "dsft/train.py", 2, [*WORDS, f"output_dir={tmp_path}"])
    assert "building deepspeed_shm_comm on " in done.stdout
    assert "DeepSpeed's deepspeed_shm_comm cannot be built on " in done.stderr
    assert "the compiler 'g++-99' is not on PATH (CXX names it)" in done.stderr
    assert "ended with exit code 72" in done.stderr and "Traceback" not in done.stderr


def test_stale_build_lock_and_cpu_adam_that_cannot_be_compiled(tmp_path: Path, extensions: Path) -> None:
    built = KEPT / "deepspeed_shm_comm"
    if not (built / "deepspeed_shm_comm.so").exists():
        pytest.skip("deepspeed_shm_comm is not compiled yet; scripts/install does it")
    shutil.copytree(built, extensions / built.name)
    lock = extensions / built.name / "lock"
    lock.touch()
    allowed = "parallel.allow_torch_adam=true"
    done = forked(ROOT / "dsft/train.py", 2, [*WORDS, allowed, f"output_dir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    assert f"removed {lock}, which a build that was killed left behind" in done.stdout
    assert "by parallel.allow_torch_adam torch's AdamW steps on the CPU instead" in done.stdout
    assert "step 2/2" in done.stdout
