"""Next-token loss: the negative log-likelihood of the targets, in nats, divided by their global number."""

from __future__ import annotations

import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.objective.api import Objective, Term


def next_token(label_smoothing: float = 0.0) -> Objective:
    """Return an objective of one term: the sum of the targets' negative log-likelihoods, divided by the count
    `tokens`, the number of targets of the step over all ranks and micro-batches. With label smoothing ε a
    target's loss is (1 - ε) times its own plus ε times the mean over all tokens of the vocabulary, as in
    torch's cross_entropy; the head computes this."""
    return Objective(terms=(Term("tokens"),), sums=_sums, uniform=True, label_smoothing=label_smoothing)


def _sums(logps: Tensor, micro_batch: MicroBatch) -> tuple[Tensor]:
    """Return -Σ logps over the targets: logps (B, T) float32 -> float64."""
    targets = logps.double().masked_fill(micro_batch.tokens.targets == NO_TARGET, 0.0)
    return (-torch.sum(targets),)
