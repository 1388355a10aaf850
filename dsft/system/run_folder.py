"""Find runs, their checkpoints and their exports by what a user names. This imports nothing heavy, so a
command says at once that there is none.

A run is a folder output_dir/NAME with checkpoints/step-N, the files checkpoints/latest and checkpoints/best,
which have the name of one of these, and export/.
"""

from __future__ import annotations

import re
from pathlib import Path

from dsft.errors import CheckpointError, MissingInputError
from dsft.system.json_file import read_text

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
MANIFEST = "MANIFEST.json"
LATEST = "latest"
BEST = "best"
ANSWERS = "answers.jsonl"  # of dsft answer
STEP = re.compile(r"step-(\d+)")
_PARTS = ("logs", "metrics.jsonl", "spec.yaml", LOCK, CHECKPOINTS)
_MODEL_FILES = ("config.json", "adapter_config.json")


def named_run(name: str) -> Path:
    """Return the folder of a run, given by its path or by its name in runs/. Raises MissingInputError."""
    run = _run(Path(name))
    if run is None:
        raise MissingInputError(f"{name} is neither the folder of a run nor the name of one; {_runs()}.")
    return run


def named_checkpoint(name: str | Path) -> Path:
    """Return the folder of a checkpoint: `name` itself, the one that a file `latest` or `best` names, or the
    newest of a run, which is given by its folder, its folder `checkpoints`, or its name in runs/. Raises
    CheckpointError."""
    path = Path(name)
    if path.name in (LATEST, BEST) and path.is_file():
        return _named_by(path)
    if (path / MANIFEST).is_file() or (path.is_dir() and STEP.fullmatch(path.name)):
        return path
    run = _run(path.parent if path.name == CHECKPOINTS else path)
    if run is not None:
        newest = newest_checkpoint(run)
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet.")
        return newest
    if path.name == BEST and path.parent.is_dir():
        raise CheckpointError(f"{path} does not exist; it is written if the spec has checkpoint.keep_best.")
    raise CheckpointError(
        f"{name} is neither a checkpoint, such as runs/NAME/checkpoints/step-100, nor a run; {_runs()}."
    )


def named_export(name: str | Path) -> Path:
    """Return the folder of a model or an adapter: `name` itself, or the export of a run, which is given by
    its folder or its name in runs/. Raises MissingInputError."""
    path = Path(name)
    if any((path / file).is_file() for file in _MODEL_FILES):
        return path
    run = _run(path)
    if run is not None:
        if not (run / "export").is_dir():
            raise MissingInputError(
                f"{run} has no export yet; dsft export {run} FOLDER makes one of its newest checkpoint."
            )
        return named_export(run / "export")
    if path.is_dir():
        raise MissingInputError(
            f"{name} has neither {' nor '.join(_MODEL_FILES)}; give an export, such as runs/NAME/export, or "
            "make one of a checkpoint with dsft export."
        )
    raise MissingInputError(f"{name} is neither a folder with an export nor the name of a run; {_runs()}.")


def newest_checkpoint(run: Path) -> Path | None:
    """Return the committed checkpoint with the highest step, unverified (see `dsft verify`); None if there is
    none."""
    return next((path for path in step_folders(run) if (path / MANIFEST).exists()), None)


def step_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step}"


def step_folders(run: Path) -> list[Path]:
    """Return the `step-N` folders of a run, newest first, whole or damaged."""
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if STEP.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return N of a folder step-N."""
    return int(path.name.removeprefix("step-"))


def _run(path: Path) -> Path | None:
    folders = (path, Path("runs", path))
    return next(filter(_is_run, folders), None)


def runs_below(folder: Path) -> list[Path]:
    """Return the runs whose folders are in a folder, by name; none of a folder that is itself a run."""
    return [] if _is_run(folder) else sorted(filter(_is_run, folder.glob("*")))


def _is_run(folder: Path) -> bool:
    return any((folder / part).exists() for part in _PARTS)


def _runs() -> str:
    runs = [path.name for path in runs_below(Path("runs"))]
    return f"runs/ has {', '.join(runs)}" if runs else "there is no run in runs/ of the current folder"


def _named_by(pointer: Path) -> Path:
    try:
        name = read_text(pointer, limit=100).strip()
    except (OSError, ValueError):
        name = ""
    if not STEP.fullmatch(name):
        raise CheckpointError(f"{pointer} does not name a checkpoint; give a folder step-N beside it.")
    return pointer.with_name(name)
