"""Compute the loss of a reward model, per pair, from the scores of a chosen and a rejected answer.

With the scores r(c) and r(r), the margin m of the pair's row, the logistic function σ, ε =
reward.label_smoothing, the weight κ = reward.center_rewards_coefficient and h = r(c) - r(r) - m:

    -(1 - ε) log σ(h) - ε log σ(-h) + κ (r(c) + r(r))²

With ε = κ = m = 0 this is the Bradley-Terry model's negative log-likelihood: Ouyang et al. 2022 (arXiv
2203.02155), equation 1. The margin is that of Touvron et al. 2023 (arXiv 2307.09288), equation 2; the last
term that of Eisenstein et al. 2023 (arXiv 2312.09244), equation 2. All of it is float64. The loss is the mean
over the pairs of the global batch.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dsft.data.steps.batch import MicroBatch
from dsft.objective.answers import answer_logps
from dsft.objective.api import Objective, Term
from dsft.spec.schema import Reward

METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "mean_reward")
"""Named as in TRL's DPOTrainer, and in its RewardTrainer (mean_reward, over both answers)."""


def reward(own: Reward) -> Objective:
    """Return the objective. Its terms: the loss, in examples; then the metrics, of weight 0."""
    smoothing, centering = own.label_smoothing, own.center_rewards_coefficient

    def sums(scores: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        chosen, rejected = answer_logps(scores, micro_batch).unbind(1)
        answers = micro_batch.answers
        assert answers is not None, "a micro-batch of preference pairs"
        above, total = chosen - rejected, chosen + rejected
        h = above - answers.values["margin"][: len(above)]
        loss = -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)
        figures = chosen, rejected, above, (above > 0).double(), total / 2
        return (loss + centering * total.square()).sum(), *(one.detach().sum() for one in figures)

    return Objective((Term("examples"), *(Term("examples", 0.0, name) for name in METRICS)), sums)
