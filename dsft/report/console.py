"""What rank 0 says: takes lines and records, gives a progress bar on a terminal and plain lines elsewhere.

Writes to standard output and to one log file, which gets the plain lines in either case.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Protocol

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dsft.report.jsonl import STEP
from dsft.system.files import write_error


class Console:
    """total_steps and first_step are optimizer steps: where the run ends, and where this start began."""

    def __init__(
        self, total_steps: int, first_step: int, log: IO[str] | None = None, terminal: Terminal | None = None
    ) -> None:
        self._total = total_steps
        self._first = first_step
        self._began = time.monotonic()
        self._log = log
        self._alone = threading.Lock()  # threads of W&B and others speak too; no line runs into another
        terminal = terminal or Terminal()
        self._show: _Output = (
            _Bar(terminal, total_steps, first_step) if terminal.is_terminal else _Lines(terminal.file)
        )

    def line(self, text: str) -> None:
        """From any thread."""
        with self._alone:
            self._show.line(text)
            self._write(text)

    def metrics(self, record: Mapping[str, float]) -> None:
        step = int(record[STEP])
        where, facts = f"step {step}/{self._total}", "  ".join(_facts(record))
        if "train/loss" not in record:  # an evaluation: it stays on the screen
            self.line(f"{where}  {facts}")
            return
        remaining = self._remaining(step)
        with self._alone:
            self._show.metrics(step, where, facts if remaining is None else f"{facts}  {remaining} left")
            self._write(f"{where}  {facts}")

    def close(self) -> None:
        self._show.close()
        if self._log is not None:
            with suppress(OSError):  # `_write` has told it
                self._log.close()
            self._log = None

    def _remaining(self, step: int) -> timedelta | None:
        """From the mean pace of this start; None before its first step is done and after the last."""
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


def _facts(record: Mapping[str, float]) -> list[str]:
    """What a reader looks at while it runs, rounded; metrics.jsonl has the rest."""
    formats = {
        "train/loss": "loss {:.4f}",
        "train/rewards/accuracies": "accuracy {:.3f}",
        "train/rewards/margins": "margin {:.3g}",
        "train/grad_norm": "grad norm {:.3g}",
        "train/learning_rate": "lr {:.3g}",
        "perf/tokens_per_second": "{:,.0f} tokens/s",
        "eval/loss": "held-out loss {:.4f}",
        "eval/perplexity": "held-out perplexity {:.4g}",
        "eval/rewards/accuracies": "held-out accuracy {:.3f}",
        "eval/rewards/margins": "held-out margin {:.3g}",
    }
    facts = [form.format(record[name]) for name, form in formats.items() if name in record]
    return facts + [f"{name} {loss:.4f}" for name, loss in named_losses(record).items()]


def named_losses(record: Mapping[str, float]) -> dict[str, float]:
    """Evaluation set -> its loss, from `eval/NAME/loss`."""
    found = ((re.fullmatch(r"eval/(.+)/loss", key), value) for key, value in record.items())
    return {match[1]: value for match, value in found if match}


class _Output(Protocol):
    def line(self, text: str) -> None: ...
    def metrics(self, step: int, where: str, facts: str) -> None: ...
    def close(self) -> None: ...


class _Lines:
    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def line(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def metrics(self, step: int, where: str, facts: str) -> None:
        self.line(f"{where}  {facts}")

    def close(self) -> None:
        pass


class _Bar:
    """Drawn from the first record on. What else is printed meanwhile stands above it."""

    def __init__(self, terminal: Terminal, total_steps: int, first_step: int) -> None:
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=terminal,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def metrics(self, step: int, where: str, facts: str) -> None:
        self._progress.start()
        self._progress.update(self._task, completed=step, description=facts)

    def close(self) -> None:
        self._progress.stop()
