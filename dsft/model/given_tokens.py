"""Compute the softmax part of the output layer for several tokens of each target: log-probabilities of given
tokens, and the most probable tokens. Both have the interface of `Softmax`, and use torch's operations.

Beside k tokens there is one more outcome, the rest: all other tokens of the vocabulary together. Its
probability is a sum over them, not 1 minus the sum over the k tokens, which would lose its digits where it is
small. If the k tokens are the whole vocabulary, its log-probability is -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET
from dsft.model.softmax import Softmax, is_one


@dataclass(frozen=True)
class GivenTokens(Softmax):
    """Log-probabilities of a target, as of `Softmax`, and of k given tokens and the rest under the softmax of
    z ÷ temperature. `targets` is (n, 1 + k): the target, then k different tokens; values are (n, 2 + k)."""

    temperature: float = 1.0

    keeps_gradient = False
    num_stats = 6  # maximum and Σ exp(z - maximum): of z, of z ÷ temperature, of the rest of z ÷ temperature

    def num_values(self, targets: Tensor) -> tuple[int, ...]:
        return (targets.shape[1] + 1,)

    def values(
        self, product: Tensor, targets: Tensor, dtype: torch.dtype, stored: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Softmax.values`; no gradient is computed, and `stored` is returned as it is."""
        assert stored is not None and not len(stored), "the gradient is computed in the backward alone"
        logits = self.shaping(product)
        target = self._of_targets(logits, targets[:, :1].squeeze(1))
        given = logits.gather(1, targets[:, 1:])
        own = None
        if self.temperature != 1.0:
            own = maximum_and_sum(logits)
            given, logits = given / self.temperature, logits.div_(self.temperature)
        values, whole, rest = over_outcomes(given, logits, targets[:, 1:])
        own = whole if own is None else own
        first = (target - own[:, 0]) - own[:, 1].log()
        return torch.cat((first[:, None], values), 1), torch.cat((own, whole, rest), 1), stored

    def gradient(
        self,
        product: Tensor,
        targets: Tensor,
        stats: Tensor,
        upstream: Tensor,
        vocabulary: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """See `Softmax.gradient`, for an upstream gradient (n, 2 + k).

        With u of the tokens, u_r of the rest and their sum U, and P the softmax of y = z ÷ temperature, the
        gradient by y is u - U P at a given token, and u_r P ÷ P(rest) - U P at any other. Since y of a token
        of the rest is at most its maximum, exp is limited to 1 for the given tokens, where it is replaced.
        """
        logits = self.shaping(product)
        slope = self.shaping.slope(logits)
        own, whole, rest = stats.split(2, dim=1)
        pull, pulls, pull_rest = upstream.split((1, targets.shape[1] - 1, 1), dim=1)
        inside = (targets >= 0) & (targets < product.shape[1])
        columns = targets.clamp(0, product.shape[1] - 1)
        target, given = columns[:, :1], columns[:, 1:]
        scaled = logits if self.temperature == 1.0 else logits / self.temperature
        gradient = (scaled - rest[:, :1]).clamp_(max=0.0).exp_().mul_(pull_rest / rest[:, 1:].clamp(min=1.0))
        replaced = (pulls - gradient.gather(1, given)) * inside[:, 1:]
        gradient.scatter_add_(1, given, replaced)
        total = upstream[:, 1:].sum(1, keepdim=True)
        if self.temperature == 1.0:
            total = total + pull
        else:
            gradient.sub_((scaled.sub_(whole[:, :1]).exp_()).mul_(total / whole[:, 1:]))
            gradient.div_(self.temperature)
            total = pull
        gradient.sub_(logits.sub_(own[:, :1]).exp_().mul_(total / own[:, 1:]))
        if self.smoothing:
            gradient.add_(pull * (self.smoothing / vocabulary))
        gradient.scatter_add_(1, target, pull * inside[:, :1] * (1.0 - self.smoothing))
        if not is_one(slope):
            gradient.mul_(slope)
        return gradient.to(dtype)


@dataclass(frozen=True)
class TopTokens(Softmax):
    """The `top_k` most probable of the first `candidates` tokens, and their log-probabilities and that of the
    rest under the softmax of z ÷ temperature, for a pass without gradients. Values are (n, 2 top_k + 1): the
    tokens as whole numbers, which float32 has up to 2^24, then the log-probabilities, greatest first."""

    temperature: float = 1.0
    top_k: int = 1
    candidates: int | None = None

    keeps_gradient = False

    def num_values(self, targets: Tensor) -> tuple[int, ...]:
        return (2 * self.top_k + 1,)

    def values(
        self, product: Tensor, targets: Tensor, dtype: torch.dtype, stored: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert stored is not None and not len(stored), "there is no backward"
        logits = self.shaping(product) / self.temperature
        top, tokens = logits[:, : self.candidates].topk(self.top_k, dim=1)
        values, whole, _ = over_outcomes(top, logits, tokens)
        return torch.cat((tokens.to(values.dtype), values), 1), whole, stored


def over_outcomes(given: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of k tokens and of the rest, (n, k + 1), and maximum and Σ exp(y -
    maximum), (n, 2), of all tokens and of the rest. given: y (n, k) of the tokens (n, k); logits: y (n, V),
    which is overwritten."""
    rest = maximum_and_sum(logits.scatter_(1, tokens, -torch.inf), overwrites=True)
    top = torch.maximum(given.amax(1), rest[:, 0])
    total = (given - top[:, None]).exp().sum(1) + rest[:, 1] * (rest[:, 0] - top).exp()
    outcomes = torch.cat((given - top[:, None], ((rest[:, 0] - top) + rest[:, 1].log())[:, None]), 1)
    return outcomes - total.log()[:, None], torch.stack((top, total), 1), rest


def maximum_and_sum(logits: Tensor, *, overwrites: bool = False) -> Tensor:
    """Return maximum and Σ exp(y - maximum) of each row, (n, 2); for a row of -inf a finite maximum and 0."""
    top = logits.amax(1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    shifted = logits.sub_(top) if overwrites else logits - top
    return torch.cat((top, shifted.exp_().sum(1, keepdim=True)), 1)


class OfWholeLogits(torch.autograd.Function):
    """The values that a softmax gives for whole logits (n, V), where the model's own output layer is used."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, softmax: Softmax) -> Tensor:
        values, stats, _ = softmax.values(logits.clone(), targets, logits.dtype, logits.new_empty(0, 0))
        ctx.save_for_backward(logits, targets, stats)
        ctx.softmax = softmax
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, stats = ctx.saved_tensors
        vocabulary = logits.shape[1]
        gradient = ctx.softmax.gradient(logits.clone(), targets, stats, upstream, vocabulary, logits.dtype)
        return gradient, None, None


def whole_values(logits: Tensor, targets: Tensor, softmax: Softmax) -> Tensor:
    """Return the values (n, C) of whole logits (n, V), 0 where the target, the first column of (n, 1 + k) or
    all of (n,), is NO_TARGET."""
    none = (targets if targets.ndim == 1 else targets[:, 0]) == NO_TARGET
    values: Tensor = OfWholeLogits.apply(logits.float(), targets.clamp(min=0), softmax)
    return values.masked_fill(none[:, None], 0.0)
