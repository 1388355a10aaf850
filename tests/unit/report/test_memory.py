"""Memory figures, against memory that the test takes itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsft.report.memory import memory_record


def test_the_host_memory_of_this_process() -> None:
    before = memory_record(torch.device("cpu"))
    block = np.ones(64 * 2**20 // 8)  # 64 MiB, written
    during = memory_record(torch.device("cpu"))
    assert set(before) == {"memory/host_rss_gib", "memory/host_peak_rss_gib"}
    assert during["memory/host_rss_gib"] - before["memory/host_rss_gib"] == pytest.approx(0.0625, abs=0.02)
    del block
    after = memory_record(torch.device("cpu"))
    assert after["memory/host_peak_rss_gib"] >= during["memory/host_rss_gib"] - 0.01


@pytest.mark.gpu
def test_the_peak_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(2**28, device=device)  # 1 GiB, freed at once
    record = memory_record(device)
    assert record["memory/peak_allocated_gib"] >= 1.0
    assert record["memory/peak_reserved_gib"] >= record["memory/peak_allocated_gib"]
