"""Decide which checkpoints to retain after a commit: the newest ones, and the best ones, i.e. those with the
lowest held-out loss. Remove the others, and point `best` to the best one."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsft.checkpoint.files import write_aside
from dsft.checkpoint.read import CheckpointReader
from dsft.errors import CheckpointError
from dsft.spec.schema import Checkpoint
from dsft.system.run_folder import BEST, step_folders, step_of


def retain(run: Path, step: int, retention: Checkpoint) -> list[str]:
    """Point `best` to the best checkpoint, then remove those that are neither among the `keep_last` newest
    nor among the `keep_best` best. Return the names of the removed ones.

    The checkpoint of `step`, just committed, is always retained. Two kinds do not count among the newest, so
    that they cannot displace one that a run can resume from: damaged ones, and those saved in the middle of a
    series of skipped steps. A checkpoint of a later step is left alone. Raises OSError where `best` cannot be
    written; nothing is removed then.
    """
    folders = [path for path in step_folders(run) if step_of(path) <= step]
    best = _best_first(folders)[: retention.keep_best] if retention.keep_best is not None else []
    if best:
        write_aside(run / "checkpoints" / BEST, best[0].name.encode() + b"\n")
    else:
        (run / "checkpoints" / BEST).unlink(missing_ok=True)
    removed: list[str] = []
    num_newest = 0
    for path in folders:
        if retention.keep_last is None or num_newest < retention.keep_last:
            checkpoint = whole_by_size(path)
            num_newest += checkpoint is not None and checkpoint.nonfinite_in_a_row == 0
        elif path not in best:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


def best_checkpoint(run: Path) -> CheckpointReader | None:
    """Return the checkpoint that `best` names; None where there is none."""
    try:
        return CheckpointReader.open(run / "checkpoints" / BEST)
    except CheckpointError:
        return None


def whole_by_size(path: Path) -> CheckpointReader | None:
    """Return the checkpoint if all listed files exist with their listed sizes, else None; digests are not
    checked."""
    try:
        checkpoint = CheckpointReader.open(path)
        files = checkpoint.files
        is_whole = all((path / name).stat().st_size == written.size for name, written in files.items())
    except (CheckpointError, OSError):
        return None
    return checkpoint if is_whole else None


def _best_first(folders: list[Path]) -> list[Path]:
    """Return the whole checkpoints that were evaluated, lowest held-out loss first, and the earlier of two
    equal ones."""
    found = []
    for path in folders:
        checkpoint = whole_by_size(path)
        if checkpoint is not None and checkpoint.held_out_loss is not None:
            found.append((checkpoint.held_out_loss, step_of(path), path))
    return [path for _, _, path in sorted(found)]
