"""Report everything about a run through one object: to the terminal, to metrics.jsonl and logs/train.log in
the run's folder, to Weights & Biases, and to TensorBoard and SwanLab where the spec asks for them.

Only rank 0's report is enabled; on other ranks the same calls do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsft.report.console import Console
from dsft.report.jsonl import MetricsFile, Record, cut_margins
from dsft.report.sinks import BackgroundSink, open_sinks
from dsft.spec.schema import Spec
from dsft.system.files import write_error


class Report:
    """All outputs of a run; made by `open`. Raises StorageError where the run's folder cannot be written."""

    def __init__(
        self, console: Console | None, file: MetricsFile | None, sinks: Sequence[BackgroundSink]
    ) -> None:
        self._console, self._file, self._sinks = console, file, sinks

    @classmethod
    def open(
        cls,
        run_dir: Path,
        total_steps: int,
        resume_step: int,
        spec: Spec,
        config: Mapping[str, Any],
        *,
        enabled: bool,
    ) -> Report:
        """Open all outputs. resume_step: the optimizer step that this start resumes from, 0 for a new run;
        what an earlier start reported about later steps is removed. config: what W&B shows of the run,
        including `task`."""
        if not enabled:
            return cls(None, None, ())
        path = run_dir / "logs" / "train.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = path.open("a", encoding="utf-8")
        except OSError as error:
            raise write_error(path, error) from error
        file = MetricsFile(run_dir / "metrics.jsonl", resume_step)
        cut_margins(run_dir, resume_step)
        console = Console(total_steps, resume_step, log)
        return cls(console, file, open_sinks(spec, run_dir, resume_step, config, console.line))

    def line(self, text: str) -> None:
        """Print one decision or event, in a sentence."""
        if self._console is not None:
            self._console.line(text)

    def metrics(self, record: Record) -> None:
        """Record numbers under their W&B names, including train/global_step."""
        for output in (self._file, self._console, *self._sinks):
            if output is not None:
                output.metrics(record)

    def close(self, summary: Mapping[str, float]) -> None:
        """Close all outputs, once, whether the run succeeded or not. summary: the last values, for W&B."""
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            sink.close(summary)
        if self._console is not None:
            self._console.close()
