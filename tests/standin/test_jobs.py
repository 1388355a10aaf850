"""Whole runs on the stand-in GPU, with numbers: what a run prints and records is what it is on the CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.runs import TRAIN, records, write_spec
from tests.integration.test_preference import DPO, write_pairs
from tests.launching import ROOT, alone
from tests.selected import selected, tiered
from tests.standin.gpu import environ

pytestmark = pytest.mark.standin

SHORT = ("train.max_steps=4", "train.eval_every=2", "checkpoint.every=2", "checkpoint.keep_last=null")
SMALL = (*SHORT, "train.global_batch_size=6", "model.from_config.num_hidden_layers=2")
CASES: dict[str, tuple[str, ...]] = {
    "zero0": ("parallel.zero_stage=0",),
    "zero1": ("parallel.zero_stage=1",),
    "zero2-packed": ("parallel.zero_stage=2", "data.packing=true"),
    "zero3-checkpointing": (
        "parallel.zero_stage=3", "model.gradient_checkpointing=true", "model.activation_offload=true",
    ),
    "offload": ("parallel.zero_stage=2", "parallel.offload_optimizer={device: cpu}"),
    "lora": ("model.lora={rank: 4, alpha: 8}",),
}  # fmt: skip
"""Runs of tests/integration/runs.py's spec. The quickstart, its resumed half and DPO stand beside them."""
ALWAYS = ("zero2-packed", "dpo")
"""DPO begins with what zero2-packed has trained."""
KEYS = ("train/loss", "train/grad_norm", "eval/loss")


def jobs(folder: Path, names: Collection[str]) -> list[dict[str, Any]]:
    """Return these runs, in the order in which they need each other; each in a folder of its name under
    `folder`. "from": a run's folder of which the job's "run" begins as a copy stopped at step 2."""
    made = []

    def add(name: str, *args: str, **more: str) -> None:
        place = f"output_dir={folder / name}"
        if name in names:
            made.append({"args": [*args, place], "log": str(folder / f"{name}.log"), **more})

    quickstart = [str(ROOT / "specs" / "quickstart.yaml"), *SHORT]
    add("quickstart", *quickstart)
    runs = {"from": str(folder / "quickstart" / "quickstart"), "run": str(folder / "resumed" / "quickstart")}
    add("resumed", *quickstart, **runs)
    small = str(write_spec(folder))
    for name, overrides in CASES.items():
        add(name, small, *SMALL, *overrides)
    export = folder / "zero2-packed" / "small" / "export"
    spec = folder / "dpo.yaml"
    spec.write_text(DPO.format(supervised=export, folder=folder, steps=4, middle=2))
    write_pairs(export.with_name("pairs.jsonl"))
    add("dpo", str(spec), "dpo={reference: live}", "train.eval_every=2")
    return made


def stopped(run: Path, at: Path) -> None:
    """Make a copy of a run as it was after its checkpoint of step 2."""
    shutil.copytree(run, at)
    shutil.rmtree(at / "checkpoints" / "step-4")
    shutil.rmtree(at / "export")


def done(folder: Path, names: Collection[str], standin: Mapping[str, str] | None = None) -> Path:
    """Run the jobs, over the stand-in GPU or on the CPU."""
    (folder / "zero2-packed" / "small").mkdir(parents=True)
    for job in jobs(folder, names):
        if "from" in job:
            stopped(Path(job["from"]), Path(job["run"]))
        ended = alone(TRAIN, job["args"], standin=standin)
        log = Path(job["log"])
        log.write_text(ended.stdout + ended.stderr)
        log.with_suffix(".code").write_text(str(ended.returncode))
    return folder


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of all selected runs on the stand-in GPU and on the CPU."""
    names = selected(request, "name")
    names += ["quickstart", "resumed"] if len(names) > len(ALWAYS) else []
    for variables in (environ("numbers"), os.environ):
        Path(variables["TORCH_EXTENSIONS_DIR"]).mkdir(parents=True, exist_ok=True)
    on_gpu, on_cpu = (tmp_path_factory.mktemp(place) for place in ("gpu", "cpu"))
    return done(on_gpu, names, environ("numbers")), done(on_cpu, names)


def run_of(folder: Path, name: str) -> Path:
    """Return the folder of a job's run; fails the test, with what the job wrote, where it did not end
    well."""
    if (folder / f"{name}.code").read_text() != "0":
        pytest.fail(
            f"{name} on {folder.name}:\n{(folder / f'{name}.log').read_text()[-6000:]}", pytrace=False
        )
    return next(path for path in (folder / name).iterdir() if (path / "metrics.jsonl").exists())


def losses(folder: Path, name: str) -> list[str]:
    """Losses as they were printed, during training and held out."""
    run_of(folder, name)
    return re.findall(r"loss ([\d.]+)", (folder / f"{name}.log").read_text())


@pytest.mark.long
def test_quickstart_prints_the_losses_of_the_cpu(both: tuple[Path, Path]) -> None:
    gpu, cpu = (losses(folder, "quickstart") for folder in both)
    assert gpu == cpu and len(gpu) >= 6
    memory = json.loads((run_of(both[0], "quickstart") / "memory.json").read_text())
    assert memory["phases"]["first_step"]["device_allocated"]["measured"] > 0, "it did not run on the device"


@pytest.mark.long
def test_run_resumes_from_its_checkpoint(both: tuple[Path, Path]) -> None:
    folder, _ = both
    assert "going on from step 2" in (folder / "resumed.log").read_text()
    whole, resumed = (run_of(folder, name) for name in ("quickstart", "resumed"))
    for key in KEYS:
        assert records(resumed, key) == records(whole, key), key
    weights, again = (load_file(run / "export" / "model.safetensors") for run in (whole, resumed))
    assert weights.keys() == again.keys() and all(weights[name].equal(again[name]) for name in weights)


@pytest.mark.parametrize("name", tiered([*CASES, "dpo"], ALWAYS))
def test_run_records_the_metrics_of_the_cpu(name: str, both: tuple[Path, Path]) -> None:
    gpu, cpu = (run_of(folder, name) for folder in both)
    keys = (*KEYS, "train/rewards/margins", "eval/rewards/margins") if name == "dpo" else KEYS
    for key in keys:
        expected = records(cpu, key)
        assert len(expected) >= 2
        assert records(gpu, key) == pytest.approx(expected, rel=1e-5, abs=1e-6), key
