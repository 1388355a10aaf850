"""A task of its own that trains on rows as SFT does, and weighs each row by a number that it has. Its
specs may have optim.name: lion.

python tests/integration/weighted.py SPEC [key=value …]

loss = sum over the targets of -weight(row) × log p(target), divided by the number of targets. All weights are
less by a hundredth for each nat of the mean loss of the steps before, which the task carries along.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

import dsft.train
from dsft.data.rows import FIELDS, RowField
from dsft.data.steps.batch import GlobalStep, MicroBatch
from dsft.engine.api import StepResult
from dsft.objective.answers import answer_logps
from dsft.objective.api import Objective, Term
from dsft.setup.inputs import Inputs
from dsft.setup.run import Run
from dsft.spec import task
from dsft.tasks import registry
from dsft.tasks.api import Annotator, Task
from tests.lion import register


def loss(logps: Tensor, micro_batch: MicroBatch) -> tuple[Tensor]:
    assert micro_batch.answers is not None, "a micro-batch of rows with weights"
    of_rows = answer_logps(logps, micro_batch)[:, 0]
    return (-(of_rows * micro_batch.answers.values["weight"][: len(of_rows)]).sum(),)


class Weighted(Task):
    def annotator(self, run: Run, inputs: Inputs, *more: Any) -> Annotator:
        before = {"losses": 0.0, "targets": 0.0}

        def lessened(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
            factor = 1 - before["losses"] / max(1, before["targets"]) / 100
            return [weighed(micro_batch, factor) for micro_batch in micro_batches]

        def now(step: GlobalStep) -> GlobalStep:
            return replace(step, micro_batches=tuple(lessened(step.micro_batches)))

        def after(step: GlobalStep, result: StepResult) -> None:
            if result.applied:
                before["losses"] += float(run.world.sum(result.sums))
                before["targets"] += step.counts["tokens"]

        held_out = [lessened] * len(inputs.held_out)
        return Annotator(held_out, now=now, after=after, state=before.copy, restore=before.update)


def weighed(micro_batch: MicroBatch, factor: float) -> MicroBatch:
    assert micro_batch.answers is not None, "a micro-batch of rows with weights"
    weights = micro_batch.answers.values["weight"] * factor
    return replace(micro_batch, answers=replace(micro_batch.answers, values={"weight": weights}))


FIELDS["weight"] = RowField("weights", "<f8", missing=1)
task.TASKS["weighted"] = task.TaskFacts(
    "row", ("text",), "weighted next-token loss", "fine-tuning", fields=("weight",)
)
registry.TASKS["weighted"] = Weighted(lambda spec: Objective((Term("tokens"),), loss))

if __name__ == "__main__":
    register()
    dsft.train.end(dsft.train.main(sys.argv[1:]))
