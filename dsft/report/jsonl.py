"""Write and read metrics.jsonl, the complete record of a run, and margins/step-N.jsonl, the margin of each
held-out pair at an evaluation: one JSON object per line.

Floats are written unrounded (in the shortest form that reads back as the same float). NaN and infinities are
written as the strings "NaN", "Infinity" and "-Infinity", which `float()` reads, since JSON has no such
numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dsft.system.files import atomic_write, write_error
from dsft.system.json_file import open_file, parse_json

Record = Mapping[str, float]
STEP = "train/global_step"
MARGINS = "margins"
LONGEST = 2**20
"""Maximum bytes of a line that is read; usual ones have less than a thousand."""


class MetricsFile:
    """metrics.jsonl, open for appending. Raises StorageError where it cannot be written."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file, and drop lines after `resume_step` and incomplete lines: they will be written
        again."""
        self._path = path
        try:
            _cut(path, resume_step)
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise write_error(path, error) from error

    def metrics(self, record: Record) -> None:
        """Write one line and flush it, so that a kill right afterwards loses nothing. The record has its
        step."""
        if STEP not in record:
            raise ValueError(f"a record without {STEP}: {sorted(record)}")
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        with suppress(OSError):  # `metrics` has reported the error; closing tries once more to write the rest
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all whole records in order; none where there is no file. Other lines are ignored. Raises OSError
    where it cannot be read or is no regular file."""
    if not path.exists():
        return []
    with open_file(path) as file:
        lines = (line.decode("utf-8", "replace") for line in iter(lambda: file.readline(LONGEST), b""))
        return [record for record in map(parse_record, lines) if record is not None]


def _line(row: Mapping[str, float | str | None]) -> str:
    return json.dumps(written(dict(row)), ensure_ascii=False, allow_nan=False) + "\n"


def written(value: Any) -> Any:
    """Return the value as JSON can represent it: numbers that are not finite as text."""
    if isinstance(value, dict):
        return {key: written(one) for key, one in value.items()}
    if isinstance(value, list):
        return [written(one) for one in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def parse_record(line: str) -> dict[str, float] | None:
    """Return the record of a line; None if the line is incomplete or is no record."""
    try:
        entries = parse_json(line)
        record = {name: v if isinstance(v, int) else float(v) for name, v in entries.items()}
    except (ValueError, AttributeError, TypeError):
        return None
    return record if isinstance(record.get(STEP), int) else None


def kept(path: Path, resume_step: int) -> str:
    """Return what a run that resumes at `resume_step` leaves in the file. Raises OSError."""
    return "".join(_line(record) for record in read_metrics(path) if record[STEP] <= resume_step)


def _cut(path: Path, resume_step: int) -> None:
    if not path.exists():
        return
    remaining = kept(path, resume_step)
    if remaining == path.read_text(encoding="utf-8", errors="replace"):
        return
    with atomic_write(path) as file:
        file.write(remaining.encode())


def write_margins(run_dir: Path, step: int, rows: Iterable[Mapping[str, float | str | None]]) -> Path:
    """Write row by row, so that memory does not grow with their number. Raises StorageError."""
    path = run_dir / MARGINS / f"step-{step}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.writelines(_line(row).encode() for row in rows)
    except OSError as error:
        raise write_error(path, error) from error
    return path


def cut_margins(run_dir: Path, resume_step: int) -> None:
    """Remove the files of steps after `resume_step`, which will be written again. Raises StorageError."""
    for path in sorted((run_dir / MARGINS).glob("step-*.jsonl")):
        found = re.fullmatch(r"step-(\d+)\.jsonl", path.name)
        if found and int(found[1]) > resume_step:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise write_error(path, error) from error
