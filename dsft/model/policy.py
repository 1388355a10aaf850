"""The module that both engines train: computes the targets' log-probabilities from tokens and targets.

A pipeline stage that is not the last returns hidden states instead, and one that is not the first gets them
as input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsft.data.steps.batch import Segments, Tokens
from dsft.model.attention import keywords_of
from dsft.model.given_tokens import whole_values
from dsft.model.head import Top, install_head, output_layer, plain_logps, several_tokens
from dsft.model.names import plain_name
from dsft.model.routing import Routing
from dsft.model.softmax import Shaping
from dsft.model.stage import StageInput, StageOutput


class PolicyOutput(NamedTuple):
    """What a policy returns for a micro-batch. A named tuple, since DeepSpeed's ZeRO 3 looks for tensors in
    tuples.

    logps   (B, T) float32: the log-probability of each target, 0 where there is none; with `Tokens.others`
            or `Policy.score_top` (B, T, C), as `Head.forward` has it; of a model that gives scores: those at
            each target, (B, T), or (B, T, N) of N labels
    """

    logps: Tensor


class Policy(nn.Module):
    """A causal language model, or one stage of it, with the signature that the engines call."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        is_first: bool = True,
        is_last: bool = True,
        routing: Routing | None = None,
    ) -> None:
        """routing: of the whole model, where that is a mixture of experts."""
        super().__init__()
        self.causal_lm = causal_lm
        self.routing = routing
        if routing is not None:
            routing.watch(causal_lm)
        self.is_first = is_first
        self.is_last = is_last
        self.kernels = ""  # a line for the log: see `choose_kernels`
        head = install_head(causal_lm) if is_last else None
        self.full_logits = is_last and head is None
        self._head = (head,)  # in a tuple: as a second submodule ZeRO 3 would gather it twice
        self._output: tuple[Any] = (output_layer(causal_lm) if is_last else None,)
        self._entry = [m for m in causal_lm.modules() if isinstance(m, StageInput)]  # a list: the same reason
        self._exit = [m for m in causal_lm.modules() if isinstance(m, StageOutput)]
        self._label_smoothing, self._temperature = 0.0, 1.0
        self._top: Top | None = None

    def set_loss(self, uniform: bool, label_smoothing: float, temperature: float = 1.0) -> None:
        """Set what training does with the log-probabilities; all are explained in Head."""
        self._label_smoothing, self._temperature = label_smoothing, temperature
        (head,) = self._head
        if head is not None:
            head.uniform, head.label_smoothing, head.temperature = uniform, label_smoothing, temperature

    def score_top(self, top: Top, temperature: float) -> None:
        """Return the most probable tokens of each target from here on; both are explained in Head."""
        self.set_loss(uniform=False, label_smoothing=0.0, temperature=temperature)
        self._top, (head,) = top, self._head
        if head is not None:
            head.top = top

    def softmax_description(self, device: torch.device) -> str:
        """Return a clause that says what computes the softmax part of the head on `device`; empty where there
        is no choice."""
        (head,) = self._head
        return "" if head is None else head.softmax_on(device, self._label_smoothing).description

    def forward(
        self,
        inputs: Tensor,
        tokens: Tokens,
        segments: Segments | None = None,
        num_targets: int | None = None,
    ) -> PolicyOutput | Tensor:
        """Return the targets' log-probabilities; before the last stage hidden states (B, T, hidden) for the
        next one.

        inputs: (B, T) int64 token ids, or (B, T, hidden) from the previous stage; segments: of the packed
        row; None: they are read from its position ids, or the rows are padded; num_targets: where it is
        known. The noise of `tokens` is added in training, to the first stage's embeddings.
        """
        position_ids = tokens.position_ids
        if self.routing is not None:
            self.routing.begin(
                position_ids.shape, None if segments is None else segments.borders, tokens.is_padding
            )
        given: dict[str, Any] = {"input_ids": inputs}
        if self._entry:
            self._entry[0].received = inputs
            given = {"inputs_embeds": inputs.detach()}  # for their shape and type: masks, rotary tables
        given |= {"position_ids": position_ids, "use_cache": False}
        given |= keywords_of(self.causal_lm, position_ids, segments)
        noise = tokens.noise_scale if self.training and self.is_first else None
        with nullcontext() if noise is None else with_noise(self.causal_lm, noise):
            output = (self.causal_lm if self.full_logits else self.causal_lm.base_model)(**given)
        if self.full_logits:
            return PolicyOutput(self._of_logits(output.logits, tokens.targets, tokens.others))
        if self._exit:
            return self._exit[0].pop()
        hidden: Tensor = output.last_hidden_state
        (layer,) = self._output
        return PolicyOutput(layer(hidden, tokens.targets, num_targets, tokens.others))

    def _of_logits(self, logits: Tensor, targets: Tensor, others: Tensor | None) -> Tensor:
        """Return what `Head.forward` does, from whole logits (B, T, V)."""
        smoothing = self._label_smoothing if self.training else 0.0
        chosen = targets.flatten()
        if others is not None:
            chosen = torch.cat((chosen[:, None], others.flatten(0, 1).long()), 1)
        several = several_tokens(Shaping(), smoothing, self._temperature, self._top, chosen)
        if several is None:
            return target_logps(logits, targets, smoothing)
        return whole_values(logits.flatten(0, 1), chosen, several).view(*targets.shape, -1)

    def named_trained(self) -> dict[str, nn.Parameter]:
        """Return trained parameters by Hugging Face name; a tied one once, by the name of the input
        embedding; an adapter's by their names in its file, without the prefix there."""
        return {plain_name(n): p for n, p in self.causal_lm.named_parameters() if p.requires_grad}


@contextmanager
def with_noise(causal_lm: PreTrainedModel, scale: Tensor) -> Iterator[None]:
    """Add noise to the output of the input embedding inside the block. Embeddings are not passed to the model
    instead of tokens, since Gemma 3n and 4 look the tokens up a second time, in each layer."""
    embedding = causal_lm.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: add_noise(output, scale))
    try:
        yield
    finally:
        hook.remove()


def add_noise(embedded: Tensor, scale: Tensor) -> Tensor:
    """Return NEFTune's noisy embeddings (Jain et al. 2023, algorithm 1): embedded (B, T, d) plus uniform
    noise in ±scale ÷ √d, with the scale (B, T) = α ÷ √L of each token's own sequence of L tokens. Drawn from
    torch's generator."""
    noise = torch.empty_like(embedded).uniform_(-1.0, 1.0)
    return embedded + noise * (scale / math.sqrt(embedded.shape[-1])).unsqueeze(-1).to(embedded.dtype)


def target_logps(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the log-probability of each target, 0 at NO_TARGET: (B, T, V) logits of any type -> (B, T)
    float32."""
    return plain_logps(logits.flatten(0, 1).float(), targets.flatten(), smoothing).view_as(targets)
