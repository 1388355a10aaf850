"""Report to TensorBoard and SwanLab, each from a thread of its own. Writes tensorboard/ and swanlog/ in the
run's folder.

Like Weights & Biases they neither slow nor stop a run: an error is reported in one line, and metrics.jsonl
has everything in any case. Their packages are imported only where a spec asks for them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dsft.errors import MissingInputError
from dsft.report.jsonl import STEP, Record
from dsft.report.redact import redact, redact_tree
from dsft.spec.schema import Spec, SwanLab

FINISH_SECONDS = 20.0  # for the last records, at the end


PROBES = ("hardware", "runtime", "requirements", "conda", "git", "monitor")
"""Facts about the machine that SwanLab would record; all are switched off."""


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Aside:
    """A sink that runs in its own thread. `make` is called there; `warn` takes one line, from any thread."""

    def __init__(self, name: str, make: Callable[[], Sink], warn: Callable[[str], None]) -> None:
        self._name, self._make, self._warn = name, make, warn
        self._work: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_off, name=name, daemon=True)
        self._thread.start()

    def metrics(self, record: Record) -> None:
        """Queue a record, and return at once."""
        self._work.put(dict(record))

    def close(self) -> None:
        """Wait until the last records are written, for FINISH_SECONDS at most."""
        self._work.put(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._warn(f"{self._name}: not done after {FINISH_SECONDS:.0f} s, left behind.")

    def _work_off(self) -> None:
        try:
            sink = self._make()
            while (record := self._work.get()) is not None:
                sink.write(record)
            sink.close()
        except Exception as error:  # noqa: B902  no error here may stop training
            words = redact(" ".join(str(error).split())[:200] or type(error).__name__, os.environ)
            self._warn(f"{self._name}: stopped, {words}; metrics.jsonl has everything.")


def check_installed(spec: Spec) -> None:
    """Raise MissingInputError for a sink that the spec asks for and whose package is not installed."""
    asked = {"tensorboard": spec.tensorboard, "swanlab": spec.swanlab is not None}
    for package, wanted in asked.items():
        if wanted and importlib.util.find_spec(package) is None:
            raise MissingInputError(
                f"{package}: the spec asks for it and the package is not installed; "
                f"pip install {package}, or leave the key out."
            )


def open_sinks(
    spec: Spec, run_dir: Path, resume_step: int, config: Mapping[str, Any], warn: Callable[[str], None]
) -> list[Aside]:
    """Open the sinks that the spec asks for. resume_step: the step that this start resumes from; config: what
    is shown of the run; secrets are removed here."""
    sinks = []
    if spec.tensorboard:
        folder = run_dir / "tensorboard"
        sinks.append(Aside("TensorBoard", lambda: _TensorBoard(folder, resume_step), warn))
    section = spec.swanlab
    if section is not None:
        shown = redact_tree(config, os.environ)
        sinks.append(Aside("SwanLab", lambda: _SwanLab(section, run_dir, shown), warn))
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

    def close(self) -> None:
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

    def close(self) -> None:
        self._run.finish()
