"""Report everything about a run through one object: to the terminal, to metrics.jsonl and logs/train.log in
the run's folder, to Weights & Biases, and to TensorBoard and SwanLab where the spec asks for them.

Only rank 0's report is enabled; on other ranks the same calls do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.report.console import Console
from dsft.report.jsonl import MetricsFile, Record
from dsft.report.margins import cut_margins
from dsft.report.sinks import Aside, open_sinks
from dsft.report.wandb_run import WandbRun
from dsft.spec.schema import Spec
from dsft.system.files import write_error


@dataclass(frozen=True)
class _Outputs:
    console: Console
    file: MetricsFile
    wandb: WandbRun
    sinks: Sequence[Aside]


class Report:
    """All outputs of a run; made by `open`. Raises StorageError where the run's folder cannot be written."""

    def __init__(self, outputs: _Outputs | None) -> None:
        self._outputs = outputs

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
            return cls(None)
        path = run_dir / "logs" / "train.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = path.open("a", encoding="utf-8")
        except OSError as error:
            raise write_error(path, error) from error
        file = MetricsFile(run_dir / "metrics.jsonl", resume_step)
        cut_margins(run_dir, resume_step)
        console = Console(total_steps, resume_step, log)
        wandb = WandbRun(spec.wandb, run_dir, config, console.line)
        sinks = open_sinks(spec, run_dir, resume_step, config, console.line)
        return cls(_Outputs(console, file, wandb, sinks))

    def line(self, text: str) -> None:
        """Print one decision or event, in a sentence."""
        if self._outputs is not None:
            self._outputs.console.line(text)

    def metrics(self, record: Record) -> None:
        """Record numbers under their W&B names, including train/global_step."""
        if self._outputs is not None:
            self._outputs.file.metrics(record)
            self._outputs.console.metrics(record)
            self._outputs.wandb.metrics(record)
            for sink in self._outputs.sinks:
                sink.metrics(record)

    def close(self, summary: Mapping[str, float]) -> None:
        """Close all outputs, once, whether the run succeeded or not. summary: the last values, for W&B."""
        if self._outputs is not None:
            self._outputs.file.close()
            self._outputs.wandb.close(summary)
            for sink in self._outputs.sinks:
                sink.close()
            self._outputs.console.close()
