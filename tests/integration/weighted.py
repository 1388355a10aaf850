"""A task of its own that trains on rows as SFT does, and weighs each row by a number that it has.

python tests/integration/weighted.py SPEC [key=value …]

loss = sum over the targets of -weight(row) × log p(target), divided by the number of targets.
"""

from __future__ import annotations

import sys

from torch import Tensor

import dsft.train
from dsft.data.rows import FIELDS, RowField
from dsft.data.steps.batch import MicroBatch
from dsft.objective.answers import answer_logps
from dsft.objective.api import Objective, Term
from dsft.spec import task
from dsft.tasks import registry
from dsft.tasks.api import Task


def loss(logps: Tensor, micro_batch: MicroBatch) -> tuple[Tensor]:
    assert micro_batch.answers is not None, "a micro-batch of rows with weights"
    of_rows = answer_logps(logps, micro_batch)[:, 0]
    return (-(of_rows * micro_batch.answers.values["weight"][: len(of_rows)]).sum(),)


FIELDS["weight"] = RowField("weights", "<f8", missing=1)
task.TASKS["weighted"] = task.TaskFacts(
    "row", ("text",), "weighted next-token loss", "fine-tuning", fields=("weight",)
)
registry.TASKS["weighted"] = Task(lambda spec: Objective((Term("tokens"),), loss))

if __name__ == "__main__":
    dsft.train.end(dsft.train.main(sys.argv[1:]))
