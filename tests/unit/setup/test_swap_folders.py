"""Whether the disks have room for what a run swaps, before the model is built."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsft.errors import StorageError
from dsft.plan.census import Census, Parameter
from dsft.plan.cut import Cut
from dsft.plan.ds_config import entries
from dsft.rank.environment import Launched
from dsft.setup import resolve
from dsft.setup.job import Job
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec

COUNTED = Census("X", 1, None, (Parameter("w", (5000, 5000), 0, False, ()),))
STATES, PARAMETERS = 16 * 5000**2, 2 * 5000**2  # bytes: fp32 value, two moments, gradient; bf16


def job(folder: Path) -> Job:
    offload = {key: {"device": "nvme", "nvme_path": str(folder / key)} for key in ("states", "parameters")}
    for section in offload.values():
        Path(section["nvme_path"]).mkdir()
    spec = Spec.model_validate(
        {
            "name": "small",
            "task": "pretrain",
            "model": {"from_config": {"model_type": "llama"}},
            "data": {"train": [{"path": "builtin:quickstart"}]},
            "parallel": {
                "zero_stage": 3,
                "offload_optimizer": offload["states"],
                "offload_parameters": offload["parameters"],
            },
            "train": {"micro_batch_size": 1, "accumulation_steps": 1, "precision": "bf16"},
            "optim": {"learning_rate": 1e-3},
        }
    )
    batch = batch_sizes(spec.train, 1)
    launched = Launched("python", 0, 1, 0, "127.0.0.1", 1)
    return Job(spec=spec, batch=batch, launched=launched, layout=Layout(1, 1))


@pytest.mark.parametrize(("free", "fits"), [(STATES + PARAMETERS, True), (STATES + PARAMETERS - 1, False)])
def test_two_folders_of_one_disk_share_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(resolve, "check_locked", lambda needed: None)
    world: Any = SimpleNamespace(rank=0, local_rank=0, gather=lambda mine: [mine], each=lambda work: work())
    made = job(tmp_path)
    resolved = resolve.Resolved(made.spec, entries(made.spec, made.batch), COUNTED, Cut((1,)), 1)
    swap = {"offload_optimizer": str(tmp_path / "states"), "offload_parameters": str(tmp_path / "parameters")}
    if fits:
        resolve.check_swap(made, resolved, swap, world)
        return
    with pytest.raises(StorageError, match="offload_optimizer and offload_parameters"):
        resolve.check_swap(made, resolved, swap, world)
