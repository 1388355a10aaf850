"""Distillation (distill): a student learns from a teacher's probabilities of each token, and from the rows.

The teacher is the run's reference: it is scored once into a store, or kept in memory (`distill.reference`).
"""

from __future__ import annotations

import math

import torch

from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.reference.teacher import with_teacher
from dsft.spec.schema import Distill, Spec
from dsft.tasks.api import section
from dsft.tasks.referenced import Referenced


class Distillation(Referenced):
    evaluated_at_once = 32

    def for_probe(self, spec: Spec, micro_batch: MicroBatch) -> MicroBatch:
        """Fill in the first tokens of the vocabulary, all equally probable."""
        top_k = section(spec, Distill).top_k
        targets = int((micro_batch.tokens.targets != NO_TARGET).sum())
        row = torch.cat((torch.arange(float(top_k)), torch.full((top_k + 1,), -math.log(top_k + 1))))
        return with_teacher(micro_batch, row.repeat(targets, 1))
