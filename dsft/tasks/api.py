"""Define what a task gives to a run. The defaults are those of an objective that needs the policy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsft.checkpoint.read import CheckpointReader
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.steps import evaluation
from dsft.dist.world import World
from dsft.engine.api import Engine
from dsft.model.policy import Policy
from dsft.objective.api import Objective, evaluation_record
from dsft.reference.refer import Annotate
from dsft.report.memory import MemoryFile
from dsft.setup.inputs import Inputs
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Spec

Record = dict[str, float]
Evaluation = Callable[[int], Record]
"""A function step -> metrics of the held-out rows, with eval/loss. A collective."""


@dataclass(frozen=True)
class Run:
    """A run on this rank, once its data are read.

    checkpoint  the one that it resumes from
    memory      measures the phases of the run
    """

    spec: Spec
    batch: BatchSizes
    world: World
    inputs: Inputs
    checkpoint: CheckpointReader | None
    memory: MemoryFile
    log: Callable[[str], None]

    @property
    def folder(self) -> Path:
        return Path(self.spec.output_dir, self.spec.name)


@dataclass(frozen=True)
class Annotator:
    """Fills into micro-batches what an objective needs beside the policy's log-probabilities, such as those
    of a reference.

    annotate    a function for each dataset: data.train first, then each held-out set
    identity    what checkpoints record of it; its task compares a resumed run's with it
    prefetched  `annotate` only looks values up, so steps are annotated while they are prefetched, in any
                thread. Otherwise it is a collective, right before a step
    """

    annotate: Sequence[Annotate]
    identity: Mapping[str, Any]
    prefetched: bool = False


class Task:
    """A task. Its methods are called in the order in which they stand here; all are collectives."""

    def objective(self, spec: Spec) -> Objective:
        """Return the objective that the engine minimizes."""
        raise NotImplementedError

    def before_policy(self, run: Run) -> Any:
        """Do what has to be done while the policy is not in memory yet, and return what `annotator` needs of
        it."""
        return None

    def annotator(self, run: Run, policy: Policy, engine: Engine, prepared: Any) -> Annotator | None:
        """Return what fills in micro-batches, before any step or checkpoint has changed the policy. prepared:
        from `before_policy`."""
        return None

    def start_check(
        self, run: Run, policy: Policy, engine: Engine, annotator: Annotator | None
    ) -> Iterator[str]:
        """Check on rows of the first step that the untrained policy is as the objective needs it; yield a
        line for each check. Raises SpecError."""
        yield from ()

    def evaluation(
        self, run: Run, engine: Engine, objective: Objective, annotator: Annotator | None
    ) -> Evaluation:
        """Return what evaluates the held-out sets, of which there is at least one."""
        sets, batch = run.inputs.held_out, run.batch
        assigned = [evaluation(one.data, batch, run.world.data_rank, run.inputs.pad_id) for one in sets]
        counts, names = [count for _, count in assigned], [one.name for one in sets]
        annotate = annotator.annotate[1:] if annotator else [unchanged] * len(sets)

        def evaluate(step: int) -> Record:
            filled = [fill(batches) for fill, (batches, _) in zip(annotate, assigned, strict=True)]
            sums = torch.stack([engine.evaluate(batches) for batches in filled])
            return evaluation_record(objective, run.world.sum(sums), counts, names)

        return evaluate


def unchanged(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """Return the micro-batches as they are, where nothing has to be filled in."""
    return micro_batches
