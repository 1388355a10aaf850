"""Report everything about a run through one object: to the terminal, to metrics.jsonl and logs/train.log in
the run's folder, and to Weights & Biases, TensorBoard and SwanLab, which write wandb.json, wandb/,
tensorboard/ and swanlog/ there.

Those three neither slow nor stop a run: each has a thread of its own, an error is reported in one line, and
metrics.jsonl has everything in any case. Their packages are imported only where a spec asks for them.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dsft.report.console import Console
from dsft.report.jsonl import STEP, MetricsFile, Record, cut_margins
from dsft.report.wandb_run import FINISH_SECONDS, WandbSink, mode_of, section_of
from dsft.spec.schema import Spec, SwanLab
from dsft.system.files import write_error
from dsft.system.redact import one_line, redact_tree

PROBES = ("hardware", "runtime", "requirements", "conda", "git", "monitor")
"""Facts about the machine that SwanLab would record; all are switched off."""


Log = Callable[[str], None]
"""Takes one line of text, from any thread."""


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self, summary: Mapping[str, float]) -> None: ...


class BackgroundSink:
    """A sink that runs in its own thread. `make` is called there, with a function for lines to the user; an
    error there is reported in one line, and the run goes on. rest: what to do about records that are not
    written at the end."""

    def __init__(self, name: str, make: Callable[[Log], Sink], log: Log, rest: str = "") -> None:
        self._name, self._make, self._report, self._rest = name, make, log, rest
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._summary: Mapping[str, float] = {}
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def metrics(self, record: Record) -> None:
        """Queue a record, and return at once."""
        self._queue.put(dict(record))

    def close(self, summary: Mapping[str, float]) -> None:
        """Wait until the last records are written, for FINISH_SECONDS at most. summary: the last values."""
        self._summary = dict(summary)
        self._queue.put(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._abandoned = True
            self._report(
                f"{self._name}: not finished after {FINISH_SECONDS:.0f} s; the run ends without waiting for "
                f"it. metrics.jsonl has everything{self._rest}."
            )

    def _run(self) -> None:
        try:
            sink = self._make(self._log)
            while (record := self._queue.get()) is not None:
                sink.write(record)
            sink.close(self._summary)
        except Exception as error:  # noqa: B902  no error here may stop training
            self._log(f"{self._name}: stopped, {one_line(error)}; metrics.jsonl has everything.")

    def _log(self, text: str) -> None:
        if not self._abandoned:  # after close the run's outputs are closed too
            self._report(text)


class Report:
    """All outputs of a run; made by `open`. Only rank 0's is enabled; on other ranks the same calls do
    nothing. Raises StorageError where the run's folder cannot be written."""

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


def open_sinks(
    spec: Spec, run_dir: Path, resume_step: int, config: Mapping[str, Any], log: Log
) -> list[BackgroundSink]:
    """Open the sinks that the spec asks for. resume_step: the step that this start resumes from; config: what
    is shown of the run; secrets are removed here."""
    sinks = []
    shown = redact_tree(config, os.environ)
    wandb = section_of(spec.wandb, os.environ)
    mode = "disabled" if wandb is None else mode_of(wandb, os.environ)
    if wandb is not None and mode == "offline" and wandb.mode == "online":
        log("W&B: wandb.mode is online, but there is no key (WANDB_API_KEY, wandb login); recording offline.")
    if wandb is not None and mode != "disabled":
        rest = ", and `wandb sync` sends what is in the run's wandb folder"
        run = partial(WandbSink, wandb, run_dir, shown, mode)
        sinks.append(BackgroundSink("W&B", run, log, rest))
    if spec.tensorboard:
        folder = run_dir / "tensorboard"
        sinks.append(BackgroundSink("TensorBoard", lambda _: _TensorBoard(folder, resume_step), log))
    section = spec.swanlab
    if section is not None:
        sinks.append(BackgroundSink("SwanLab", lambda _: _SwanLab(section, run_dir, shown), log))
    return sinks


class _TensorBoard:
    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard ignores what an earlier start wrote about later steps.
        self._writer: Any = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name != STEP:
                self._writer.add_scalar(name, value, int(record[STEP]))
        self._writer.flush()

    def close(self, summary: Mapping[str, float]) -> None:
        self._writer.close()


class _SwanLab:
    def __init__(self, section: SwanLab, run_dir: Path, config: dict[str, Any]) -> None:
        import swanlab

        mode = section.mode
        if mode == "auto":
            mode = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
        self._run: Any = swanlab.init(
            project=section.project,
            workspace=section.workspace,
            name=run_dir.name,
            mode=mode,
            log_dir=str(run_dir / "swanlog"),
            config=config,
            # Records no command line, machine or code, and asks nothing on a terminal.
            settings=swanlab.Settings(
                interactive=False,
                terminal={"proxy_type": "none"},
                probe=dict.fromkeys(PROBES, False),
            ),
        )

    def write(self, record: Record) -> None:
        step = int(record[STEP])
        self._run.log({name: v for name, v in record.items() if name != STEP and math.isfinite(v)}, step=step)

    def close(self, summary: Mapping[str, float]) -> None:
        self._run.finish()
