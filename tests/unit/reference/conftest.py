"""Rows and a model of a small preference run."""

from pathlib import Path

import pytest

from tests.unit.reference.small import model, rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model, 5 pairs in a.jsonl and 2 held-out ones in b.jsonl."""
    model(tmp_path / "model")
    rows(tmp_path / "a.jsonl", 5)
    rows(tmp_path / "b.jsonl", 2, "held out")
    return tmp_path
