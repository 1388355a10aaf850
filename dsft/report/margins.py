"""Write the margin of each held-out pair to margins/step-N.jsonl in the run's folder.

There is one file per evaluation, replaced as a whole, with one object per line; numbers as in metrics.jsonl.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsft.report.jsonl import written
from dsft.system.files import atomic_write, write_error

FOLDER = "margins"


def write_margins(run_dir: Path, step: int, rows: Iterable[Mapping[str, float | str | None]]) -> Path:
    """Write row by row, so that memory does not grow with their number. Raises StorageError."""
    path = run_dir / FOLDER / f"step-{step}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.writelines(_line(row).encode() for row in rows)
    except OSError as error:
        raise write_error(path, error) from error
    return path


def cut_margins(run_dir: Path, resume_step: int) -> None:
    """Remove the files of steps after `resume_step`, which will be written again. Raises StorageError."""
    for path in sorted((run_dir / FOLDER).glob("step-*.jsonl")):
        found = re.fullmatch(r"step-(\d+)\.jsonl", path.name)
        if found and int(found[1]) > resume_step:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise write_error(path, error) from error


def _line(row: Mapping[str, float | str | None]) -> str:
    values = {name: written(value) if isinstance(value, float) else value for name, value in row.items()}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"
