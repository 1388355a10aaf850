"""Distillation (distill): a student learns from a teacher's probabilities of each token, and from the rows.

The teacher is the run's reference: it is scored once into a store, or kept in memory (`distill.reference`).
"""

from __future__ import annotations

import math

import torch

from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.objective.api import Objective
from dsft.objective.distill import distillation
from dsft.reference.teacher import with_teacher
from dsft.spec.schema import Distill, Spec
from dsft.tasks.referenced import Referenced


class Distillation(Referenced):
    evaluated_at_once = 32

    def objective(self, spec: Spec) -> Objective:
        return distillation(distill_of(spec), spec.train.label_smoothing)

    def for_probe(self, spec: Spec, micro_batch: MicroBatch) -> MicroBatch:
        """Fill in the first tokens of the vocabulary, all equally probable."""
        top_k = distill_of(spec).top_k
        targets = int((micro_batch.tokens.targets != NO_TARGET).sum())
        row = torch.cat((torch.arange(float(top_k)), torch.full((top_k + 1,), -math.log(top_k + 1))))
        return with_teacher(micro_batch, row.repeat(targets, 1))


def distill_of(spec: Spec) -> Distill:
    """Return the `distill` section, or its defaults if the spec has none."""
    return spec.distill or Distill()
