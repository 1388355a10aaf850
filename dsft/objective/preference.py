"""Compute preference losses, per pair, from the log-probabilities of a chosen and a rejected answer.

Notation, for a prompt x with its chosen answer c and its rejected answer r, all logarithms natural:

    π(y) = log π(y | x)         the policy's log-probability of the answer, summed over its |y| tokens
    ρ(y) = π(y) - log π_ref(y)  its log-ratio to the frozen reference
    h    = β (ρ(c) - ρ(r))      the margin of the implicit rewards β ρ(y) of DPO
    σ, ε                        the logistic function; dpo.label_smoothing

All of it is float64. The loss is the mean over the pairs of the global batch, plus with an SFT term
`dpo.sft_weight` × the mean of -log π(token) over the tokens of the chosen answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dsft.data.steps.batch import Answers, MicroBatch
from dsft.objective.answers import answer_logps
from dsft.objective.api import Objective, Term
from dsft.spec.losses import LossType
from dsft.spec.schema import Dpo

METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
    "logps/rejected",
)  # fmt: skip
"""Named as in TRL. Rewards include β; accuracies: the fraction of pairs whose chosen answer has the greater
reward, by more than `rounding`. Log-probabilities are sums; for simpo and orpo they are means per token, as
in their rewards."""

EPSILON = torch.finfo(torch.float32).eps

NLL = "nll_loss"  # TRL's name of the mean over the chosen answers' tokens, before its weight
CERTAIN = -1e-12  # nats per token: that of a practically certain answer, whose odds are still finite


def sigmoid(scores: Tensor, dpo: Dpo) -> Tensor:
    """-(1 - ε) log σ(h) - ε log σ(-h). With ε = 0 DPO: Rafailov et al. 2023 (arXiv 2305.18290), equation 7;
    with ε > 0 conservative DPO: Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO",
    equation 3. scores (n, 2): ρ(y), as below."""
    h, smoothing = margin(scores, dpo), dpo.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)


def robust(scores: Tensor, dpo: Dpo) -> Tensor:
    """(-(1 - ε) log σ(h) + ε log σ(-h)) ÷ (1 - 2 ε): unbiased where a fraction ε of the pairs is labelled the
    wrong way round. Chowdhury et al. 2024 (arXiv 2403.00409). Can be negative."""
    h, smoothing = margin(scores, dpo), dpo.label_smoothing
    return (smoothing * F.logsigmoid(-h) - (1 - smoothing) * F.logsigmoid(h)) / (1 - 2 * smoothing)


def hinge(scores: Tensor, dpo: Dpo) -> Tensor:
    """max(0, 1 - h). SLiC-HF's loss (Zhao et al. 2023, arXiv 2305.10425) on the log-ratios, as in RSO (Liu et
    al. 2023, arXiv 2309.06657)."""
    return torch.relu(1 - margin(scores, dpo))


def apo_zero(scores: Tensor, dpo: Dpo) -> Tensor:
    """1 - σ(β ρ(c)) + σ(β ρ(r)): raises the chosen answer and lowers the rejected one, each from the
    reference. D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 7."""
    chosen, rejected = (dpo.beta * scores).unbind(1)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def ipo(scores: Tensor, dpo: Dpo) -> Tensor:
    """(ρ(c) ÷ |c| - ρ(r) ÷ |r| - 1 ÷ (2 β))². Azar et al. 2023 (arXiv 2310.12036), equation 17 with τ = β, on
    log-ratios averaged over the answer's tokens, as its authors do it. scores (n, 2): ρ(y) ÷ |y|."""
    return torch.square(scores[:, 0] - scores[:, 1] - 1 / (2 * dpo.beta))


def simpo(scores: Tensor, dpo: Dpo) -> Tensor:
    """-log σ(β (π(c) ÷ |c| - π(r) ÷ |r|) - γ), γ = dpo.simpo_gamma in units of the reward. Meng et al. 2024
    (arXiv 2405.14734), equation 6. scores (n, 2): π(y) ÷ |y|."""
    return -F.logsigmoid(margin(scores, dpo) - dpo.simpo_gamma)


def orpo(scores: Tensor, dpo: Dpo) -> Tensor:
    """β × -log σ(log odds(c) - log odds(r)), odds(y) = p ÷ (1 - p) with log p = π(y) ÷ |y|. Hong et al. 2024
    (arXiv 2403.07691), equations 4 and 7; its next-token loss on the chosen answer is a term of its own
    (equation 6, whose λ is β). scores (n, 2): π(y) ÷ |y|."""
    log_odds = scores - torch.log(-torch.expm1(scores.clamp(max=CERTAIN)))
    return -dpo.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])


LOSSES: Mapping[LossType, Callable[[Tensor, Dpo], Tensor]] = {
    "sigmoid": sigmoid, "robust": robust, "hinge": hinge, "apo_zero": apo_zero, "ipo": ipo, "simpo": simpo,
    "orpo": orpo,
}  # fmt: skip


def preference(dpo: Dpo) -> Objective:
    """Return the objective. Its terms: the loss, in `pairs`; with an SFT term, and for orpo always, the
    negative log-likelihood of the chosen answers, in `chosen_tokens`; then the metrics, of weight 0."""
    weight = dpo.loss.nll_weight or dpo.sft_weight
    likelihood = (Term("chosen_tokens", weight, NLL),) if weight else ()
    terms = (Term("examples"), *likelihood, *(Term("examples", 0.0, name) for name in METRICS))

    def of_answers(logps: Tensor, answers: Answers) -> tuple[Tensor, ...]:
        loss = LOSSES[dpo.loss_type](compared(logps, answers, dpo), dpo).sum()
        likelihood = (-logps[:, 0].sum(),) if weight else ()
        return loss, *likelihood, *_metrics(logps.detach(), answers, dpo)

    def sums(logps: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        assert micro_batch.answers is not None, "a micro-batch of preference pairs"
        return of_answers(answer_logps(logps, micro_batch), micro_batch.answers)

    return Objective(terms, sums, of_answers=of_answers)


def margin(scores: Tensor, dpo: Dpo) -> Tensor:
    """Return β × (score of the chosen answer - score of the rejected one), (n,)."""
    return dpo.beta * (scores[:, 0] - scores[:, 1])


def compared(logps: Tensor, answers: Answers, dpo: Dpo) -> Tensor:
    """Return (n, 2): what the loss compares, ρ or π of each answer, summed, or per token for losses
    that average."""
    found = _against_reference(logps, answers, dpo)
    return found / _num_tokens(logps, answers) if dpo.loss.averages else found


def rewards(logps: Tensor, answers: Answers, dpo: Dpo) -> Tensor:
    """Return (n, 2): β × ρ(y), or π(y) without a reference; for simpo and orpo β π(y) ÷ |y|."""
    found = _against_reference(logps, answers, dpo)
    return dpo.beta * (found / _num_tokens(logps, answers) if dpo.loss.per_token else found)


def _metrics(logps: Tensor, answers: Answers, dpo: Dpo) -> tuple[Tensor, ...]:
    """Return sums over the pairs, in the order of METRICS."""
    chosen, rejected = rewards(logps, answers, dpo).unbind(1)
    shown = logps / _num_tokens(logps, answers) if dpo.loss.per_token else logps
    margins = chosen - rejected
    won = (margins > rounding(logps, answers, dpo)).double()
    figures = (chosen, rejected, margins, won, *shown.unbind(1))
    return tuple(figure.sum() for figure in figures)


def rounding(logps: Tensor, answers: Answers, dpo: Dpo) -> Tensor:
    """Return (n,): the margin that float32 rounding alone can give a pair. A smaller margin is a tie, and
    counts as not won.

    β × 2^-23 × Σ max(|log π(y)|, |y|) over the sums in the rewards: those of both answers by the policy and,
    if the loss has one, by the reference; for simpo and orpo per token. The |y| are one nat for each token,
    since a token's log-probability is the difference of two larger numbers.
    """
    num_tokens = _num_tokens(logps, answers)
    sizes = torch.maximum(logps.abs(), num_tokens)
    if dpo.loss.reference and answers.reference is not None:
        sizes = sizes + torch.maximum(answers.reference[: len(logps)].abs(), num_tokens)
    if dpo.loss.per_token:
        sizes = sizes / num_tokens
    return dpo.beta * EPSILON * sizes.sum(1)


def _against_reference(logps: Tensor, answers: Answers, dpo: Dpo) -> Tensor:
    if not dpo.loss.reference:
        return logps
    if answers.reference is None:
        raise ValueError(f"{dpo.loss_type} needs the reference's log-probabilities of its pairs")
    return logps - answers.reference[: len(logps)]


def _num_tokens(logps: Tensor, answers: Answers) -> Tensor:
    return answers.num_targets[: len(logps)].double().clamp(min=1)
