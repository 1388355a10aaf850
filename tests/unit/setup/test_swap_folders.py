"""Whether the disks have room for what a run swaps, before the model is built."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsft.errors import StorageError
from dsft.plan.census import Census, Parameter
from dsft.plan.cut import Cut
from dsft.plan.ds_config import entries
from dsft.setup import resolve
from dsft.spec.schema import Spec
from tests.make import make_run
from tests.specs import minimal_spec

COUNTED = Census("X", 1, None, (Parameter("w", (5000, 5000), 0, False, ()),))
STATES, PARAMETERS = 16 * 5000**2, 2 * 5000**2  # bytes: fp32 value, two moments, gradient; bf16


def spec(folder: Path) -> Spec:
    offload = {key: {"device": "nvme", "nvme_path": str(folder / key)} for key in ("states", "parameters")}
    for section in offload.values():
        Path(section["nvme_path"]).mkdir()
    parts = {"offload_optimizer": offload["states"], "offload_parameters": offload["parameters"]}
    return minimal_spec(parallel={"zero_stage": 3, **parts}, train={"precision": "bf16"})


@pytest.mark.parametrize(("free", "fits"), [(STATES + PARAMETERS, True), (STATES + PARAMETERS - 1, False)])
def test_two_folders_of_one_disk_share_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(resolve, "check_locked", lambda needed: None)
    world: Any = SimpleNamespace(rank=0, local_rank=0, gather=lambda mine: [mine], each=lambda work: work())
    run = make_run(spec(tmp_path), world)
    plan = resolve.Plan(run.spec, entries(run.spec, run.batch), COUNTED, Cut((1,)), 1)
    swap = {"offload_optimizer": str(tmp_path / "states"), "offload_parameters": str(tmp_path / "parameters")}
    if fits:
        resolve.check_swap(run, plan, swap)
        return
    with pytest.raises(StorageError, match="offload_optimizer and offload_parameters"):
        resolve.check_swap(run, plan, swap)
