"""Takes a spec's `model` section, the tokenizer's facts and a seed; gives the module that an engine trains.

The model is built on the meta device, changed there (adapters, head, cut to a stage), and only then filled,
tensor by tensor, from one source: fresh values by the seed, or a folder's files. So a stage reads and holds
only its own parameters, and an engine that keeps a share of each never holds the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dsft.errors import Problem, SpecError
from dsft.model.compiled import compile_layers
from dsft.model.config import TokenFacts, new_rows, resolve_config
from dsft.model.files import FileValues, NotUnderstood, weight_files
from dsft.model.init import FreshWeights
from dsft.model.joints import check_cut
from dsft.model.kernels import use_liger
from dsft.model.lora import check_saved, fill_adapted, inject, with_adapters
from dsft.model.names import has_file_names
from dsft.model.policy import Policy
from dsft.model.read import ReadWeights, read_whole
from dsft.model.stage import cut_to_stage
from dsft.model.trainable import train_only
from dsft.model.vocabulary import NewRows, Values, WithNewRows
from dsft.model.weights import Keep, Weights
from dsft.older import checkpoint_activations
from dsft.plan.cut import Cut
from dsft.spec.schema import Model

WHOLE = Keep()

MIXING = ("experts", "router", "router_gate")
"""What transformers calls the parts of a mixture of experts."""


def build_model(
    model: Model,
    facts: TokenFacts,
    seed: int,
    dtype: torch.dtype,
    stage: int = 0,
    cut: Cut | None = None,
    keep: Keep = WHOLE,
) -> Policy:
    """Stage `stage` of `cut` (the whole model where there is none), on the CPU, parameters in `dtype`. The
    engine's `keep` says which range of each parameter is filled, and takes each as soon as it is.

    Raises SpecError for a config that cannot be made or cut, MissingInputError for a model that cannot be
    read, or whose files hold another model.
    """
    config = resolve_config(model, facts)
    cut = cut or Cut((config.num_hidden_layers,))
    joints = check_cut(config, cut) if cut.stages > 1 else None
    causal_lm = _on_meta(config)
    weights = _weights(model, causal_lm, seed, dtype, new_rows(model, facts))
    if model.gradient_checkpointing:  # before the cut: it looks for the input embeddings
        on_gpu = torch.cuda.is_available()  # else activations are in the host's memory already
        offload = model.activation_offload and on_gpu
        checkpoint_activations(causal_lm, offload)
    choose_trained(causal_lm, model)  # before the cut: patterns and names are the whole model's
    if joints is not None:
        cut_to_stage(causal_lm, joints, stage, cut)
    if model.kernels == "liger":
        use_liger(causal_lm)
    if model.compile:
        compile_layers(causal_lm)
    policy = Policy(causal_lm, is_first=stage == 0, is_last=stage == cut.stages - 1)
    if model.lora is not None:
        fill_adapted(weights, policy, dtype, with_adapters(causal_lm, model.lora, seed, dtype, keep))
    else:
        weights.fill(policy, dtype, keep)
    return policy


def first_values(
    model: Model, causal_lm: PreTrainedModel, seed: int, dtype: torch.dtype, rows: NewRows | None = None
) -> Callable[[str], Tensor]:
    """Parameter's name -> its value before any training, on the CPU. `causal_lm` stands on the meta device;
    a fresh one is filled by this, one of files is read a tensor at a time. Raises as `build_model` does."""
    weights = _weights(model, causal_lm, seed, dtype, rows)
    if isinstance(weights, ReadWeights):
        return lambda name: weights.tensor(causal_lm.get_parameter(name), dtype)
    weights.fill(causal_lm, dtype, WHOLE)
    return lambda name: causal_lm.get_parameter(name).detach()


def has_frozen(model: Model) -> bool:
    """Whether only a part of the parameters, or adapters, are trained."""
    return model.lora is not None or model.trainable is not None


def choose_trained(causal_lm: PreTrainedModel, model: Model) -> None:
    """Adapters and frozen parameters, as the spec says. Raises SpecError for names that fit nothing."""
    if model.lora is not None:
        inject(causal_lm, model.lora)
        check_saved(causal_lm, model.lora)
    elif model.trainable is not None:
        train_only(causal_lm, model.trainable)


def check_trainable(causal_lm: PreTrainedModel) -> None:
    """Raises SpecError for a model that would be trained by another loss than its own, or whose export would
    be refused after days of training."""
    if _is_mixture(causal_lm):
        reason = "is a mixture of experts, whose loss that balances its experts"
    elif not has_file_names(causal_lm):
        reason = "has other tensors in files than in memory, and an export that turns them back"
    else:
        return
    kind = causal_lm.config.model_type
    message = f"a {kind} model {reason} is not built yet; choose a dense model such as llama, qwen3 or gemma2"
    raise SpecError("The model cannot be trained.", [Problem("model", message)])


def _is_mixture(causal_lm: PreTrainedModel) -> bool:
    """By its modules, since each architecture counts its experts under another key, and some can be dense."""
    last = {name.rpartition(".")[2] for name, _ in causal_lm.named_modules()}
    return not last.isdisjoint(MIXING)


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        causal_lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    return causal_lm


def _weights(
    model: Model, causal_lm: PreTrainedModel, seed: int, dtype: torch.dtype, rows: NewRows | None
) -> Weights:
    """The source of values, which is asked before the model is changed. Files that cannot be read tensor by
    tensor are read whole, by transformers' own loader."""

    def weights_of(values: Values) -> ReadWeights:
        return ReadWeights(causal_lm, WithNewRows(causal_lm, values, rows) if rows else values)

    name = model.name_or_path
    if name is None:
        return FreshWeights(causal_lm, seed)
    try:
        files = weight_files(name)
        if files:
            return weights_of(FileValues(causal_lm, files, f"model.name_or_path {name!r}"))
        reason = "it has no safetensors files"
    except NotUnderstood as error:
        reason = f"{error} is not understood"
    config = causal_lm.config
    weights = weights_of(read_whole(config, name, dtype, rows.held if rows else config.vocab_size))
    warnings.warn(f"{name}: every rank reads the whole model, since {reason}", stacklevel=2)
    return weights
