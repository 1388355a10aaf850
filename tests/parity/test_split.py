"""Attention of rows that are split over ranks is that of the whole row, and a cut micro-batch is whole again
after the model: forward and backward, in float64."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import forked, on_the_cpu

WORKER = Path(__file__).with_name("split_worker.py")
ROUNDING = 1e-12


def test_split_rows_equal_whole_rows(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    with on_the_cpu():
        done = forked(WORKER, 4, [str(output)])
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, float]] = json.loads(output.read_text())
    assert {figure for figures in found.values() for figure in figures} == {
        *("output", "gradient", "adjoint", "gathered", "pulled")
    }
    beyond = {
        (name, figure): value
        for name, figures in found.items()
        for figure, value in figures.items()
        if not value <= (0.0 if figure in ("gathered", "pulled") else ROUNDING)
    }
    assert not beyond
