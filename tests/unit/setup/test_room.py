"""A full disk is found before the first step."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedConfig

from dsft.errors import StorageError
from dsft.plan.census import Census, Parameter
from dsft.setup.resolve import check_room
from tests.specs import minimal_spec

COUNTED = Census("X", 1, None, (Parameter("w", (1 << 30,), 0, False, ()),))


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = SimpleNamespace(folder=tmp_path, spec=minimal_spec("sft", train={"precision": "bf16"}))

    def free(gib: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(gib * 2**30)))

    free(13.9)  # 2^30 parameters: 12 GiB of weights and moments in fp32, 2 GiB of bf16
    with pytest.raises(StorageError, match=r"has 13.90 GiB free, .* takes 12.00 GiB and the export 2.00 GiB"):
        check_room(job, COUNTED)
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    check_room(job, COUNTED)  # the export replaces a checkpoint
    free(11.9)
    with pytest.raises(StorageError, match="11.90 GiB free"):
        check_room(job, COUNTED)
    free(0.005)
    small = Census("X", 1, None, (Parameter("w", (1 << 20,), 0, False, ()),))
    with pytest.raises(
        StorageError, match=r"has 5.12 MiB free, but a checkpoint takes 12.00 MiB and the export 2"
    ):
        check_room(job, small)


def test_the_export_of_a_multimodal_model_has_its_towers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of 2 GiB of text in bf16 and 3 GiB beside."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 * 2**30)
    spec = minimal_spec("sft", model={"name_or_path": str(tmp_path)}, train={"precision": "bf16"})
    job: Any = SimpleNamespace(folder=tmp_path, spec=spec)
    whole = PreTrainedConfig(dtype="bfloat16")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(16.9 * 2**30)))
    with pytest.raises(StorageError, match=r"takes 12.00 GiB and the export 5.00 GiB"):
        check_room(job, COUNTED, whole)
    check_room(job, COUNTED)
