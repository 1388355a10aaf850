"""Define what a task gives to a run. The defaults are those of an objective that needs the policy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import HeldOutSet
from dsft.data.steps.batch import Annotate, Complete, GlobalStep, MicroBatch, unchanged, unchanged_step
from dsft.data.steps.steps import evaluation
from dsft.engine.api import Engine, StepResult
from dsft.model.policy import Policy
from dsft.objective.api import Objective, evaluation_record
from dsft.report.memory import MemoryFile
from dsft.setup.inputs import Inputs
from dsft.setup.resolve import Plan
from dsft.setup.run import Run
from dsft.spec.schema import Section, Spec

S = TypeVar("S", bound=Section)
Record = dict[str, float]
Evaluation = Callable[[int], Record]
"""A function step -> metrics of the held-out rows, with eval/loss. A collective."""


@dataclass(frozen=True)
class Annotator:
    """Fills into micro-batches what an objective needs beside the policy's log-probabilities, such as those
    of a reference.

    held_out  completes the micro-batches of each held-out set before it is evaluated. A collective
    ahead     completes a training step while it is prefetched, in any thread, so it only reads and looks up
    now       completes a training step right before it is trained, on the device. A collective
    identity  what checkpoints record of a reference; the task compares a resumed run's with it
    after     is called after each training step, also one that was not applied, to update numbers for later
              steps, such as a running mean that `now` and `held_out` fill in. A collective
    state     returns these numbers, the same on all ranks, for a checkpoint
    restore   replaces them by those of a checkpoint
    """

    held_out: Sequence[Annotate]
    ahead: Complete = unchanged_step
    now: Complete = unchanged_step
    identity: Mapping[str, Any] | None = None
    after: Callable[[GlobalStep, StepResult], None] = lambda step, result: None
    state: Callable[[], Mapping[str, float]] = dict
    restore: Callable[[Mapping[str, float]], None] = lambda state: None


@dataclass(frozen=True)
class Model:
    """The model that a run trains, on this rank: its policy, or a stage of it, and the policy's engine.

    annotator  fills in what the objective needs beside the policy
    plan       the settings that follow from the hosts and the size of the model
    memory     measures the phases of the run
    files      on rank 0, the contents of the run's model folder, read when it was written: every checkpoint
               gets these, even if the files in the folder are overwritten during the run
    """

    policy: Policy
    engine: Engine
    objective: Objective
    annotator: Annotator
    plan: Plan
    memory: MemoryFile
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class EvaluationSet:
    """A held-out set with its micro-batches on this rank, its global counts and what fills in its
    micro-batches."""

    held_out: HeldOutSet
    micro_batches: Sequence[MicroBatch]
    counts: Mapping[str, int]
    annotate: Annotate


def evaluation_sets(run: Run, inputs: Inputs, model: Model) -> list[EvaluationSet]:
    """Return the held-out sets, in the order of the data."""
    return [
        EvaluationSet(one, *evaluation(one.data, run.batch, run.world.data_rank, inputs.pad_id), fill)
        for one, fill in zip(inputs.held_out, model.annotator.held_out, strict=True)
    ]


def section(spec: Spec, kind: type[S]) -> S:
    """Return the section of the task's own keys, which is of this kind."""
    own = spec.of_task
    assert isinstance(own, kind), f"task {spec.task} has no {kind.__name__}"
    return own


class Task:
    """A task. Its methods are called in the order in which they are defined here, and all but `for_probe` are
    collectives. In the first three the spec has the values of `model` that the plan has decided; in the
    others it is as the user has written it.

    evaluated_at_once  micro-batches of a held-out set that are completed and then evaluated, of which what an
                       annotator fills in is in memory at once; None: all
    """

    evaluated_at_once: int | None = None

    def __init__(
        self,
        objective: Callable[[Spec], Objective] | None = None,
        evaluated: Callable[[Record], Record] = lambda record: record,
    ) -> None:
        """objective: returns what the engine minimizes; None: a subclass has the method. evaluated: completes
        the metrics of the held-out rows."""
        self._objective, self._evaluated = objective, evaluated

    def objective(self, spec: Spec) -> Objective:
        """Return the objective that the engine minimizes."""
        assert self._objective is not None, "given, or a method of the subclass"
        return self._objective(spec)

    def also_scored(self, spec: Spec, inputs: Inputs, global_batch_size: int) -> Sequence[Dataset]:
        """Return the examples that a reference scores beside those of data.train and of the held-out sets."""
        return ()

    def before_policy(self, run: Run, inputs: Inputs, memory: MemoryFile) -> Any:
        """Do what must be done while the policy is not in memory yet. What it returns is passed to
        `annotator` as `prepared`."""
        return None

    def annotator(self, run: Run, inputs: Inputs, policy: Policy, engine: Engine, prepared: Any) -> Annotator:
        """Return what fills in micro-batches. The policy still has its initial values: no checkpoint has been
        loaded."""
        return Annotator([unchanged] * len(inputs.held_out))

    def for_probe(self, spec: Spec, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with arbitrary values in the fields that an annotator fills in, for the memory
        probe."""
        return micro_batch

    def start_check(self, run: Run, inputs: Inputs, model: Model) -> Iterator[str]:
        """Check on rows of the first step that the untrained policy is as the objective needs it; yield a
        line for each check. Raises SpecError."""
        yield from ()

    def evaluation(self, run: Run, inputs: Inputs, model: Model) -> Evaluation:
        """Return what evaluates the held-out sets, of which there is at least one."""
        sets, world, objective = evaluation_sets(run, inputs, model), run.world, model.objective
        counts, names = [one.counts for one in sets], [one.held_out.name for one in sets]

        def evaluate(step: int) -> Record:
            parts = [[model.engine.evaluate(batches) for batches in self._annotated(one)] for one in sets]
            sums = torch.stack([torch.stack(each).sum(0) for each in parts])
            return self._evaluated(evaluation_record(objective, world.sum(sums), counts, names))

        return evaluate

    def _annotated(self, one: EvaluationSet) -> Iterator[Sequence[MicroBatch]]:
        """Yield the micro-batches of a held-out set, completed."""
        batches = one.micro_batches
        size = self.evaluated_at_once or max(1, len(batches))
        for start in range(0, max(1, len(batches)), size):
            yield one.annotate(batches if size >= len(batches) else batches[start : start + size])
