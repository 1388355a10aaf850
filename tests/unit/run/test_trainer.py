"""What a run's trainer does around a step, an evaluation and a save: heartbeats, phases of memory, the lock,
and the requests to stop."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dsft.data.steps.batch import GlobalStep
from dsft.errors import LockedError
from dsft.rank.stopping import REASONS
from dsft.run import trainer as module
from dsft.run.loop import Progress
from dsft.run.trainer import Trainer
from dsft.tasks.api import Annotator
from dsft.tasks.referenced import References


class Heartbeat:
    def __init__(self, happened: list[Any]) -> None:
        self.happened = happened

    def mark(self, phase: str, step: int | None = None) -> None:
        self.happened.append((phase, step))


def make(
    happened: list[Any], reason: str | None = None, lock: Any = None, annotator: Annotator | None = None
) -> Trainer:
    """Return a trainer of one rank whose parts only record what is done with them."""
    made: Any = object.__new__(Trainer)
    world = SimpleNamespace(first=lambda work: work(), rank=0)
    made.run = SimpleNamespace(
        heartbeat=Heartbeat(happened), stopping=SimpleNamespace(reason=reason), world=world, folder=None,
        lock=SimpleNamespace(check=lock or (lambda: happened.append("lock"))),
        spec=SimpleNamespace(checkpoint=None),
    )  # fmt: skip
    memory = SimpleNamespace(enter=lambda phase: happened.append(f"memory {phase}"), record=dict)
    engine = SimpleNamespace(owned_fragments=tuple, shapes=dict)
    made.model = SimpleNamespace(memory=memory, engine=engine, files={}, annotator=annotator or Annotator(()))
    made.report = SimpleNamespace(line=happened.append, metrics=lambda record: happened.append(record))
    made.evaluation = lambda step: {"eval/loss": 2.0}
    made.waits = SimpleNamespace(timing=nullcontext)
    made.recorder = SimpleNamespace(read=lambda: happened.append("record"))
    made.agreement = SimpleNamespace(begin=lambda mine: lambda: mine)
    made.latest, made.trace = {}, None
    made._state = lambda progress, held_out_loss: (progress, held_out_loss)
    return made  # type: ignore[no-any-return]


def test_step_marks_heartbeats_and_reports_the_record_before_it_at_its_end() -> None:
    happened: list[Any] = []
    trainer = make(happened, reason="SIGTERM")
    with trainer.step(4) as agree_on_stop:
        assert trainer.annotate(step := GlobalStep((), {}, 0, 0.0, ())) is step
        assert agree_on_stop() == "SIGTERM"
        assert happened == [("data", 4), ("step", None)]
    assert happened[2:] == ["record"]
    with pytest.raises(ValueError, match="failed"), trainer.step(5):
        raise ValueError("failed")
    assert happened[3:] == [("data", 5), "record"]


@pytest.mark.parametrize("prefetched", [False, True])
def test_micro_batches_are_annotated_in_the_step_unless_they_were_prefetched(prefetched: bool) -> None:
    annotator = References(lambda batches: ("annotated",), (), (), {}, prefetched).annotator()  # type: ignore[arg-type,return-value]
    step: Any = GlobalStep(("plain",), {}, 0, 0.0, ())  # type: ignore[arg-type]
    trainer: Any = make([], annotator=annotator)
    assert trainer.annotate(step).micro_batches == (("plain",) if prefetched else ("annotated",))
    assert annotator.ahead(step).micro_batches == (("annotated",) if prefetched else ("plain",))


def test_checkpoint_evaluates_then_saves_and_returns_a_stop_that_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[Any] = []

    def save(folder: Any, fragments: Any, shapes: Any, state: Any, world: Any, **more: Any) -> str:
        happened.append(state)
        return "saved"

    monkeypatch.setattr(module, "save", save)
    trainer, progress = make(happened, reason=REASONS[0]), Progress(step=3, epoch=0.5, num_tokens=9)
    assert trainer.checkpoint(progress, evaluates=True, saves=True) == REASONS[0]
    position = {"train/global_step": 3, "train/epoch": 0.5, "train/num_tokens": 9}
    assert happened == [
        ("evaluate", 3), "memory evaluation", "memory steady", {"eval/loss": 2.0} | position, ("save", 3),
        "lock", "memory save", (progress, 2.0), "saved", "memory steady",
    ]  # fmt: skip
    happened.clear()
    assert trainer.checkpoint(progress, evaluates=True, saves=False) is None
    assert [one for one in happened if one == "lock" or one == ("save", 3)] == []


def test_nothing_is_saved_after_the_lock_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise LockedError("This run has lost the lock.")

    happened: list[Any] = []
    monkeypatch.setattr(module, "save", lambda *given, **more: happened.append("saved"))
    with pytest.raises(LockedError):
        make(happened, lock=lost).checkpoint(Progress(step=3), evaluates=False, saves=True)
    assert happened == [("save", 3)]
