"""Compute the loss of KTO, per answer, from its log-probability and its label.

Notation, for a prompt x with an answer y that is labeled desirable or undesirable, all logarithms natural:

    ρ(y) = log π(y | x) - log π_ref(y | x)   summed over the answer's tokens
    z    = max(0, mean of ρ over mismatched answers): an estimate of the divergence of policy and reference,
           over all examples of the step, without a gradient
    σ, w                                     the logistic function; the weight of the answer's label

    loss of a desirable answer     w (1 - σ(β (ρ(y) - z)))
    loss of an undesirable answer  w (1 - σ(β (z - ρ(y))))

Ethayarajh et al. 2024 (arXiv 2402.01306), equation 7. `apo_zero_unpaired` is the same with z = 0:
D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 7, on single answers. All of it is float64. The loss is
the mean over the answers of the global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsft.data.steps.batch import MicroBatch
from dsft.objective.answers import answer_logps
from dsft.objective.api import Objective, Term
from dsft.spec.schema import Kto

_MARGINS = "rewards/margins"
_METRICS = (
    Term("desirable", 0.0, "rewards/chosen"),
    Term("undesirable", 0.0, "rewards/rejected"),
    Term("desirable", 0.0, _MARGINS),  # the mean of the desirable ones minus that of the others
    Term("undesirable", 0.0, _MARGINS),
    Term("desirable", 0.0, "logps/chosen"),
    Term("undesirable", 0.0, "logps/rejected"),
)
"""Named as in TRL. Rewards are β ρ(y)."""


def kto(own: Kto) -> Objective:
    """Return the objective. Its terms: the loss, in examples; then the metrics, of weight 0."""
    terms = (Term("examples"), *_METRICS, *((Term("examples", 0.0, "kl"),) if own.has_baseline else ()))

    def sums(logps: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        answers, policy = micro_batch.answers, answer_logps(logps, micro_batch)[:, 0]
        assert answers is not None, "a micro-batch of labeled answers"
        if answers.reference is None or (own.has_baseline and answers.kl is None):
            raise ValueError(f"{own.loss_type} needs the reference's log-probabilities and the divergence")
        desirable = answers.values["label"][: len(policy)].bool()
        ratios = policy - answers.reference[: len(policy), 0]
        baseline = answers.kl if own.has_baseline and answers.kl is not None else ratios.new_zeros(())
        weight = torch.full_like(ratios, own.undesirable_weight).masked_fill(desirable, own.desirable_weight)
        above = own.beta * (ratios - baseline)
        loss = weight * torch.sigmoid(torch.where(desirable, -above, above))
        # not by indices, whose number a GPU would have to report
        (chosen, rejected), logps_of_class = (
            [values.detach().masked_fill(other, 0.0).sum() for other in (~desirable, desirable)]
            for values in (own.beta * ratios, policy)
        )
        figures = chosen, rejected, chosen, -rejected, *logps_of_class
        return loss.sum(), *figures, *((baseline * len(policy),) if own.has_baseline else ())

    return Objective(terms, sums)
