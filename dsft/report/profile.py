"""Trace one step of a run.

The file is in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dsft.errors import Problem, SpecError
from dsft.system.files import write_error

DEFAULT = 3  # the first steps of a start build caches, allocate and trace


def traced_step(step: int | None, first: int, last: int) -> int:
    """Return the step to trace between `first` and `last`: the one asked for, else the third, or the last if
    there are fewer. Raises SpecError where the one asked for is not among them."""
    if step is None:
        return min(first + DEFAULT - 1, last)
    if first <= step <= last:
        return step
    message = f"{step} is not a step of this start, which trains steps {first} to {last}; name one of them"
    raise SpecError("No step can be traced.", [Problem("--profile", message)])


class StepTrace:
    """The trace of one step. Called with a step's number, from 1, it returns a context, which records the
    trace if that is `step`, and has no effect otherwise. The trace is written to `path`; then `log` gets a
    line."""

    def __init__(self, run_dir: Path, step: int, log: Callable[[str], None]) -> None:
        self._step, self._log = step, log
        self.path = run_dir / "logs" / f"trace-step-{step}.json"

    def __call__(self, step: int) -> AbstractContextManager[object]:
        if step != self._step:
            return nullcontext()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities, on_trace_ready=self._write, record_shapes=True)

    def _write(self, trace: profile) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            failed = error if isinstance(error, OSError) else OSError(str(error))
            raise write_error(self.path, failed) from error
        self._log(f"trace of step {self._step}: {self.path}")
