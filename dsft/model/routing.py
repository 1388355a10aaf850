"""Count what the routers of a mixture of experts choose, and train them with a balance loss.

The loss of a layer is Σ_t Σ_i c[t, i] · a[t, i] over the tokens t of a step and the experts i. a is a token's
normalized affinity to an expert, and c, which gets no gradient, is

    f[s, i] ÷ (T_s · S)   balance: sequence (DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 17 to
                          20): of the token's sequence s, which has T_s tokens, among the S of the step;
                          f[s, i] = E ÷ (k · T_s) times the tokens of s whose k largest affinities have i
    n_t · f[i] ÷ T        balance: global_batch (https://arxiv.org/abs/2501.11873): T is the number of the
                          step's tokens; f[i] = E ÷ (k · T) times those that are routed to i; n_t is 1, or the
                          number of sequences that share the token

with E experts of which k are chosen; the losses of all layers are added up. Both are sums over tokens with
global counts, so they do not depend on how the step is divided. Each layer's gradient is added in its own
backward pass, where the router is: nothing of it is returned by the model or sent between pipeline stages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from dsft.data.steps.batch import Borders
from dsft.errors import Problem, SpecError
from dsft.model.attention_split import Exchange
from dsft.model.experts import ExpertLayer, expert_layers
from dsft.spec.schema import Experts

Affinity = Literal["softmax", "sigmoid"]
"""How a router turns its logits into affinities. Those of sigmoid are divided by their sum over the
experts."""

TRIED, SPREAD = 8, 2.0
"""Tokens with which a router is tried, and the standard deviation of their logits."""


@dataclass(frozen=True)
class Sequences:
    """The tokens of a micro-batch, by sequence. A token that several sequences share occurs once for each.

    number   (K,) int64: the sequence of each token
    weights  (K,) float64: 1, or 0 for padding, and for a token that another rank has
    count    number of sequences
    places   (K,) int64: the token's position in the flattened micro-batch; None: they are all in order
    """

    number: Tensor
    weights: Tensor
    count: int
    places: Tensor | None = None

    def pick(self, rows: Tensor) -> Tensor:
        """Return the rows (K, …) of the tokens, from those (N, …) of all positions."""
        return rows if self.places is None else rows[self.places]


def sequences_of(
    shape: torch.Size,
    borders: Borders | None,
    is_padding: Tensor | None,
    device: torch.device,
    begin: int = 0,
) -> Sequences:
    """Return the sequences of a micro-batch of this shape (B, T), on the device that has the other arguments:
    its rows, or the segments between the `borders` of a packed row, of which it may be the part that begins
    at token `begin`. is_padding: (B, T) bool; None: there is none. Does not wait for the device."""
    rows, length = shape
    places = None
    if borders is None:
        count, number = rows, torch.arange(rows, device=device).repeat_interleave(length)
    else:
        count, ends = len(borders[0]) - 1, borders[0]
        if len(borders) == 3:
            ends, places = borders[1], borders[2].long()
        first, last = (begin, begin + length) if places is None else (0, len(places))
        tokens = torch.arange(first, last, device=ends.device)
        number = torch.bucketize(tokens, ends[1:].contiguous(), right=True)
    is_token = torch.ones(rows * length, dtype=torch.float64, device=device)
    if is_padding is not None:
        is_token -= is_padding.flatten().double()
    if places is None:
        return Sequences(number, is_token, count)
    places = places - begin
    is_here = (places >= 0) & (places < length)
    places = places.clamp(0, length - 1)
    return Sequences(number, is_token[places] * is_here, count, places)


@dataclass(frozen=True)
class StepLoss:
    """What the balance loss of one step needs beside the micro-batches.

    kind         sequence or global_batch
    scale        the factor of the gradient: the loss's weight, times what the engine divides gradients by
    sequences    S of all ranks
    frequencies  (layers, experts) float64, for global_batch: tokens routed to each expert in the whole step
    """

    kind: Literal["sequence", "global_batch"]
    scale: float
    sequences: int
    frequencies: Tensor | None = None


class Routing:
    """The routers of a policy, or of one stage of it. Does nothing outside of `counting` and `training`.

    layers   of the whole model; `pop` returns a row for each, zeros where a layer is on another stage
    experts  the spec's model.experts
    """

    def __init__(
        self, layers: Sequence[ExpertLayer], affinities: Mapping[str, Affinity], experts: Experts
    ) -> None:
        """affinities: by name of the router."""
        self.layers, self.experts, self._affinities = tuple(layers), experts, affinities
        self.exchange: Exchange | None = None  # with the ranks over which the engine splits rows
        self._mode: Literal["off", "count", "train"] = "off"
        self._loss: StepLoss | None = None
        self._sequences: Sequences | None = None
        self._shape: tuple[torch.Size, Borders | None, Tensor | None] | None = None
        self._seen: set[int] = set()
        self._counts: Tensor | None = None

    @property
    def width(self) -> int:
        """Columns of what `pop` returns: the experts of the layer that has most, and the balance loss."""
        return max(layer.num_experts for layer in self.layers) + 1

    def watch(self, causal_lm: PreTrainedModel) -> None:
        """Watch the routers that are in `causal_lm`, which may be one stage of the model. Before DeepSpeed
        adds its hooks, which run after these."""
        modules = dict(causal_lm.named_modules())
        for index, layer in enumerate(self.layers):
            if layer.router in modules:
                modules[layer.router].register_forward_hook(partial(self._routed, index))

    def begin(self, shape: torch.Size, borders: Borders | None, is_padding: Tensor | None) -> None:
        """Begin a forward pass over a micro-batch of this shape (B, T)."""
        self._shape, self._sequences = (shape, borders, is_padding), None
        self._seen.clear()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is routed in the block."""
        self._mode = "count"
        try:
            yield
        finally:
            self._mode = "off"

    @contextmanager
    def training(self, loss: StepLoss | None) -> Iterator[None]:
        """Count what is routed in the block; with a loss also add its gradient in each backward pass."""
        self._mode, self._loss = "train", loss
        try:
            yield
        finally:
            self._mode, self._loss = "off", None

    def pop(self, device: torch.device) -> Tensor:
        """Return (layers, experts + 1) float64 since the last call, of this rank: tokens by expert, and last
        the balance loss without its weight."""
        found, self._counts = self._counts, None
        return self._zeros(device) if found is None else found

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(len(self.layers), self.width, dtype=torch.float64, device=device)

    def _routed(self, index: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        """Hook of a router's forward. Counts each pass once: gradient checkpointing runs a layer again in the
        backward pass, when all layers of the last forward pass have been seen."""
        if self._mode == "off":
            return None
        logits, weights, chosen = output
        first, device = index not in self._seen, logits.device
        self._seen.add(index)
        if self._counts is None:
            self._counts = self._zeros(device)
        if self._sequences is None:
            assert self._shape is not None, "a policy begins each pass"
            begin = self.exchange.number * self._shape[0].numel() if self.exchange else 0
            self._sequences = sequences_of(*self._shape, device, begin)
        if first:
            self._count(self._counts[index], chosen, self._sequences)
        if self._mode == "count" or self._loss is None:
            return None
        gradient = None
        if first:
            layer = self.layers[index]
            loss = LayerLoss(self._loss, self._affinities[layer.router], layer.top_k, index)
            with torch.no_grad():
                frequencies = loss.frequencies(logits, self._sequences, self.exchange)
                gradient = LayerGradient(loss, self._sequences, frequencies)
                self._counts[index, -1] += gradient.loss_of(logits)
        return (logits, _WithGradient.apply(weights, logits, gradient), chosen)

    def _count(self, row: Tensor, chosen: Tensor, sequences: Sequences) -> None:
        chosen = sequences.pick(chosen)
        row.index_add_(0, chosen.flatten(), sequences.weights.repeat_interleave(chosen.shape[1]))


@dataclass(frozen=True)
class LayerLoss:
    """The balance loss of one layer in one step. index: the layer's row of the step's frequencies."""

    step: StepLoss
    affinity: Affinity
    top_k: int
    index: int

    def frequencies(self, logits: Tensor, sequences: Sequences, exchange: Exchange | None = None) -> Tensor:
        """Return c without its factor n, (sequences, experts) float64, or (1, experts) for global_batch.
        logits: (N, experts); exchange: with the ranks that have other tokens of the same sequences."""
        experts, k = logits.shape[1], self.top_k
        if self.step.frequencies is not None:
            routed = self.step.frequencies[self.index, :experts]
            tokens = (routed.sum() / k).clamp(1.0)
            return (routed * (experts / k) / tokens.square()).unsqueeze(0)
        largest = sequences.pick(logits.topk(k, dim=-1).indices)
        lengths = logits.new_zeros(sequences.count, dtype=torch.float64)
        lengths.index_add_(0, sequences.number, sequences.weights)
        found = logits.new_zeros(sequences.count * experts, dtype=torch.float64)
        places = sequences.number.unsqueeze(1) * experts + largest
        found.index_add_(0, places.flatten(), sequences.weights.repeat_interleave(k))
        if exchange is not None:
            lengths, found = exchange.sum(torch.cat((lengths, found))).split((len(lengths), len(found)))
        scaled = found.view(-1, experts) * (experts / k / max(self.step.sequences, 1))
        return scaled / lengths.clamp(1.0).square().unsqueeze(1)


@dataclass(frozen=True)
class LayerGradient:
    """The balance loss of one layer in one micro-batch, and its gradient. frequencies: of `LayerLoss`."""

    loss: LayerLoss
    sequences: Sequences
    frequencies: Tensor

    def loss_of(self, logits: Tensor) -> Tensor:
        """Return the micro-batch's part of the loss, float64, without the step's scale. logits: (N,
        experts)."""
        return (affinities(logits, self.loss.affinity) * self._coefficients(len(logits))).sum()

    def by_logits(self, logits: Tensor) -> Tensor:
        """Return its gradient by the logits, with the step's scale."""
        a = affinities(logits, self.loss.affinity)
        c = self._coefficients(len(logits)).to(a.dtype)
        gradient = a * (c - (a * c).sum(-1, keepdim=True))
        if self.loss.affinity == "sigmoid":  # d log σ(x) = σ(-x)
            gradient = gradient * torch.sigmoid(-logits.to(a.dtype))
        return (gradient * self.loss.step.scale).to(logits.dtype)

    def _coefficients(self, positions: int) -> Tensor:
        """Return c, (N, experts) float64, of all N positions."""
        sequences, each = self.sequences, self.sequences.weights.unsqueeze(1)
        per_sequence = len(self.frequencies) > 1
        c = self.frequencies[sequences.number] * each if per_sequence else each
        if sequences.places is not None:
            c = c.new_zeros(positions, c.shape[1]).index_add_(0, sequences.places, c)
        return c if per_sequence else self.frequencies * c


class _WithGradient(torch.autograd.Function):
    """Returns a router's weights unchanged, and adds the gradient of a balance loss to that of its logits."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, gradient: LayerGradient | None) -> Tensor:
        """gradient: None where checkpointing computes the layer again; the backward pass then uses that of
        the first time, with the new logits, which are equal."""
        ctx.save_for_backward(logits)
        ctx.gradient = gradient
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (logits,) = ctx.saved_tensors
        return gradients[0], ctx.gradient.by_logits(logits), None


def affinities(logits: Tensor, kind: Affinity) -> Tensor:
    """Return the normalized affinities (N, experts), whose sum over the experts is 1, in float32 or the
    logits' float64."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.softmax(logits if kind == "softmax" else F.logsigmoid(logits), dim=-1)


def affinity_of(router: nn.Module, hidden_size: int) -> Affinity | None:
    """Return how a router turns logits into affinities, by trying a copy of it: the weights of the experts
    that it chooses for a token are in the same proportion as their affinities. None for a router that does
    not return (logits, weights, experts) of each token, or that has other affinities."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        tried = copy.deepcopy(router).to_empty(device="cpu").float().eval()
        for parameter in tried.parameters():
            parameter.normal_(std=SPREAD / hidden_size**0.5)
        for buffer in tried.buffers():
            buffer.zero_()
        try:
            logits, weights, chosen = tried(torch.randn(TRIED, hidden_size))
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            return None
    shapes = [getattr(found, "shape", ()) for found in (logits, weights, chosen)]
    if [len(shape) for shape in shapes] != [2, 2, 2] or shapes[1] != shapes[2] or chosen.is_floating_point():
        return None
    kinds: tuple[Affinity, ...] = ("softmax", "sigmoid")
    for kind in kinds:
        picked = affinities(logits, kind).gather(1, chosen)
        if torch.allclose(_shares(picked), _shares(weights.float()), rtol=1e-4, atol=1e-6):
            return kind
    return None


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def routing_of(causal_lm: PreTrainedModel, experts: Experts) -> Routing | None:
    """Return the routing of a whole model; None where it has no mixture of experts, or a router whose choice
    cannot be read. Raises SpecError where the spec asks for what the model does not have."""
    layers, kind = expert_layers(causal_lm), causal_lm.config.model_type
    if not layers:
        asked = {"freeze_router": experts.freeze_router, "balance": experts.balance != "none"}
        message = f"a {kind} model has no experts; leave it out"
        problems = [Problem(f"model.experts.{key}", message) for key, is_set in asked.items() if is_set]
        if problems:
            raise SpecError("The model has no routers.", problems)
        return None
    size = causal_lm.config.get_text_config().hidden_size
    routers = {layer.router: causal_lm.get_submodule(layer.router) for layer in layers}
    of_class = {type(router): router for router in routers.values()}
    tried = {router_class: affinity_of(router, size) for router_class, router in of_class.items()}
    affinities = {name: found for name, router in routers.items() if (found := tried[type(router)])}
    if len(affinities) == len(layers):
        return Routing(layers, affinities, experts)
    if experts.balance != "none":
        message = f"{experts.balance} cannot be computed for the routers of a {kind} model; set it to none"
        raise SpecError("The model's routers are not known.", [Problem("model.experts.balance", message)])
    return None


def freeze_routers(causal_lm: PreTrainedModel) -> None:
    """Freeze the parameters of all routers."""
    for layer in expert_layers(causal_lm):
        causal_lm.get_submodule(layer.router).requires_grad_(False)
