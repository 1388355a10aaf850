"""Make the transformers config of the model to train, from a spec's `model` section and the tokenizer's
facts.

A pretrained model's config is read from its folder (or the hub's cache); a fresh one's is made from
`from_config`, whose keys are checked against the config class, since transformers silently accepts unknown
ones.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from dsft.data.tokenizer.load import num_ids
from dsft.errors import MissingInputError, Problem, SpecError, brief
from dsft.model.older import can_use_sdpa
from dsft.model.vocabulary import NewRows
from dsft.model.whole import text_config
from dsft.plan.storage import Form
from dsft.spec.architecture import quantization
from dsft.spec.document import quote
from dsft.spec.files import unfit_model
from dsft.spec.schema import Model
from dsft.system.hub import hub_obstacle, is_hub_id

WHERE = "model.from_config"

DECODERS = tuple(
    """
    falcon gpt2 gpt_bigcode granitemoe granitemoe_swa granitemoeshared hunyuan_v1_dense hunyuan_v1_moe
    lfm2 lfm3 nemotron olmoe opt persimmon stablelm
    """.split()
)
"""Model types that are tested to be trained right (tests/architectures), though they have no
`base_model_pp_plan`."""

UNTESTED = tuple(
    """
    axk2 cohere2_moe deepseek_v32 deepseek_v4 dots3_note_text flint glm_moe_dsa hrm_text hy_v4
    inkling_text kimi_linear longcat_flash minimax minimax_m3_vl_text olmo_hybrid
    """.split()
)
"""Model types that have a `base_model_pp_plan`, but are not tested to be trained right."""
INSIDE = ("qwen3_vl_text",)
"""Model types of text models inside multimodal ones that are tested likewise."""

FLASH = {
    "flash_attention_2": ("flash-attn", is_flash_attn_2_available),
    "flash_attention_3": ("flash_attn_interface", is_flash_attn_3_available),
}

# transformers converts these to `rope_parameters`, so they are valid although no field has their name.
ROPE_KEYS = ("rope_theta", "rope_scaling")

# Read by models whose config class has no such field, such as qwen3_moe, so it is in their config.json too.
READ_KEY = "head_dim"


@dataclass(frozen=True)
class TokenFacts:
    """What a model must know of its tokenizer. vocab_size counts all ids, special tokens included; first_new:
    id of the first token that model.add_tokens added, None where it added none."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    first_new: int | None = None


def token_facts(tokenizer: PreTrainedTokenizerBase, first_new: int | None = None) -> TokenFacts:
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return TokenFacts(num_ids(tokenizer), *special, first_new)


def resolve_config(model: Model, facts: TokenFacts) -> PreTrainedConfig:
    """Return the config of the model to train, with the attention implementation set, and the class of a
    model that gives scores as its architecture (`has_scores`).

    A pretrained model with fewer tokens than the tokenizer is resized to the tokenizer's (`new_rows`). Raises
    SpecError where `from_config` has what its class does not know or refuses, or a smaller vocabulary than
    the tokenizer's; MissingInputError where `name_or_path` cannot be read.
    """
    config = (
        _fresh(model.from_config, facts)
        if model.from_config is not None
        else read_config(str(model.name_or_path))
    )
    _check_kind(config, model.quantize)
    if model.head == "score":
        _set_scores(config, model)
    elif has_scores(config):
        config.architectures = None
    if config.vocab_size < facts.vocab_size:
        if model.from_config is not None:
            raise _error(
                f"{WHERE}.vocab_size",
                f"{config.vocab_size}, but the tokenizer has {facts.vocab_size} tokens, so some would have "
                f"no embedding; set at least {facts.vocab_size}, or leave it out for the tokenizer's",
            )
        config.vocab_size = facts.vocab_size
    config._attn_implementation = _attention(model, config)
    return config


def new_rows(model: Model, facts: TokenFacts) -> NewRows | None:
    """Return the embedding rows for which no file has a value: those of the tokens that model.add_tokens
    adds, and those that a pretrained model lacks. None where there are none."""
    if model.name_or_path is None:
        return None
    held = read_config(model.name_or_path).vocab_size
    first = facts.vocab_size if facts.first_new is None else facts.first_new
    return NewRows(min(first, held), facts.vocab_size, held) or None


def has_scores(config: PreTrainedConfig) -> bool:
    """Whether a model with this config gives scores (`ForSequenceClassification`, in its file
    `score.weight`), not logits over the vocabulary."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _set_scores(config: PreTrainedConfig, model: Model) -> None:
    """Make the config one of a model that gives scores, one for each of the spec's labels or the reward, as
    transformers saves it. Raises SpecError where transformers has no such model, or it has other scores."""
    names = model.labels or ("reward",)
    kind: str = config.model_type
    architecture: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if model.name_or_path is not None and config_around(model.name_or_path) is not None:
        raise _error(
            "model", f"a {kind} model inside a multimodal one is not trained to give scores; choose another"
        )
    if architecture is None:
        raise _error(
            "model",
            f"transformers has no class for scores (…ForSequenceClassification) of {kind} models; choose a "
            "model of another kind",
        )
    held = tuple((config.id2label or {}).values())
    unnamed = not model.labels or held == tuple(f"LABEL_{number}" for number in range(len(names)))
    if has_scores(config) and not (held == names or (unnamed and len(held) == len(names))):
        raise _error(
            "model",
            f"it gives scores of {quote(held)}, and the task trains those of {quote(names)}; give the "
            "model from which it was trained",
        )
    config.architectures = [architecture.__name__]
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    # pipelines of transformers show a regression's score as it is
    config.problem_type = "single_label_classification" if model.labels else "regression"


def _check_kind(config: PreTrainedConfig, form: Form | None) -> None:
    """Raise SpecError unless the model is a causal language model of text alone, reads from left to right,
    is not quantized in another form than this, and is tested to be trained right."""
    kind = config.model_type
    quantized = quantization(vars(config), form)
    if quantized is not None:
        raise _error("model", quantized)
    if config.sub_configs:
        parts, text = ", ".join(config.sub_configs), text_config(config)
        way_out = f"set model_type to {text.model_type}" if text else "choose another model"
        reason = "a new one can only be one" if text else "transformers builds no causal language model of it"
        raise _error(
            "model",
            f"a {kind} model is more than a text model (its config has {parts}), and {reason}; {way_out}",
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _error("model", f"{kind} is not a causal language model of transformers; choose another model")
    if kind in UNTESTED or (not config.base_model_pp_plan and kind not in (*DECODERS, *INSIDE)):
        raise _error(
            "model",
            f"training a {kind} model is not tested; choose a model of the table in docs/models.md, such as "
            "llama, qwen3 or gemma2",
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise _error(
            "model",
            f"this {kind} model attends to later tokens (use_bidirectional_attention); choose a causal one",
        )


def _attention(model: Model, config: PreTrainedConfig) -> str:
    """Return the attention implementation. auto: torch's own kernel where the architecture supports it; a
    soft-cap inside attention (Gemma 2) does not."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    can_sdpa = can_use_sdpa(model_class, config)
    if model.attention == "auto":
        return "sdpa" if can_sdpa else "eager"
    if model.attention == "sdpa" and not can_sdpa:
        raise _error(
            "model.attention", f"{model_class.__name__} does not support sdpa; set auto, which uses eager"
        )
    if model.attention in FLASH:
        _check_flash(model.attention, model_class)
    return model.attention


def _check_flash(attention: str, model_class: Any) -> None:
    package, is_there = FLASH[attention]
    if not is_there():
        raise _error(
            "model.attention",
            f"{attention} needs the package {package} and a GPU that it supports, which were not found; "
            "install it, or set auto",
        )
    if not model_class._supports_flash_attn:
        raise _error("model.attention", f"{model_class.__name__} does not support {attention}; set auto")


def _fresh(given: Mapping[str, Any], facts: TokenFacts) -> PreTrainedConfig:
    kind = str(given.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise _error(
            f"{WHERE}.model_type",
            f"{kind!r} is not a model type of transformers{_meant(kind, CONFIG_MAPPING)}",
        )
    config_class = CONFIG_MAPPING[kind]
    keys = {name: value for name, value in given.items() if name != "model_type"}
    known = _known_keys(config_class)
    problems = [
        Problem(f"{WHERE}.{name}", f"{name} is not a key of {config_class.__name__}{_meant(name, known)}")
        for name in keys
        if name not in known
    ]
    if problems:
        raise SpecError("The model's config cannot be made.", problems)
    of_tokenizer = dataclasses.asdict(facts)
    del of_tokenizer["first_new"]
    try:
        config: PreTrainedConfig = config_class(**(of_tokenizer | keys))
    except Exception as error:  # whatever a config class does with odd values
        raise _error(WHERE, f"{config_class.__name__} rejects it: {_reason(error)}") from None
    return config


def read_config(name_or_path: str | Path) -> PreTrainedConfig:
    """Return the config of a model's folder or hub id; of a multimodal model that of its text model, where it
    has one. Raises as `read_whole_config` does."""
    config = read_whole_config(name_or_path)
    return text_config(config) or config


def config_around(name_or_path: str | Path) -> PreTrainedConfig | None:
    """Return the config of the multimodal model whose text model `read_config` gives; None where the model is
    a text model. Raises as `read_whole_config` does."""
    config = read_whole_config(name_or_path)
    return config if text_config(config) else None


def read_whole_config(name_or_path: str | Path) -> PreTrainedConfig:
    """Return the config of a model's folder or hub id as it is, but without the choice of kernels that its
    file may name: transformers would download the code of a kernel from the hub and import it, whatever
    trust_remote_code is (5.23, `is_kernel` in transformers.integrations.hub_kernels).

    Raises MissingInputError where there is no config that can be read, or it names a kernel of the hub.
    """
    if unfit := unfit_model(name_or_path):
        raise MissingInputError(f"{unfit}; give a folder of a model's files.")
    is_id = is_hub_id(str(name_or_path))
    obstacle = hub_obstacle() if is_id else None
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # whatever a config class does with odd values
        is_known = is_id or Path(name_or_path).exists()
        reason = _reason(error) if is_known else "there is no such folder"
        reason = f"it is not in the cache, and {obstacle}" if obstacle else reason
        raise MissingInputError(
            f"the model {str(name_or_path)!r} cannot be read: {reason}; give a folder with a valid "
            "config.json, or a hub id that is in the cache or can be downloaded."
        ) from None
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in filter(None, parts):
        for key in ("_attn_implementation", "_experts_implementation"):
            kernel = getattr(part, key, None)
            if kernel is not None and "/" in str(kernel):
                raise MissingInputError(
                    f"{name_or_path}: {key} (or {key[1:]}) in config.json names the kernel {str(kernel)!r}, "
                    "which is code from the hub, and dsft runs no code that comes with a model; remove the "
                    "key from config.json."
                )
    config._attn_implementation = config._experts_implementation = None
    return config


def _reason(error: Exception) -> str:
    """Return what a config class says of a value; huggingface_hub's errors have the rest in their cause."""
    cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
    return brief(cause or error)


def from_config(config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """Build a model with fresh weights: a causal language model, or one that gives scores (`has_scores`)."""
    auto: Any = AutoModelForSequenceClassification if has_scores(config) else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, trust_remote_code=False, **settings)
    return model


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, in float32: names and shapes, without memory. A parameter that
    transformers itself freezes (the bias that balances the experts of ERNIE 4.5) becomes a buffer, as other
    architectures have it: it is read, exported and never trained. Raises SpecError for a config of which
    transformers cannot build a model."""
    try:
        with torch.device("meta"):
            causal_lm = from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever a module does with odd values
        reason = f"transformers cannot build a {config.model_type} model of this config: {brief(error)}"
        raise _error("model", f"{reason}; correct it") from None
    for module in causal_lm.modules():
        frozen = [name for name, p in module._parameters.items() if p is not None and not p.requires_grad]
        for name in frozen:
            module.register_buffer(name, module._parameters.pop(name).data)
    return causal_lm


def _known_keys(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    fields = {field.name for field in dataclasses.fields(config_class)}
    rope = ROPE_KEYS if "rope_parameters" in fields else ()
    found = frozenset(fields | set(config_class.attribute_map) | set(rope))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if model_class is None:
        return found
    source = inspect.getsource(sys.modules[model_class.__module__])
    return found | {READ_KEY} if f'getattr(config, "{READ_KEY}"' in source else found


def _meant(name: Any, known: Any) -> str:
    close = get_close_matches(str(name), list(known), n=1)
    return (
        f"; did you mean {close[0]}?"
        if close
        else "; look it up in the documentation of transformers, or leave it out"
    )


def _error(where: str, message: str) -> SpecError:
    return SpecError("The model's config cannot be made.", [Problem(where, message)])
