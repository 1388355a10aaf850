"""dsft from Python, for notebooks and scripts: `from dsft.api import load_spec, plan, train`.

Nothing here imports torch. `train` runs the command `dsft train` in processes of its own, so that the GPUs
are free again when it returns, whatever else the notebook does.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsft.errors import DsftError, Problem, SpecError
from dsft.plan.build import build_plan
from dsft.plan.show import as_mapping
from dsft.preview.count import durations
from dsft.report.jsonl import kept, parse_record
from dsft.spec.load import load_spec as load
from dsft.spec.schema import Spec
from dsft.system.process import die_with
from dsft.system.run_folder import newest_checkpoint, step_of

__all__ = ["DsftError", "Spec", "load_spec", "plan", "train"]

Record = Mapping[str, float]
TICK = 0.2  # seconds between two looks at the metrics
_COMMAND = "from dsft.cli import main; main()"


def load_spec(path: Path | str, *overrides: str) -> Spec:
    """Return the checked spec. Raises SpecError with all mistakes, MissingInputError if it cannot be read."""
    return load(path, overrides)


def plan(
    path: Path | str, *overrides: str, processes: int | None = None, like: str | None = None
) -> dict[str, Any]:
    """Return what `dsft plan SPEC --json` prints: batch, hours, layout, memory in bytes, traffic and
    DeepSpeed keys.

    processes: their number, for a spec without a cluster. like: a run whose speed is taken. Raises DsftError.
    """
    _check(processes)
    made = build_plan(load(path, overrides, check_files=False), processes)
    return as_mapping(made, durations(like)(made))


def train(
    path: Path | str,
    *overrides: str,
    processes: int | None = None,
    on_record: Callable[[Record], object] | None = None,
) -> Path:
    """Train a spec on this machine as `dsft train` does, print its lines, and return the run's folder.

    processes: their number, by default one per GPU. on_record: is called with each new record of the run's
    metrics.jsonl; if it raises, or the notebook is interrupted, the run saves a checkpoint and ends first.

    Raises DsftError, whose exit_code is that of the command, if the run does not reach its end.
    """
    _check(processes)
    spec = load(path, overrides)
    folder = Path(spec.output_dir, spec.name)
    records = _NewRecords(folder)
    argv = [sys.executable, "-c", _COMMAND, "train", str(path), *overrides]
    argv += ["--processes", str(processes)] if processes else []
    parent = os.getpid()
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, preexec_fn=lambda: die_with(parent),
    )  # fmt: skip
    message, continues = f"the run failed; its logs are in {folder / 'logs'}", False
    try:
        for line in _lines(process):
            if line.startswith("error: "):
                message, continues = line.removeprefix("error: ").rstrip(), True
            elif line and continues:  # the lines of a message after its first are indented
                continues = line.startswith("  ")
                message += f"\n{line.rstrip()}" * continues
            print(line, end="")
            for record in records.read():
                if on_record is not None:
                    on_record(record)
    except BaseException:  # a KeyboardInterrupt too; raised again when the run has saved
        print("stopping: the run saves a checkpoint first")
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if process.returncode:
        error = DsftError(message)
        error.exit_code = process.returncode
        raise error
    return folder


def _check(processes: int | None) -> None:
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        problem = Problem("processes", f"{processes!r} is no integer from 1; leave it out for the default")
        raise SpecError("The arguments cannot be used.", [problem])


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield what the process prints, line by line, and an empty text every TICK seconds, until it has ended
    and once more."""
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    stream = process.stdout

    def read() -> None:
        with stream:
            for line in stream:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=TICK)
        except queue.Empty:
            line = ""
        if line is None:
            break
        yield line
    process.wait()
    yield ""


class _NewRecords:
    """The records that a start of the run adds to metrics.jsonl. One that resumes replaces the file first if
    it has later records than the checkpoint."""

    def __init__(self, folder: Path) -> None:
        newest = newest_checkpoint(folder)
        self._path = folder / "metrics.jsonl"
        remaining = kept(self._path, step_of(newest) if newest else 0).encode()
        self._offset = len(remaining)
        self._replaced = self._path.stat() if self._path.exists() else None
        if self._replaced is not None and self._replaced.st_size == self._offset:
            self._replaced = None

    def read(self) -> Iterator[Record]:
        """Yield the records since the last call. Incomplete lines are left for the next one."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            before, now = self._replaced, os.fstat(file.fileno())
            if before is not None and before.st_ino == now.st_ino:
                return
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                record = parse_record(line.decode("utf-8", "replace"))
                if record is not None:
                    yield record
