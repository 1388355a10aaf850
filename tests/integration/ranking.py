"""A task of its own, as a user would add one: of each three rows, the first is to be the most probable.

    python tests/integration/ranking.py SPEC [key=value …]

loss = mean over the examples of -log softmax(log p(row 1), log p(row 2), log p(row 3))[1].
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

import dsft.train
from dsft.data.rows import Records
from dsft.data.sets import load
from dsft.data.sets.cut import CutOptions, CutRows
from dsft.data.sets.dataset import Examples, Ids, digest_of
from dsft.data.steps.batch import MicroBatch
from dsft.objective.answers import answer_logps
from dsft.objective.api import Objective, Term
from dsft.spec import task
from dsft.tasks import registry
from dsft.tasks.api import Task

ROWS = 3


def cut_triples(records: Records, ids: Ids, options: CutOptions) -> CutRows:
    """Make an example of each three consecutive rows, if each fits."""
    too_long = records.longest[ids] > options.max_length
    dropped, ids = ids[too_long], ids[~too_long]
    row: Ids = (ROWS * ids[:, None] + np.arange(ROWS, dtype=np.int32)).reshape(-1)
    start: Ids = np.zeros(len(row), np.int32)
    lengths: Ids = records.rows.lengths[row].astype(np.int32)
    targets = records.rows.trained[row].astype(np.int32).reshape(-1, ROWS)
    examples = Examples(records.rows, row, start, lengths, None, targets, digest_of(records.rows, ids))
    return CutRows(examples, {"dropped": dropped})


def loss(logps: Tensor, micro_batch: MicroBatch) -> tuple[Tensor]:
    return (-torch.log_softmax(answer_logps(logps, micro_batch), dim=1)[:, 0].sum(),)


task.TASKS["ranking"] = task.TaskFacts(
    "triple", ("text",), "ranking of triples", "preference training", "triples", ROWS, answers=False
)
load.CUTS["triples"] = cut_triples
registry.TASKS["ranking"] = Task(lambda spec: Objective((Term("examples"),), loss))

if __name__ == "__main__":
    dsft.train.end(dsft.train.main(sys.argv[1:]))
