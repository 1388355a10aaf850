"""A trainer for the loop without a run: tests replace what they look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from dsft.data.steps.batch import GlobalStep
from dsft.engine.api import StepResult
from dsft.objective.api import Objective
from dsft.run.loop import Progress, Record, Recorder


class PlainTrainer:
    """Annotates, evaluates and saves nothing, and is never asked to stop. parts: of `Recorder`."""

    def __init__(
        self,
        objective: Objective,
        world: Any,
        report: Callable[[Record], None],
        waits: Any = None,
        **parts: Any,
    ) -> None:
        self.rank, self.waits = world.rank, waits
        fields: dict[str, Any] = {"objective": objective, "world": world, "report": report}
        self.recorder = Recorder(**{**fields, "skipped": named, **parts})

    @contextmanager
    def step(self, done: int) -> Iterator[Callable[[], str | None]]:
        try:
            with self.waits.timing() if self.waits else nullcontext():
                yield self.ask()
        finally:
            self.recorder.read()

    def ask(self) -> Callable[[], str | None]:
        return lambda: None

    def annotate(self, step: GlobalStep) -> GlobalStep:
        return step

    def after(self, step: GlobalStep, result: StepResult) -> None:
        pass

    def checkpoint(self, progress: Progress, *, evaluates: bool, saves: bool) -> str | None:
        return None


def named(step: int, batch: GlobalStep, loss: float) -> str:
    """Name examples as `dsft.run.trainer.skipped_rows` names rows."""
    return f"examples {list(batch.example_ids)[:8]}"
