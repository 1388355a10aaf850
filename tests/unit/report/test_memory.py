"""Peaks of memory by phase, against memory that the test allocates, and memory.json."""

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsft.errors import StorageError
from dsft.plan.memory.sizes import GIB
from dsft.report import memory
from dsft.report.memory import RESET, SAMPLED, MemoryFile, MemoryMeter, compared

CPU = torch.device("cpu")
MIB = 2**20


def take(mebibytes: int) -> np.ndarray:
    """Return pages of their own, which are freed with the array: malloc may retain what is freed."""
    pages = np.frombuffer(mmap.mmap(-1, mebibytes * MIB))
    pages[:] = 1
    return pages


def test_each_phase_has_its_own_peak_and_the_record_has_the_largest() -> None:
    meter = MemoryMeter(CPU)
    if meter.method != RESET:
        pytest.skip("this kernel does not let a process set its peak back")
    before = meter.used()
    meter.enter("load")
    block = take(96)
    del block
    meter.enter("steady")
    block = take(32)
    during = meter.record()
    del block
    meter.enter("save")
    assert meter.peaks["load"]["host_rss"] - before == pytest.approx(96 * MIB, abs=16 * MIB)
    assert meter.peaks["steady"]["host_rss"] - before == pytest.approx(32 * MIB, abs=16 * MIB)
    assert set(during) == {"memory/host_rss_gib", "memory/host_peak_rss_gib"}
    assert during["memory/host_peak_rss_gib"] == meter.peaks["load"]["host_rss"] / GIB
    assert during["memory/host_rss_gib"] * GIB - before == pytest.approx(32 * MIB, abs=16 * MIB)


def test_a_phase_that_comes_again_keeps_its_largest_peak() -> None:
    meter = MemoryMeter(CPU)
    meter.enter("save")
    block = take(64)
    meter.record()
    meter.enter("steady")
    first = meter.peaks["save"]["host_rss"]
    del block
    meter.enter("save")
    meter.enter("steady")
    assert meter.peaks["save"]["host_rss"] == first


def test_without_a_reset_the_peak_is_the_largest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CLEAR", Path("/nowhere/clear_refs"))
    meter = MemoryMeter(CPU)
    assert meter.method == SAMPLED
    before = meter.used()
    block = take(64)
    meter.record()
    del block
    meter.enter("load")
    assert meter.peaks["start"]["host_rss"] - before == pytest.approx(64 * MIB, abs=16 * MIB)
    meter.enter("save")
    assert meter.peaks["load"]["host_rss"] < meter.peaks["start"]["host_rss"] - 32 * MIB


def test_the_file_has_each_phase_with_the_plans_figure_and_the_error(tmp_path: Path) -> None:
    meter = MemoryMeter(torch.device("cpu"))

    def gather(mine: Any) -> list[Any]:
        other = {phase: {"host_rss": 4 * GIB, "device_allocated": 10 * GIB} for phase in mine}
        return [mine, other | {"start": {"host_rss": 2 * GIB}}]

    planned = {"load": {"host_rss": GIB, "device_allocated": 8 * GIB}}
    file = MemoryFile(tmp_path, meter, gather, planned)  # type: ignore[arg-type]
    file.enter("load")
    file.enter("steady")
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["host_rss"] == meter.method and "2 rank(s)" in found["unit"]
    assert found["phases"]["start"] == {"host_rss": 2 * GIB}
    assert found["phases"]["load"] == {
        "host_rss": {"measured": 4 * GIB, "above_start": 2 * GIB, "planned": GIB, "error": 1.0},
        "device_allocated": {"measured": 10 * GIB, "planned": 8 * GIB, "error": 0.25},
    }
    assert found["ranks"][1]["load"] == {"host_rss": 4 * GIB, "device_allocated": 10 * GIB}
    record = file.record()
    assert record["memory/load/host_rss_gib"] == 4.0 and record["memory/load/device_allocated_gib"] == 10.0
    assert "memory/load/host_rss_gib" not in file.record(), "reported once"
    assert "memory/host_rss_gib" in file.record()
    assert [path.name for path in tmp_path.iterdir()] == ["memory.json"]
    with pytest.raises(StorageError):
        MemoryFile(tmp_path / "none", meter, gather, {}).enter("save")


@pytest.mark.parametrize(("arguments", "figures"), [
    ((100, None, 0), {"measured": 100}),
    ((100, 0, 30), {"measured": 100, "above_start": 70}),
    ((100, 140, 30), {"measured": 100, "above_start": 70, "planned": 140, "error": -0.5}),
])  # fmt: skip
def test_the_error_is_of_what_the_model_took(arguments: Any, figures: dict[str, float]) -> None:
    assert compared(*arguments) == figures


@pytest.mark.gpu
def test_the_peak_of_a_gpu() -> None:
    meter = MemoryMeter(torch.device("cuda", 0))
    meter.enter("first_step")
    torch.zeros(2**28, device="cuda")  # 1 GiB, freed at once
    meter.enter("steady")
    assert meter.peaks["first_step"]["device_allocated"] >= GIB
    assert meter.peaks["first_step"]["device_reserved"] >= meter.peaks["first_step"]["device_allocated"]
    assert meter.record()["memory/peak_allocated_gib"] >= 1.0
    assert meter.running()["device_allocated"] < GIB
