"""Add up the log-probabilities of each answer's targets."""

from __future__ import annotations

from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, MicroBatch


def answer_logps(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return log π(y | x), the sum over the targets of the chosen and of the rejected answer of each pair, in
    nats: logps (B, T) float32 -> (n, 2) float64.

    Of a truncated packed micro-batch only the pairs that still have two segments count; without a pair the
    result is (0, 2), still connected to the graph. A packed micro-batch has been through `MicroBatch.to`.

    A packed row takes three kernels however many answers it has: each position is added to its segment's sum.
    On a GPU the order of these additions is not fixed; in float64 that changes a sum of n values by at most n
    × 2^-53 × Σ |value|. Differences of a running sum would have a fixed order, but one infinite or NaN value
    would reach the answers behind it.
    """
    pairs = micro_batch.pairs
    assert pairs is not None, "a micro-batch of preference pairs"
    values = logps.double().masked_fill(micro_batch.targets == NO_TARGET, 0.0)
    if micro_batch.lengths is None:
        sums = values.sum(1)
    else:
        assert pairs.segments is not None, "set by MicroBatch.to"
        sums = values.new_zeros(len(micro_batch.lengths)).index_add_(0, pairs.segments, values.flatten())
    whole = min(len(pairs.ids), len(sums) // 2)
    return sums[: 2 * whole].view(whole, 2)
