"""Which settings are taken, and that a disk is measured once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from dsft.engine import aio


def test_the_fastest_on_the_slowest_disk() -> None:
    """Of two hosts, one of which is slow with the settings that are best for the other."""
    quick = [(1e9, 1e9)] * len(aio.SETTINGS)
    quick[2], quick[4] = (9e9, 9e9), (4e9, 4e9)
    slow = [(1e9, 1e9)] * len(aio.SETTINGS)
    slow[2], slow[4] = (1e8, 9e9), (2e9, 2e9)
    assert aio.fastest([quick]) == 2
    assert aio.fastest([quick, slow]) == 4
    assert aio.fastest([[(1e9, 1e9)] * len(aio.SETTINGS)]) == 0, "DeepSpeed's own where none is faster"


def test_a_disk_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured = []

    def measure(folder: Path) -> list[aio.Rates]:
        measured.append(folder)
        return [(float(index), 2.0) for index in range(len(aio.SETTINGS))]

    monkeypatch.setattr(aio, "measure", measure)
    first, second = aio.rates(tmp_path), aio.rates(tmp_path)
    assert (first[1], second[1]) == (True, False) and first[0] == second[0] and len(measured) == 1
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text("{")
    assert aio.rates(tmp_path)[1], "what cannot be read is measured again"
    monkeypatch.setattr(aio, "SETTINGS", aio.SETTINGS[:2])
    assert aio.rates(tmp_path)[1], "so is what other settings were measured of"
