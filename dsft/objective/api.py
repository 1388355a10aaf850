"""What an objective is: sums over a micro-batch, each with a weight and the name of its global count.

loss = Σ_terms weight × (Σ over ranks and micro-batches of sum) ÷ counts[term.count]

The division by the *global* count of the optimizer step makes the loss independent of how the step is
cut into micro-batches, accumulation steps, ranks and pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dsft.data.steps.batch import MicroBatch, Pairs


@dataclass(frozen=True)
class Term:
    """`count` names the global count that the sum is divided by, e.g. "tokens". metric: the name under which
    sum ÷ count is reported; with the weight 0 the term is that alone."""

    count: str
    weight: float = 1.0
    metric: str | None = None


@dataclass(frozen=True)
class Objective:
    """`sums(logps, micro_batch)` maps target log-probabilities (B, T) to one differentiable float64
    scalar per term, in the order of `terms` (detached where the weight is 0); uniform: their gradient by the
    log-probability of a target is one number for all targets of a micro-batch, which spares the head a
    computation; of_answers: of preference pairs, the same from the sums (n, 2) of each answer's
    log-probabilities, None for other objectives; needs_reference: micro_batch.pairs.reference is used."""

    terms: tuple[Term, ...]
    sums: Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]
    uniform: bool = False
    of_answers: Callable[[Tensor, Pairs], tuple[Tensor, ...]] | None = None
    needs_reference: bool = False

    def scales(self, counts: Mapping[str, int]) -> tuple[float, ...]:
        """weight ÷ global count, per term. A count of 0 has only zero sums: the scale is then 0."""
        return tuple(t.weight / counts[t.count] if counts[t.count] else 0.0 for t in self.terms)

    def metrics(self, sums: Sequence[float], counts: Mapping[str, int]) -> dict[str, float]:
        """Name -> sum ÷ count of the terms that have one; NaN for a count of 0."""
        return {
            t.metric: total / counts[t.count] if counts[t.count] else math.nan
            for t, total in zip(self.terms, sums, strict=True)
            if t.metric is not None
        }
