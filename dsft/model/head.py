"""Compute the targets' log-probabilities from hidden states, in the place of a model's output layer.

The head has the place and the name of the model's own layer, and owns or shares its weight. The logits of all
tokens never exist at once: rows of hidden states go through in chunks, inside one forward and one backward of
one module, so that ZeRO 3 gathers the weight once for each. Statistics are float32, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsft.data.steps.batch import NO_TARGET
from dsft.model.config import has_scores
from dsft.model.given_tokens import GivenTokens, TopTokens
from dsft.model.products import aligned_empty, multiply, pieces, product, tile_of, vocab_slices
from dsft.model.softmax import Shaping, Softmax, SoftmaxChoice, choose_softmax
from dsft.plan.memory.sizes import SCORED_PARTS, SEVERAL_PARTS, head_chunk, in_chunks, kept_rows


def shaping_of(causal_lm: PreTrainedModel) -> Shaping:
    """Return what transformers 5.23 does after the output layer. For a class not listed the soft-cap of its
    config is used, and engine/self_check.py checks whether that is all."""
    config: Any = causal_lm.config
    scale = SCALES.get(config.model_type, lambda _: 1.0)(causal_lm)
    softcap = next((cap for key in SOFTCAPS if (cap := getattr(config, key, None)) is not None), None)
    return Shaping(float(scale), softcap and float(softcap))


SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES: Mapping[str, Callable[[Any], float]] = {
    "cohere": lambda model: model.logit_scale,
    "cohere2": lambda model: model.logit_scale,
    "granite": lambda model: 1 / model.config.logits_scaling,
    "granite_swa": lambda model: 1 / model.config.logits_scaling,
    "granitemoehybrid": lambda model: 1 / model.config.logits_scaling,
    "hyperclovax": lambda model: model.config.logits_scaling,
    "minicpm3": lambda model: 1 / model.config.logits_scaling,  # there applied to the hidden states
    "falcon_h1": lambda model: model.model.lm_head_multiplier,
}


class Head(nn.Linear):
    """A linear output layer that also scores targets.

    shaping           what the model does with the layer's product
    uniform           the upstream gradient is the same for every target (Objective.uniform): the gradients
                      can then be computed and added up in the forward pass
    label_smoothing   probability mass moved from the target to all tokens alike, in training mode alone
    temperature       of the log-probabilities of other tokens than the target
    top               set in a model that is not trained: it scores its most probable tokens, not the target
    chunk_bytes       bytes that the logits of a chunk may take; None: see `chunk_on`
    """

    shaping = Shaping()
    uniform = False
    label_smoothing = 0.0
    temperature = 1.0
    top: Top | None = None
    chunk_bytes: int | None = None

    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        num_targets: int | None = None,
        others: Tensor | None = None,
    ) -> Tensor:
        """Return log-probabilities (B, T) of targets (B, T), at least float32, 0 at NO_TARGET; without
        targets the product (B, T, V), as the model's own layer. input: (B, T, H).

        num_targets: their number, where it is known without asking the device; others: k further tokens of
        each target (B, T, k), with which the result is (B, T, 2 + k), as `GivenTokens` has it. With `top` it
        is that of `TopTokens`, (B, T, 2 top_k + 1).
        """
        if targets is None:
            return super().forward(input)
        rows = target_rows(targets, num_targets)
        hidden, chosen = input.flatten(0, 1).index_select(0, rows), targets.flatten().index_select(0, rows)
        if others is not None:
            chosen = torch.cat((chosen[:, None], others.flatten(0, 1).index_select(0, rows).long()), 1)
        values = self._logps(hidden, chosen)
        whole = values.new_zeros(targets.numel(), *values.shape[1:]).index_copy(0, rows, values)
        return whole.view(*targets.shape, *values.shape[1:])

    def _logps(self, hidden: Tensor, targets: Tensor) -> Tensor:
        smoothing = self.label_smoothing if self.training else 0.0
        chunk_bytes = self.chunk_bytes or chunk_on(hidden.device)
        several = several_tokens(self.shaping, smoothing, self.temperature, self.top, targets)
        # DeepSpeed reduces gradients over ranks in the order of their arrival, and that of a bias may arrive
        # later from a plain product (under ZeRO 3) than from chunks, which only ranks with many targets need.
        # So it is computed in chunks on all of them.
        plain_is_safe = several is None and (self.bias is None or not torch.is_grad_enabled())
        if plain_is_safe and not in_chunks(len(hidden) * self.out_features, chunk_bytes):
            return plain_logps(self.shaping(super().forward(hidden)), targets, smoothing)
        if several is None:
            chunks = Chunks(self.softmax_on(hidden.device, smoothing).softmax, chunk_bytes)
        else:
            chunks = Chunks(several, chunk_bytes // SEVERAL_PARTS)
        if not torch.is_grad_enabled():
            return chunks.values(hidden, self.weight, self.bias, targets)[0]
        # float16 is too coarse for gradients that are not yet multiplied by the loss scale.
        is_frozen = not any(p.requires_grad for p in self.parameters(recurse=False))
        in_forward = several is None and (self.uniform or is_frozen) and hidden.dtype != torch.float16
        function = GradientInForward if in_forward else GradientInBackward
        logps: Tensor = function.apply(hidden, self.bias, self.weight, targets, chunks)
        return logps

    def softmax_on(self, device: torch.device, smoothing: float) -> SoftmaxChoice:
        """Return what computes the softmax part of the chunks."""
        return choose_softmax(Softmax(self.shaping, smoothing), self.weight.dtype, device)


class Top(NamedTuple):
    """How many of a target's most probable tokens are scored, of the first `candidates` ones."""

    top_k: int
    candidates: int


def several_tokens(
    shaping: Shaping, smoothing: float, temperature: float, top: Top | None, targets: Tensor
) -> Softmax | None:
    """Return what scores several tokens of each target; None where the target alone is scored."""
    if top is not None:
        return TopTokens(shaping, 0.0, temperature, *top)
    return GivenTokens(shaping, smoothing, temperature) if targets.ndim > 1 else None


@cache
def chunk_on(device: torch.device) -> int:
    """Return the maximum bytes of the logits of a chunk on `device`, by its whole memory."""
    is_cuda = device.type == "cuda"
    return head_chunk(device.type, torch.cuda.get_device_properties(device).total_memory if is_cuda else None)


class ScoreHead(Head):
    """A linear layer whose outputs are the scores of a token: one, or N for the labels of a classifier. It
    returns those of the targets, (B, T) or (B, T, N), whatever token each of these is, computed in
    float32."""

    def _logps(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float()).squeeze(1)


def output_layer(causal_lm: PreTrainedModel) -> Any:
    """Return the layer behind the last hidden states: the one over the vocabulary, or that of a score."""
    return causal_lm.score if has_scores(causal_lm.config) else causal_lm.get_output_embeddings()


def install_head(causal_lm: PreTrainedModel) -> Head | None:
    """Make a linear output layer a Head, in place, so that references to the module or its parameters stay
    valid. None where it is something else, such as a layer with an adapter."""
    output = output_layer(causal_lm)
    copies = getattr(output, "modules_to_save", None)  # of peft's wrapper: a layer trained in full
    if isinstance(copies, nn.ModuleDict):
        (output,) = copies.values()
    if type(output) is not nn.Linear:
        return None
    head: Any = output
    if has_scores(causal_lm.config):
        head.__class__ = ScoreHead
        return cast(Head, head)
    head.__class__ = Head
    head.shaping = shaping_of(causal_lm)
    return cast(Head, head)


def target_rows(targets: Tensor, num_targets: int | None) -> Tensor:
    """Return the indices of the targets in `targets.flatten()`. Waits for the device unless their number is
    passed."""
    flags = targets.flatten() != NO_TARGET
    if num_targets is None:
        return flags.nonzero().squeeze(1)
    return flags.nonzero_static(size=num_targets).squeeze(1)


def plain_logps(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the log-probabilities without chunks: (n, V), (n,) -> (n,); 0 at NO_TARGET."""
    return -F.cross_entropy(
        logits, targets, ignore_index=NO_TARGET, reduction="none", label_smoothing=smoothing
    )


# --- in chunks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunks:
    """How log-probabilities are computed in chunks: the softmax implementation, and the bytes of a chunk."""

    softmax: Softmax
    chunk_bytes: int

    def values(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        stored: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities (n,), and the statistics (n, 2) that Softmax returns, from hidden (n, H),
        weight (V, H), bias (V,), targets (n,). stored (k, V): is filled with the gradient by the product of
        the first k rows. `GivenTokens` and `TopTokens` have other shapes, and store nothing."""
        logps = _wide(hidden, (len(hidden), *self.softmax.num_values(targets)))
        stats = _wide(hidden, (len(hidden), self.softmax.num_stats))
        stored = weight.new_empty(0, len(weight)) if stored is None else stored
        for rows in pieces(len(hidden), weight.shape[0], self.chunk_bytes // SCORED_PARTS):
            logits = product(hidden[rows], weight, bias)
            logps[rows], stats[rows], _ = self.softmax.values(
                logits, targets[rows], weight.dtype, stored[rows]
            )
            del logits
        return logps, stats

    def stored_rows(self, hidden: Tensor, weight: Tensor) -> int:
        """Return for how many rows `values` keeps the gradient; none in float16, which loses gradients that
        are not yet multiplied by the loss scale."""
        if weight.dtype == torch.float16 or not self.softmax.keeps_gradient:
            return 0
        return kept_rows(len(hidden), len(weight) * weight.element_size(), self.chunk_bytes)

    def values_with_gradients(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return log-probabilities (n,), and the gradients of their sum by hidden, weight and bias, where
        needed: that by hidden in its own type, the others at least float32, in which they are added up."""
        logps = _wide(hidden, (len(hidden),))
        by_hidden = torch.empty_like(hidden) if needed[0] else None
        by_weight = _wide(weight, weight.shape) if needed[1] else None
        by_bias = _wide(bias, bias.shape) if bias is not None and needed[2] else None
        for rows in pieces(len(hidden), weight.shape[0], self.chunk_bytes):
            logits = product(hidden[rows], weight, bias)
            logps[rows], _, gradient = self.softmax.values(logits, targets[rows], weight.dtype)
            if by_bias is not None:
                by_bias += gradient.sum(0, dtype=by_bias.dtype)
            for vocab in vocab_slices(weight):
                if by_hidden is not None:
                    multiply(gradient[:, vocab], weight[vocab], by_hidden[rows], add=vocab.start > 0)
                if by_weight is not None:
                    multiply(gradient[:, vocab].t(), hidden[rows], by_weight[vocab], add=True)
            del logits, gradient  # before the next chunk's are allocated
        return logps, [by_hidden, by_weight, by_bias]

    def gradients(
        self,
        upstream: Tensor,
        stored: Tensor,
        stats: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
        needed: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """Return the same gradients for any upstream gradient, of the values' shape, from inputs = (hidden,
        weight, bias, targets) and what `values` has stored of the first rows. Chunks are of the vocabulary
        here: each row of the weight's gradient is then written in its own type."""
        hidden, weight, bias, targets = inputs
        first, last = hidden.split((len(stored), len(hidden) - len(stored)))
        # Rows are stored only where a target has one value, so `pulls` has one factor for each.
        pulls, pull = upstream[: len(stored)].flatten(), upstream[len(stored) :]
        pulled = (first * pulls[:, None]).to(first.dtype)
        by_hidden = _wide(hidden, hidden.shape) if needed[0] else None
        by_weight = torch.empty_like(weight) if needed[1] else None
        by_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
        if by_hidden is not None:
            by_stored = by_hidden[: len(stored)]
            for vocab in vocab_slices(weight):
                multiply(stored[:, vocab], weight[vocab], by_stored, add=vocab.start > 0)
            by_stored.mul_(pulls[:, None])
        for vocab in pieces(weight.shape[0], len(last), self.chunk_bytes, tile_of(weight)):
            part = weight[vocab]
            logits = product(last, part, None if bias is None else bias[vocab])
            here = targets[len(stored) :] - vocab.start
            gradient = self.softmax.gradient(
                logits, here, stats[len(stored) :], pull, len(weight), weight.dtype
            )
            if by_bias is not None:
                of_stored = pulls.to(stored.dtype) @ stored[:, vocab]
                by_bias[vocab] = gradient.sum(0, dtype=pull.dtype) + of_stored
            if by_hidden is not None:
                multiply(gradient, part, by_hidden[len(stored) :], add=True)
            if by_weight is not None:
                torch.mm(stored[:, vocab].t(), pulled, out=by_weight[vocab])
                by_weight[vocab].addmm_(gradient.t(), last)
            del logits, gradient
        return [None if by_hidden is None else by_hidden.to(hidden.dtype), by_weight, by_bias]


def _wide(like: Tensor, shape: Any) -> Tensor:
    """Return zeros, at least float32."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


class GradientInBackward(torch.autograd.Function):
    """Log-probabilities under any upstream gradient. The gradient by the logits is stored for as many rows as
    a chunk has bytes for; for the others the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, bias: Tensor | None, weight: Tensor, targets: Tensor, chunks: Chunks
    ) -> Tensor:
        stored = aligned_empty(weight, chunks.stored_rows(hidden, weight), len(weight), weight.dtype)
        logps, stats = chunks.values(hidden, weight, bias, targets, stored)
        ctx.save_for_backward(hidden, weight, bias, targets, stats, stored)
        ctx.chunks = chunks
        return logps

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, stats, stored = ctx.saved_tensors
        inputs = (hidden, weight, bias, targets)
        by_hidden, by_weight, by_bias = ctx.chunks.gradients(upstream, stored, stats, inputs, _needed(ctx))
        return by_hidden, by_bias, by_weight, None, None


class GradientInForward(torch.autograd.Function):
    """Log-probabilities under an upstream gradient that is the same number for all of them, or any where only
    the hidden states need one; for one backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, bias: Tensor | None, weight: Tensor, targets: Tensor, chunks: Chunks
    ) -> Tensor:
        logps, ctx.gradients = chunks.values_with_gradients(hidden, weight, bias, targets, _needed(ctx))
        ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        return logps

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the head's gradients are used up: it has one backward for each forward")
        one = upstream[0] if len(upstream) else upstream.new_zeros(())
        by_hidden, by_weight, by_bias = (
            None if gradient is None else gradient.mul_(scale).to(dtype)
            for gradient, scale, dtype in zip(
                gradients, (upstream[:, None], one, one), ctx.dtypes, strict=True
            )
        )
        return by_hidden, by_bias, by_weight, None, None


def _needed(ctx: Any) -> tuple[bool, ...]:
    """Return whether the gradients by hidden, weight and bias are needed."""
    hidden, bias, weight, *_ = ctx.needs_input_grad
    return hidden, weight, bias
