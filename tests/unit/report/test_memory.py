"""Memory figures, against memory that the test takes itself."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from dsft.errors import StorageError
from dsft.plan.memory.sizes import GIB
from dsft.report import memory
from dsft.report.memory import RESET, SAMPLED, MemoryMeter, largest, write_memory

CPU = torch.device("cpu")
MIB = 2**20


def take(mebibytes: int) -> np.ndarray:
    """Pages of their own, which go back when the array does: malloc may keep what is freed."""
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


def test_the_largest_over_ranks() -> None:
    ranks = [
        {"load": {"host_rss": 5, "device_allocated": 1}},
        {"load": {"host_rss": 3, "device_allocated": 2}},
    ]
    assert largest(ranks) == {"load": {"host_rss": 5, "device_allocated": 2}}  # type: ignore[arg-type]


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    write_memory(path, {"phases": {}})
    write_memory(path, {"phases": {"load": 1}})
    assert json.loads(path.read_text()) == {"phases": {"load": 1}}
    assert [file.name for file in tmp_path.iterdir()] == ["memory.json"]
    with pytest.raises(StorageError):
        write_memory(tmp_path / "none" / "memory.json", {})


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
