"""Build the module that an engine trains, from a spec's `model` section, the tokenizer's facts and a seed.

The model is built on the meta device, changed there (adapters, head, cut to a stage), and only then filled,
tensor by tensor, from one source: fresh values by the seed, or a folder's files. So a stage reads and stores
only its own parameters, and an engine that keeps a share of each never has the whole in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dsft.errors import MissingInputError, Problem, SpecError
from dsft.model.activations import offload_activations
from dsft.model.config import TokenFacts, config_around, has_scores, new_rows, on_meta, resolve_config
from dsft.model.conversion import UnsupportedConversionError, write_map
from dsft.model.experts import choose_experts, expert_layers
from dsft.model.files import SafetensorsReader, weight_files
from dsft.model.init import FreshWeights
from dsft.model.kernels import choose_kernels, on_gpu
from dsft.model.lora import check_saved, fill_adapted, inject, with_adapters
from dsft.model.mlp_chunks import chunk_mlps
from dsft.model.older import checkpoint_activations
from dsft.model.policy import Policy
from dsft.model.quantize_model import quantize_model, quantized_weights
from dsft.model.read import SCORE, PackedOf, ReadWeights, WithFreshScore, read_whole
from dsft.model.routing import freeze_routers, routing_of
from dsft.model.split_points import check_cut
from dsft.model.stacked import check_stacked
from dsft.model.stage import cut_to_stage
from dsft.model.vocabulary import ExtendedReader, NewRows
from dsft.model.weights import PRECISIONS, Sharding, StorageOf, TensorReader, Weights, plain
from dsft.model.whole import Whole, whole_of
from dsft.plan.cut import Cut
from dsft.plan.storage import Form, Storage
from dsft.spec.patterns import matches, unmatched
from dsft.spec.schema import Model

WHOLE = Sharding()

BACKEND = "inductor"
"""The backend of torch.compile."""


@dataclass(frozen=True)
class Part:
    """The part of a model that a rank has: stage `stage` of `cut`, all layers without a cut. The engine's
    `sharding` decides which range of each of its parameters is filled, and takes each once it is filled."""

    stage: int = 0
    cut: Cut | None = None
    sharding: Sharding = WHOLE


def build_model(
    model: Model,
    facts: TokenFacts,
    seed: int,
    dtype: torch.dtype,
    part: Part = Part(),  # noqa: B008  frozen
    tokens: int | None = None,
    source: Weights | None = None,
) -> Policy:
    """Build a part of a model, on the CPU, parameters in `dtype`. tokens: that a rank has of the largest
    micro-batch, which model.mlp_chunks is for; None: of each. source: of the values; None: the model's own.

    Raises SpecError for a config that cannot be built or cut, MissingInputError for a model that cannot be
    read, or whose files contain another model.
    """
    config = resolve_config(model, facts)
    stage, cut, sharding = part.stage, part.cut or Cut((config.num_hidden_layers,)), part.sharding
    split_points = check_cut(config, cut) if cut.stages > 1 else None
    causal_lm = on_meta(config)
    check_trainable(causal_lm)
    choose_experts(causal_lm, model.experts.implementation)
    whole = around(model, causal_lm)
    weights = source or _weights(model, causal_lm, seed, dtype, new_rows(model, facts), whole)
    if model.gradient_checkpointing:  # before the cut: it looks for the input embeddings
        checkpoint_activations(causal_lm)
        if model.activation_offload and on_gpu():  # else they are in the host's memory already
            offload_activations(causal_lm)
        for number, layer in enumerate(layers_of(causal_lm)):
            layer.gradient_checkpointing = model.checkpoints(number)
    routing = routing_of(causal_lm, model.experts)
    choose_trained(causal_lm, model, whole)  # before the cut: patterns and names are the whole model's
    storage_of = storages(causal_lm, dtype)
    kernels = choose_kernels(causal_lm, model.kernels, compiled=model.compile)
    if model.gradient_checkpointing and model.mlp_chunks is not None and model.mlp_chunks > 1:
        chunk_mlps(causal_lm, model.mlp_chunks, tokens)
    if split_points is not None:
        cut_to_stage(causal_lm, split_points, stage, cut)
    if model.compile:
        compile_layers(causal_lm)
    routing = None if model.compile else routing  # which would compile its hooks
    is_last = stage == cut.stages - 1
    policy = Policy(causal_lm, is_first=stage == 0, is_last=is_last, routing=routing)
    policy.kernels = kernels
    if model.lora is not None:
        names = whole.name if whole else str
        adapters = with_adapters(causal_lm, model.lora, seed, dtype, sharding, names)
        fill_adapted(weights, policy, storage_of, adapters)
    else:
        weights.fill(policy, storage_of, sharding)
    return policy


def initial_values(
    model: Model, causal_lm: PreTrainedModel, seed: int, dtype: torch.dtype, rows: NewRows | None = None
) -> Callable[[str, Form], Tensor]:
    """Return a function from a parameter's name, and the form in which it is stored, to its value before any
    training, on the CPU. `causal_lm` is on the meta device; a fresh model is filled by this, one from files
    is read a tensor at a time. Raises as `build_model` does."""
    weights = _weights(model, causal_lm, seed, dtype, rows, around(model, causal_lm))
    if isinstance(weights, ReadWeights):
        return lambda name, form: weights.tensor(causal_lm.get_parameter(name), dtype, form)
    weights.fill(causal_lm, plain(dtype), WHOLE)
    return lambda name, _: causal_lm.get_parameter(name).detach()


def around(model: Model, causal_lm: PreTrainedModel) -> Whole | None:
    """Return the multimodal model whose text model `causal_lm` is; None where there is none. Raises as
    `whole_of` and `config_around` do."""
    config = None if model.name_or_path is None else config_around(model.name_or_path)
    return None if config is None else whole_of(config, causal_lm)


def has_frozen(model: Model) -> bool:
    """Whether only a part of the parameters, or adapters, are trained."""
    return model.lora is not None or model.trainable is not None or model.experts.freeze_router


def choose_trained(causal_lm: PreTrainedModel, model: Model, whole: Whole | None = None) -> None:
    """Add adapters, freeze parameters and quantize, as the spec says. whole: the multimodal model around it.
    Raises SpecError for names that match nothing."""
    if model.lora is not None:
        names = whole.name if whole else str
        inject(causal_lm, model.lora, names)
        check_saved(causal_lm, model.lora, names)
    elif model.trainable is not None:
        train_only(causal_lm, model.trainable)
    if model.experts.freeze_router:
        freeze_routers(causal_lm)
    quantize_model(causal_lm, model)
    check_stacked(causal_lm, model)
    # ZeRO 3 gathers mixtures of some classes as one module, whose gradients DeepSpeed reduces when that by
    # its input is there (stage3.py:1559 register_full_backward_hook): too early where the input needs none.
    mixtures = [causal_lm.get_submodule(layer.block) for layer in expert_layers(causal_lm)]
    if any(p.requires_grad for mixture in mixtures for p in mixture.parameters()):
        causal_lm.enable_input_require_grads()


def storages(causal_lm: nn.Module, dtype: torch.dtype) -> StorageOf:
    """Return what each parameter on the meta device is stored as, in a model that computes in `dtype`."""
    quantized, precision = quantized_weights(causal_lm), PRECISIONS[dtype]
    return lambda parameter: Storage(precision, *quantized.get(id(parameter), ()))


def check_trainable(causal_lm: PreTrainedModel) -> None:
    """Raise SpecError for a model whose export would be refused after days of training. `causal_lm` is on the
    meta device."""
    shapes = {name: tuple(tensor.shape) for name, tensor in causal_lm.named_parameters()}
    try:
        for conversion in write_map(causal_lm, shapes).conversions:
            conversion.shapes(shapes.__getitem__, causal_lm)
    except UnsupportedConversionError as error:
        kind = causal_lm.config.model_type
        message = (
            f"a {kind} model has other tensors in its files than in memory, and {error} cannot be exported"
        )
        raise SpecError("The model cannot be trained.", [Problem("model", message)]) from None


def _weights(
    model: Model,
    causal_lm: PreTrainedModel,
    seed: int,
    dtype: torch.dtype,
    rows: NewRows | None,
    whole: Whole | None,
) -> Weights:
    """Return the source of values; it is set up before the model is changed. Files that cannot be read tensor
    by tensor are read whole, by transformers' own loader."""

    scores = has_scores(causal_lm.config)

    def weights_of(values: TensorReader, *packed_of: PackedOf) -> ReadWeights:
        values = WithFreshScore(causal_lm, values, seed) if scores and SCORE not in values.shapes else values
        values = ExtendedReader(causal_lm, values, rows) if rows else values
        return ReadWeights(causal_lm, values, *packed_of)

    name = model.name_or_path
    if name is None:
        return FreshWeights(causal_lm, seed)
    try:
        files = weight_files(name)
        if files:
            reader = SafetensorsReader(causal_lm, files, f"model.name_or_path {name!r}", whole)
            return weights_of(reader, reader.packed)
        reason = "it has no safetensors files"
    except UnsupportedConversionError as error:
        reason = f"{error} needs the values"
    if whole:
        kind = whole.model.config.model_type
        raise MissingInputError(
            f"model.name_or_path {name!r}: the text model of a {kind} model is read from safetensors files, "
            f"tensor by tensor, but {reason}; save it again with transformers, or choose another model."
        )
    if scores:
        raise MissingInputError(
            f"model.name_or_path {name!r}: a model with scores is read from safetensors files, tensor by "
            f"tensor, but {reason}; save it again with transformers."
        )
    config = causal_lm.config
    weights = weights_of(read_whole(config, name, dtype, rows.held if rows else config.vocab_size))
    warnings.warn(f"{name}: every rank reads the whole model, since {reason}", stacklevel=2)
    return weights


def train_only(causal_lm: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze every parameter that no pattern matches, but the layer of a score; a tied one is trained where
    one of its names matches.

    Raises SpecError for a pattern that matches no parameter.
    """
    named = list(causal_lm.named_parameters(remove_duplicate=False))
    problems = list(unmatched("model.trainable.{}", patterns, [name for name, _ in named]))
    if problems:
        raise SpecError("These parameters cannot be trained.", problems)
    causal_lm.requires_grad_(False)
    for name, parameter in named:
        if name == SCORE or any(matches(name, pattern) for pattern in patterns):
            parameter.requires_grad_(True)


def compile_layers(causal_lm: PreTrainedModel) -> None:
    """Let torch.compile compile each decoder layer at its first use, in place. One layer at a time, since all
    layers of a kind share one graph; with dynamic shapes, since each micro-batch has its own length. Gradient
    checkpointing is compiled with the layer; attention with padded rows too. Parameters keep
    their names."""
    for layer in layers_of(causal_lm):
        layer.compile(dynamic=True, backend=BACKEND)


def layers_of(causal_lm: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the decoder layers, in order."""
    return [module for module in causal_lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def switch_off_dropout(causal_lm: PreTrainedModel) -> tuple[str, ...]:
    """Set every dropout probability to 0: of dropout modules, of modules that have one as a number
    (attention_dropout, layerdrop), and in the config, which some read in each forward pass.

    Returns "NAME VALUE" of each that was on, by the config's names where it has any.
    """
    found: dict[str, float] = {}
    for path, module in causal_lm.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found |= _off(module, ("p",), path.rpartition(".")[2])
        else:
            found |= _off(module, _named(module))
    config: Any = causal_lm.config
    by_config = _off(config, _named(config))
    text = config.get_text_config()
    by_config |= _off(text, _named(text))
    return tuple(f"{name} {value:g}" for name, value in sorted((by_config or found).items()))


def _named(owner: object) -> tuple[str, ...]:
    return tuple(name for name in vars(owner) if "drop" in name)


def _off(owner: object, names: tuple[str, ...], shown: str | None = None) -> dict[str, float]:
    """Set these probabilities to 0; return those that were on, by name."""
    on = {name: value for name in names if isinstance(value := getattr(owner, name), float) and value > 0}
    for name in on:
        setattr(owner, name, 0.0)
    return {shown or name: value for name, value in on.items()}
