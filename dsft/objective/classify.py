"""Compute the loss of a classifier, per row: the cross entropy of its label, in nats and float64, from the
scores of the row's last token: -log softmax(scores)[label].

The loss is the mean over the rows of the global batch: that of transformers' …ForSequenceClassification.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dsft.data.steps.batch import MicroBatch
from dsft.model.head import target_rows
from dsft.objective.api import Objective, Term


def classification() -> Objective:
    """Return the objective. Its terms: the loss, in examples; then the fraction of rows whose label has the
    highest score."""
    return Objective((Term("examples"), Term("examples", 0.0, "accuracy")), _sums)


def _sums(scores: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return both sums, from scores (B, T, N), which a row has at its one target."""
    answers, length = micro_batch.answers, scores.shape[1]
    assert answers is not None, "a micro-batch of rows with labels"
    places = target_rows(micro_batch.tokens.targets, micro_batch.num_targets)
    rows = places // length if answers.segments is None else answers.segments[places]
    found, labels = scores.flatten(0, 1).index_select(0, places).double(), answers.values["label"][rows]
    right = (found.detach().argmax(1) == labels).double().sum()
    return F.cross_entropy(found, labels, reduction="sum"), right
