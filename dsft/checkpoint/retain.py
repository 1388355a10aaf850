"""Which checkpoints stay: the newest ones, and the best ones, those with the lowest held-out loss.

Takes a run's folder after a commit; removes folders of `checkpoints/` and writes `best` beside them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from dsft.checkpoint.files import write_aside
from dsft.checkpoint.read import BEST, Checkpoint, step_folders, step_of
from dsft.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """keep_last: how many of the newest stay, None for all; keep_best: how many of the best stay too, None
    where none are chosen."""

    keep_last: int | None
    keep_best: int | None = None


def retain(run: Path, step: int, retention: Retention) -> list[str]:
    """Name the best one, then remove what neither is new nor good; the names of the removed.

    The checkpoint of `step`, just committed, always stays. A torn one does not count, nor does one that was
    saved while steps were being skipped in a row, so neither pushes out one that a run can go back to. One of
    a later step is left alone. OSError where `best` cannot be written; nothing is removed then.
    """
    folders = [path for path in step_folders(run) if step_of(path) <= step]
    best = _best_first(folders)[: retention.keep_best] if retention.keep_best is not None else []
    if best:
        write_aside(run / "checkpoints" / BEST, best[0].name.encode() + b"\n")
    else:
        (run / "checkpoints" / BEST).unlink(missing_ok=True)
    removed: list[str] = []
    kept = 0
    for path in folders:
        if retention.keep_last is None or kept < retention.keep_last:
            checkpoint = whole_by_size(path)
            kept += checkpoint is not None and checkpoint.nonfinite_in_a_row == 0
        elif path not in best:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


def best_checkpoint(run: Path) -> Checkpoint | None:
    """The one that `best` names, where there is one."""
    try:
        return Checkpoint.open(run / "checkpoints" / BEST)
    except CheckpointError:
        return None


def whole_by_size(path: Path) -> Checkpoint | None:
    """The checkpoint where all listed files are there with their sizes; digests are not read."""
    try:
        checkpoint = Checkpoint.open(path)
        files = checkpoint.files
        is_whole = all((path / name).stat().st_size == written.size for name, written in files.items())
    except (CheckpointError, OSError):
        return None
    return checkpoint if is_whole else None


def _best_first(folders: list[Path]) -> list[Path]:
    """The whole ones that were evaluated, by held-out loss; of equal ones the earlier."""
    found = []
    for path in folders:
        checkpoint = whole_by_size(path)
        if checkpoint is not None and checkpoint.held_out_loss is not None:
            found.append((checkpoint.held_out_loss, step_of(path), path))
    return [path for _, _, path in sorted(found)]
