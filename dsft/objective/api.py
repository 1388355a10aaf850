"""Define an objective: sums over a micro-batch, each with a weight and the name of its global count.

loss = Σ_terms weight × (Σ over ranks and micro-batches of sum) ÷ counts[term.count]

The division by the *global* count of the optimizer step makes the loss independent of how the step is divided
into micro-batches, accumulation steps, ranks and pipeline stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dsft.data.steps.batch import Answers, MicroBatch


@dataclass(frozen=True)
class Term:
    """One summand of the loss, or a metric.

    count   name of the global count that the sum is divided by, e.g. "tokens"
    weight  its weight in the loss; with 0 the term is a metric alone
    metric  the name under which sum ÷ count is reported; those of several terms of one name are added up
    """

    count: str
    weight: float = 1.0
    metric: str | None = None


@dataclass(frozen=True)
class Objective:
    """What is minimized, and what is reported beside it.

    sums              maps target log-probabilities, as in `PolicyOutput`, and their micro-batch to one
                      differentiable float64 scalar per term, in the order of `terms`; detached where the
                      weight is 0
    uniform           True if all targets of a micro-batch have the same gradient: the head then computes its
                      own gradients in the forward pass
    label_smoothing   probability mass that the head moves from each target to all tokens alike, in training:
                      `sums` then gets log-probabilities of the smoothed targets
    temperature       of the softmax from which the log-probabilities of `Tokens.others` are
    of_answers        the same as `sums` for preference pairs, from the sums (n, 2) of each answer's
                      log-probabilities; None for other objectives
    """

    terms: tuple[Term, ...]
    sums: Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]
    uniform: bool = False
    label_smoothing: float = 0.0
    temperature: float = 1.0
    of_answers: Callable[[Tensor, Answers], tuple[Tensor, ...]] | None = None

    def scales(self, counts: Mapping[str, int]) -> tuple[float, ...]:
        """Return weight ÷ global count, per term; 0 for a count of 0, which has only zero sums."""
        return tuple(t.weight / counts[t.count] if counts[t.count] else 0.0 for t in self.terms)

    def metrics(self, sums: Sequence[float], counts: Mapping[str, int]) -> dict[str, float]:
        """Return sum ÷ count by name, of the terms that have a metric, but of none with a count of 0."""
        unknown = {t.metric for t in self.terms if not counts[t.count]}
        found: dict[str, float] = {}
        for t, total in zip(self.terms, sums, strict=True):
            if t.metric is not None and t.metric not in unknown:
                found[t.metric] = found.get(t.metric, 0.0) + total / counts[t.count]
        return found


def evaluation_record(
    objective: Objective, sums: Tensor, counts: Sequence[Mapping[str, int]], names: Sequence[str | None]
) -> dict[str, float]:
    """Return loss and metrics of all held-out rows, and of each set that has a name, exact over their tokens
    or pairs.

    sums: (sets, n_terms) over all ranks; counts and names: of each set.
    """
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    record = means(objective, sums.sum(0), total, "eval")
    for name, mine, count in zip(names, sums, counts, strict=True):
        if name is not None:
            record |= means(objective, mine, count, f"eval/{name}")
    return record


def means(objective: Objective, sums: Tensor, counts: Mapping[str, int], prefix: str) -> dict[str, float]:
    """Return PREFIX/loss, and PREFIX/NAME of each term that has a metric. sums: (n_terms,) over all ranks."""
    values = sums.tolist()
    loss = math.fsum(s * total for s, total in zip(objective.scales(counts), values, strict=True))
    named = {f"{prefix}/{name}": mean for name, mean in objective.metrics(values, counts).items()}
    return {f"{prefix}/loss": loss} | named


def with_perplexity(record: dict[str, float]) -> dict[str, float]:
    """Return a record with the perplexity beside each loss per token."""
    losses = {name: loss for name, loss in record.items() if name.endswith("/loss")}
    return record | {name.removesuffix("loss") + "perplexity": perplexity(losses[name]) for name in losses}


def perplexity(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)  # NaN for NaN
