"""Takes a spec's `model` section, the tokenizer's facts and a seed; gives the module that an engine trains.

A fresh model is built on the meta device, cut to its stage, and only then filled, so a stage holds only its
own parameters. A pretrained one is read whole by every rank, then cut: reading once per host is still to
come.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dsft.errors import MissingInputError, Problem, SpecError
from dsft.model.config import TokenFacts, resolve_config
from dsft.model.init import fill
from dsft.model.lora import fill_adapters, inject
from dsft.model.names import has_file_names
from dsft.model.policy import Policy
from dsft.model.stage import check_cut, cut
from dsft.model.trainable import train_only
from dsft.spec.schema import Model


def build_model(
    model: Model, facts: TokenFacts, seed: int, dtype: torch.dtype, stage: int = 0, stages: int = 1
) -> Policy:
    """Stage `stage` of `stages` (the whole model where there is one), on the CPU, parameters in `dtype`.

    Raises SpecError for a config that cannot be made or cut, MissingInputError for a model that cannot be
    read.
    """
    config = resolve_config(model, facts)
    check_cut(config, stages)
    causal_lm = _on_meta(config) if model.from_config is not None else _pretrained(model, config, dtype)
    if model.gradient_checkpointing:  # before the cut: it looks for the input embeddings
        causal_lm.activation_checkpointing_enable({"use_reentrant": False})
    choose_trained(causal_lm, model)  # before the cut: patterns and names are the whole model's
    if stages > 1:
        cut(causal_lm, stage, stages)
    if model.from_config is not None:
        fill(causal_lm, seed, dtype)
    if model.lora is not None:
        fill_adapters(causal_lm, model.lora, seed, dtype)
    return Policy(causal_lm, is_first=stage == 0, is_last=stage == stages - 1)


def choose_trained(causal_lm: PreTrainedModel, model: Model) -> None:
    """Adapters and frozen parameters, as the spec says. Raises SpecError for names that fit nothing."""
    if model.lora is not None:
        inject(causal_lm, model.lora)
    elif model.trainable is not None:
        train_only(causal_lm, model.trainable)


def check_trainable(causal_lm: PreTrainedModel) -> None:
    """Raises SpecError for a model that would be trained by another loss than its own, or whose export would
    be refused after days of training."""
    if _is_mixture(causal_lm):
        reason = "is a mixture of experts, whose loss that balances its experts"
    elif _kept_beside(causal_lm):
        reason = (
            f"keeps {_kept_beside(causal_lm)[0]} in its file beside the parameters, and an export with it"
        )
    elif not has_file_names(causal_lm):
        reason = "has other tensors in files than in memory, and an export that turns them back"
    else:
        return
    kind = causal_lm.config.model_type
    message = f"a {kind} model {reason} is not built yet; choose a dense model such as llama, qwen3 or gemma2"
    raise SpecError("The model cannot be trained.", [Problem("model", message)])


def _is_mixture(causal_lm: PreTrainedModel) -> bool:
    """By its modules, since each architecture counts its experts under another key, and some can be dense."""
    last = (name.rpartition(".")[2] for name, _ in causal_lm.named_modules())
    return any("expert" in name or "router" in name for name in last)


def _kept_beside(causal_lm: PreTrainedModel) -> list[str]:
    """Buffers that stand in a model's file. A checkpoint holds parameters."""
    return [name for name, _ in causal_lm.named_buffers() if name in causal_lm.state_dict()]


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        causal_lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return causal_lm


def _pretrained(model: Model, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    assert model.name_or_path is not None, "the spec gives name_or_path or from_config"
    try:
        causal_lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model.name_or_path, config=config, dtype=dtype, trust_remote_code=False
        )
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise MissingInputError(
            f"model.name_or_path {model.name_or_path!r} has no readable weights: {reason} "
            "Give a folder with safetensors files, or a hub id that is in the cache or can be downloaded."
        ) from None
    return causal_lm
