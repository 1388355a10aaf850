"""Compares what is cached with a golden file, so that a cache's VERSION is raised with its content."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def check_version(
    golden: Path, version: int, where: str, found: Mapping[str, str], libraries: Sequence[str] = ()
) -> None:
    """Fail unless `found`, a digest of what each case gives, is what the golden file says of this version.

    where: the module of VERSION. libraries: whose versions are part of the cache's key; with others than the
    file's the test is skipped. DSFT_UPDATE_GOLDEN=1 writes the file, once VERSION is raised.
    """
    known: dict[str, Any] = {"version": 0, "libraries": {}, "cases": {}}
    if golden.exists():
        known = json.loads(golden.read_text(encoding="utf-8"))
    now = {
        "version": version,
        "libraries": {name: importlib.metadata.version(name) for name in libraries},
        "cases": dict(found),
    }
    is_update = bool(os.environ.get("DSFT_UPDATE_GOLDEN"))
    if known["libraries"] != now["libraries"] and not is_update:
        pytest.skip(f"{golden.name} is of {known['libraries']}")
    if known["libraries"] == now["libraries"] and version <= known["version"]:
        changed = [name for name in known["cases"] if found.get(name) != known["cases"][name]]
        assert not changed, (
            f"{', '.join(changed)}: another result than version {known['version']} cached. Raise VERSION in "
            f"{where} and update the golden file with DSFT_UPDATE_GOLDEN=1, or undo the change"
        )
    if is_update:
        golden.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    elif known != now:
        raise AssertionError(f"{golden.name} is of another version, or lacks a case: DSFT_UPDATE_GOLDEN=1")
