"""The log-probability of each answer: takes those of a micro-batch's targets, gives one sum per answer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, MicroBatch


def answer_logps(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    """logps (B, T) float32 -> (n, 2) float64: log π(y | x), the sum over the targets of the chosen and of the
    rejected answer of each pair, in nats.

    Of a packed micro-batch that was cut short only the pairs that still have two segments; of one without a
    pair (0, 2), which still hangs on the graph.
    """
    pairs = micro_batch.pairs
    assert pairs is not None, "a micro-batch of preference pairs"
    values = logps.double().masked_fill(micro_batch.targets == NO_TARGET, 0.0)
    if micro_batch.lengths is None:
        sums = values.sum(1)
    else:
        sums = torch.stack([part.sum() for part in torch.split(values[0], list(micro_batch.lengths))])
    whole = min(len(pairs.ids), len(sums) // 2)
    return sums[: 2 * whole].view(whole, 2)
