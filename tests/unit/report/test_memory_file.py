"""memory.json from given peaks: the largest over ranks, beside the plan's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsft.plan.memory.sizes import GIB
from dsft.report.memory import MemoryFile, MemoryMeter, compared


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
    assert "memory/load/host_rss_gib" not in file.record(), "told once"
    assert "memory/host_rss_gib" in file.record()


@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        ((100, None, 0), {"measured": 100}),
        ((100, 0, 30), {"measured": 100, "above_start": 70}),
        ((100, 140, 30), {"measured": 100, "above_start": 70, "planned": 140, "error": -0.5}),
    ],
)
def test_the_error_is_of_what_the_model_took(arguments: Any, figures: dict[str, float]) -> None:
    assert compared(*arguments) == figures
