"""Print a run's lines and metrics and the progress of longer tasks: with a progress bar on a terminal, as
plain lines elsewhere.

A log file gets the plain lines in either case.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Protocol

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dsft.report.jsonl import STEP
from dsft.system.files import write_error
from dsft.system.process import EVERY_STEP, is_set, is_verbose

EVERY_SECONDS = 10.0
STEPS_PER_LINE = 10  # steps for a line of output that is no terminal
STEP_SECONDS = 30.0  # or after so long without one

_BAR = 20  # characters
_LEAST_IMPORTANT = ("lr ", "grad norm ", "[━─]", "margin ", "accuracy ", ".* tokens/s")
"""Beginnings of the parts of a line of a step that a narrow terminal leaves out, in this order."""

METRICS = {
    "loss": "loss {:.4f}",
    "perplexity": "perplexity {:.4g}",
    "rewards/accuracies": "accuracy {:.3f}",
    "accuracy": "accuracy {:.3f}",
    "rewards/margins": "margin {:.3g}",
    "grad_norm": "grad norm {:.3g}",
    "learning_rate": "lr {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
}
"""The metrics that a line shows, rounded, by name without train/, eval/ or perf/; metrics.jsonl has all."""
PLOTTED = ("rewards/margins", "rewards/accuracies", "accuracy", "kl", "kd_loss")
"""Those that have an axis of curves.png beside loss, learning rate and gradient norm."""


class Console:
    """The terminal output of rank 0. total_steps and first_step are optimizer steps: the last of the run, and
    the one that this start resumes from."""

    def __init__(
        self, total_steps: int, first_step: int, log: IO[str] | None = None, terminal: Terminal | None = None
    ) -> None:
        self._total = total_steps
        self._first = first_step
        self._began = time.monotonic()
        self._log = log
        self._lock = threading.Lock()  # other threads, such as W&B's, print too; keeps lines whole
        self._terminal = terminal or Terminal()
        self._shown = first_step, -math.inf  # the last step that was printed, and when
        self._every = is_verbose() or is_set(EVERY_STEP)
        self._bar = Progress(TextColumn("{task.description}", markup=False), console=self._terminal)
        self._task = self._bar.add_task("")

    def line(self, text: str) -> None:
        """Print and log a line; from any thread."""
        with self._lock:
            self._print(text)
            self._write(text)

    def metrics(self, record: Mapping[str, float]) -> None:
        step = int(record[STEP])
        known = facts(record, "train") + facts(record, "perf") + facts(record, "eval", "held-out ")
        where, shown = f"step {step}/{self._total}", "  ".join(known)
        if "train/loss" not in record:  # an evaluation has its own line
            self.line(f"{where}  {shown}")
            return
        remaining = self._remaining(step)
        left = "" if remaining is None else f"  {remaining} left"
        with self._lock:
            if self._terminal.is_terminal:
                self._bar.start()  # it appears with the first record
                line = with_bar(f"{where}  {shown}{left}", step, self._total, self._terminal.width)
                self._bar.update(self._task, description=line)
            elif self._is_due(step):
                self._print(f"{where}  {shown}{left}")
            self._write(f"{where}  {shown}")

    def _is_due(self, step: int) -> bool:
        """Return whether a step gets a line where there is no bar: the first and the last, every tenth, and
        after STEP_SECONDS without a line; every step with -v and below a launcher on a terminal."""
        before, printed = self._shown
        tenth = step // STEPS_PER_LINE > before // STEPS_PER_LINE
        late = time.monotonic() - printed > STEP_SECONDS  # true for the first
        is_due = tenth or late or step >= self._total or self._every
        if is_due:
            self._shown = step, time.monotonic()
        return is_due

    def close(self) -> None:
        if self._terminal.is_terminal:
            self._bar.stop()
        if self._log is not None:
            with suppress(OSError):  # `_write` has reported the error
                self._log.close()
            self._log = None

    def _print(self, text: str) -> None:
        """Print above the bar, if there is one."""
        if self._terminal.is_terminal:
            self._terminal.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._terminal.file, flush=True)

    def _remaining(self, step: int) -> timedelta | None:
        """Estimate the remaining time from the mean pace of this start; None before its first step is done
        and after the last."""
        if not self._first < step < self._total:
            return None
        pace = (time.monotonic() - self._began) / (step - self._first)
        return timedelta(seconds=round(pace * (self._total - step)))

    def _write(self, text: str) -> None:
        if self._log is not None:
            try:
                self._log.write(text + "\n")
                self._log.flush()
            except OSError as error:
                raise write_error(Path(self._log.name), error) from error


def facts(record: Mapping[str, float], part: str, before: str = "") -> list[str]:
    """Return the metrics of train, perf or eval that a record has, each with `before` before it, and the loss
    of each evaluation set, from `eval/NAME/loss`."""
    named = {f"{part}/{name}": before + form for name, form in METRICS.items()}
    of_set = re.compile(f"{part}/(.+)/loss").fullmatch
    found = [form.format(record[key]) for key, form in named.items() if key in record]
    return found + [f"{match[1]} {record[key]:.4f}" for key in record if (match := of_set(key))]


def with_bar(line: str, step: int, total: int, columns: int) -> str:
    """Return a step's line behind a bar, without its least important parts where it does not fit into the
    columns of the terminal. Step, loss and remaining time always stay."""
    done = _BAR * step // max(1, total)
    parts = [f"{'━' * done}{'─' * (_BAR - done)}", *line.split("  ")]
    for beginning in _LEAST_IMPORTANT:
        if len("  ".join(parts)) > columns:
            parts = [part for part in parts if not re.match(beginning, part)]
    return "  ".join(parts)


class TaskProgress(Protocol):
    """Progress of a task: its name, what is done, and the total."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    def text(self, seconds: float) -> str:
        """Describe the progress, `seconds` after the task began."""
        ...

    def count(self) -> str:
        """Describe how much is done of the total."""
        ...


@contextmanager
def task_progress(
    log: Callable[[str], None], terminal: Terminal | None = None, *, first: bool = True
) -> Iterator[Callable[[TaskProgress], None]]:
    """Give the block a function to call with the progress of a task. On a terminal it updates a progress bar,
    which only the `first` rank draws, above which `log` prints, and which disappears at the end. Elsewhere
    `log` gets a line every EVERY_SECONDS, the first after the same time, so that a quick task prints
    nothing."""
    terminal = terminal or Terminal()
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    is_shown = first and terminal.is_terminal
    bar = Progress(*columns, console=terminal, transient=True) if is_shown else None
    task = None if bar is None else bar.add_task("", total=None)
    name: str | None = None
    began = logged = 0.0

    def report(progress: TaskProgress) -> None:
        nonlocal name, began, logged
        now = time.monotonic()
        if progress.name != name:
            name, began, logged = progress.name, now, now
        text = progress.text(now - began)
        if bar is not None and task is not None:
            bar.start()
            bar.update(task, completed=progress.done, total=progress.total, description=text)
        elif now - logged >= EVERY_SECONDS:
            logged = now
            log(f"{text}, {progress.count()}")

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()
