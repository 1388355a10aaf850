"""Add up the log-probabilities of each answer's targets."""

from __future__ import annotations

from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, MicroBatch


def answer_logps(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return log π(y | x), the sum over the targets of each answer, in nats: logps (B, T) float32 -> (n, k)
    float64, for preference pairs (n, 2): chosen and rejected. Of scores, an answer has one.

    Of a truncated packed micro-batch only the examples that still have all segments count; without an example
    the result is (0, k), still connected to the graph. A packed micro-batch has been through `MicroBatch.to`.

    A packed row takes three kernels however many answers it has: each position is added to its segment's sum.
    On a GPU the order of these additions is not fixed; in float64 that changes a sum of n values by at most n
    × 2^-53 × Σ |value|. Differences of a running sum would have a fixed order, but one infinite or NaN value
    would reach the answers behind it.
    """
    answers, row = micro_batch.answers, micro_batch.segments
    assert answers is not None, "a micro-batch of whole answers"
    values = logps.double().masked_fill(micro_batch.tokens.targets == NO_TARGET, 0.0)
    if row is None:
        sums = values.sum(1)
    else:
        assert answers.segments is not None, "set by MicroBatch.to"
        sums = values.new_zeros(len(row.lengths)).index_add_(0, answers.segments, values.flatten())
    count, per_example = answers.num_targets.shape
    whole = min(count, len(sums) // per_example)
    return sums[: per_example * whole].view(whole, per_example)
