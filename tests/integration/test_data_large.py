"""A file of 5 GB, larger than what a run may hold in memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.data import read_in_turn, write_documents


@pytest.mark.long
def test_five_gigabytes(tmp_path: Path) -> None:
    path, folder = tmp_path / "large.jsonl", tmp_path / "cache"
    rows = write_documents(path, 5_000_000_000)
    time.sleep(3)  # the digest of a file that was written just now is not remembered
    made = read_in_turn(path, folder, workers=2)
    there = read_in_turn(path, folder, workers=2)
    assert made["examples"] == there["examples"] >= rows
    assert made["tokens"] == there["tokens"]
    assert max(made["resident"], there["resident"]) < 500
    assert there["start_seconds"] < 2
