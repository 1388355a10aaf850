"""The command `dsft preview`: takes a spec's path and what is asked for, prints, gives the exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dsft.errors import DataError
from dsft.plan.promised import load
from dsft.preview.collect import collect
from dsft.preview.mapping import as_mapping
from dsft.preview.terminal import Style, as_text
from dsft.preview.view import Wanted, view
from dsft.spec.unbuilt import unbuilt_in_data

ROWS, JSON_ROWS = 5, 100


def preview(
    spec_path: Path, overrides: Sequence[str], *, rows: int | None, row: str | None, as_json: bool
) -> None:
    """Print the preview. Raises DataError, after it, where a run would refuse the data."""
    spec = load(spec_path, overrides, check_files=False, not_built=unbuilt_in_data)
    found = collect(spec)
    seen = view(found, Wanted(rows if rows is not None else JSON_ROWS if as_json else ROWS, row))
    if as_json:
        print(json.dumps(as_mapping(seen), indent=2))
    else:
        print(as_text(seen, _style(), whole=row is not None), end="")
    if found.refusal is not None:
        raise DataError(found.refusal.title, found.refusal.problems)


def _style() -> Style:
    """Colours on a terminal that has them, unless NO_COLOR is set (no-color.org)."""
    terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Style(terminal, Console().width if terminal else None)
