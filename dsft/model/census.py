"""Count a model's parameters without its weights, for `dsft plan` and for a run's start: build the
transformers class on the meta device. Reads the config and tokenizer from their folder or the hub's cache."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dsft.data.tokenizer.load import open_tokenizer
from dsft.model.attention_choice import requirements_of
from dsft.model.build import around, check_trainable, choose_trained
from dsft.model.config import TokenFacts, on_meta, resolve_config, token_facts
from dsft.model.experts import choose_experts, expert_layers
from dsft.model.kernels import fused
from dsft.model.mlp_chunks import check_layers, mlps_of
from dsft.model.names import plain_name
from dsft.model.quantize_model import quantized_weights
from dsft.model.recurrence import saved_bytes
from dsft.model.split_check import query_heads
from dsft.model.split_points import find_split_points
from dsft.model.stage import SplitPoints
from dsft.model.whole_proof import check_text
from dsft.spec.schema import Model

NOT_SEARCHED = "the split points of its layers were not searched"


def take_census(model: Model, facts: TokenFacts | None = None, *, cuts: bool = True) -> dict[str, Any]:
    """Return names, shapes and places of all parameters. Raises SpecError and MissingInputError as
    `build_model` does. `facts`: of the tokenizer, where it has been read; cuts: find out where the model can
    be cut into stages."""
    config = resolve_config(model, facts or _facts(model))
    causal_lm = on_meta(config)
    check_trainable(causal_lm)
    choose_experts(causal_lm, model.experts.implementation)
    whole = around(model, causal_lm)
    if whole is not None:
        check_text(whole.model.config)
    queries = query_heads(causal_lm, max_length=0)  # before weights are in 4 bits, which take values
    choose_trained(causal_lm, model, whole)
    check_layers(causal_lm, model)
    split_points = find_split_points(config) if cuts else NOT_SEARCHED
    before = split_points.before if isinstance(split_points, SplitPoints) else ()
    return {
        "architecture": type(causal_lm).__name__,
        "num_layers": config.num_hidden_layers,
        "max_positions": getattr(config, "max_position_embeddings", None),
        "parameters": _parameters(causal_lm, config.num_hidden_layers, before),
        "uncuttable": split_points if isinstance(split_points, str) else None,
        "heads": _heads(causal_lm),
        "unsplittable": queries if isinstance(queries, str) else None,
    }


def _facts(model: Model) -> TokenFacts:
    tokenizer, added = open_tokenizer(model)
    return token_facts(tokenizer, added.first_id)


def _parameters(causal_lm: PreTrainedModel, num_layers: int, before: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return one entry per distinct tensor, under its first name; a tied one has its other names in
    `aliases`."""
    embedding = causal_lm.get_input_embeddings().weight
    layers = _layers(causal_lm, num_layers)
    mixtures = {id(p): one for one in expert_layers(causal_lm) for p in _of(causal_lm, one.experts)}
    recurrent = {
        id(p): saved if number == 0 else (0, 0)
        for name, saved in saved_bytes(causal_lm).items()
        for number, p in enumerate(_of(causal_lm, name))
    }
    mlps = {id(p): plain_name(name) for name, mlp in mlps_of(causal_lm).items() for p in mlp.parameters()}
    quantized = quantized_weights(causal_lm)
    kernels = {
        id(p)
        for module in causal_lm.modules()
        if (one := fused(module)) and one.kind in ("norms", "MLPs")
        for p in module.parameters()
    }
    found: dict[int, dict[str, Any]] = {}
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        if id(parameter) in found:
            found[id(parameter)]["aliases"].append(plain_name(name))
            continue
        found[id(parameter)] = {
            "name": plain_name(name),
            "shape": list(parameter.shape),
            "layer": layers.get(id(parameter)),
            "embedding": parameter is embedding,
            "before": parameter is embedding or name.startswith(tuple(f"{module}." for module in before)),
            "trained": parameter.requires_grad,
            "aliases": [],
        }
        if id(parameter) in quantized:
            found[id(parameter)]["form"] = quantized[id(parameter)][0]
        if id(parameter) in kernels:
            found[id(parameter)]["fused"] = True
        if id(parameter) in mlps:
            found[id(parameter)]["mlp"] = mlps[id(parameter)]
        if id(parameter) in recurrent:
            found[id(parameter)]["saved"] = list(recurrent[id(parameter)])
        if id(parameter) in mixtures:
            mixture = mixtures[id(parameter)]
            found[id(parameter)] |= {"experts": mixture.num_experts, "top_k": mixture.top_k}
    return list(found.values())


def _heads(causal_lm: PreTrainedModel) -> dict[str, Any] | None:
    """Return the fields of `Heads`; None for a model whose config names no heads."""
    if not isinstance(getattr(causal_lm.config.get_text_config(), "num_attention_heads", None), int):
        return None
    asked = requirements_of(causal_lm)
    modules = list(causal_lm.modules())

    def size(name: str, otherwise: int) -> int:
        found = (getattr(module, name, None) for module in modules)
        return max((one for one in found if isinstance(one, int)), default=otherwise)

    latent = size("qk_head_dim", 0)  # of latent attention, whose keys have as many heads as its queries
    width = latent or max(asked.head_sizes)
    return {
        "queries": asked.heads,
        "keys": asked.heads if latent else asked.key_heads,
        "width": width,
        "values": size("v_head_dim", width),
        "softcap": asked.softcap is not None,
    }


def _of(causal_lm: PreTrainedModel, module: str) -> list[nn.Parameter]:
    return list(causal_lm.get_submodule(module).parameters())


def _layers(causal_lm: PreTrainedModel, num_layers: int) -> dict[int, int]:
    """Return the layer number by parameter id, from the list that has as many modules as the config has
    layers."""
    for module in causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return {id(p): index for index, layer in enumerate(module) for p in layer.parameters()}
    return {}
