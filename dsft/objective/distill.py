"""Compute the loss of distillation, per target, from a teacher's and the student's log-probabilities.

At each target there are k + 1 outcomes: the teacher's k most probable tokens, and the rest, which is all
other tokens together. p and q are the probabilities that teacher and student give them, under the softmax of
the logits ÷ temperature, natural logarithms:

    forward_kl   KL(p ‖ q) = Σ p (log p - log q)
    reverse_kl   KL(q ‖ p) = Σ q (log q - log p)
    jsd          β KL(p ‖ m) + (1 - β) KL(q ‖ m), m = β p + (1 - β) q: Agarwal et al. 2023 (arXiv 2306.13649),
                 equation 1

Merging outcomes never increases such a divergence, so it is at most that over the vocabulary, and equal to it
where k is the whole vocabulary. It is not multiplied by temperature². All of it is float64. The loss is

    weight × the mean divergence + (1 - weight) × the mean of -log π(token),

both over the targets of the global batch, the second at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsft.data.steps.batch import MicroBatch
from dsft.model.head import target_rows
from dsft.objective.api import Objective, Term
from dsft.spec.schema import Distill


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q), (n,), of log-probabilities (n, m). Outcomes that p does not have contribute 0."""
    impossible = p.isneginf()
    p, q = p.masked_fill(impossible, 0.0), q.masked_fill(impossible, 0.0)
    return (p.exp() * (p - q)).sum(1)


def jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence, (n,), of log-probabilities (n, m)."""
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


LOSSES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda teacher, student, beta: kl(teacher, student),
    "reverse_kl": lambda teacher, student, beta: kl(student, teacher),
    "jsd": jsd,
}


def distillation(own: Distill, label_smoothing: float = 0.0) -> Objective:
    """Return the objective, of two terms: the divergence, and the negative log-likelihood, of which the head
    smooths the labels."""
    terms = (Term("tokens", own.weight, "kd_loss"), Term("tokens", 1.0 - own.weight, "nll_loss"))

    def sums(logps: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        if micro_batch.teacher is None:
            raise ValueError("distillation needs the teacher's log-probabilities")
        rows = target_rows(micro_batch.tokens.targets, micro_batch.num_targets)
        found = logps.flatten(0, 1).index_select(0, rows).double()
        teacher = micro_batch.teacher.flatten(0, 1).index_select(0, rows).double()
        likelihood, student = -found[:, 0].sum(), found[:, 1:]
        neither = teacher.isneginf() & student.isneginf()  # the rest, of tokens that are the whole vocabulary
        teacher, student = (logs.masked_fill(neither, 0.0) for logs in (teacher, student))
        divergence = LOSSES[own.loss_type](teacher, student, own.beta).sum()
        return divergence, likelihood if own.weight < 1 else likelihood.detach()

    return Objective(terms, sums, label_smoothing=label_smoothing, temperature=own.temperature)
