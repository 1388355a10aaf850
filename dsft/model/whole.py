"""Find the text model inside a multimodal one: its config, its class, and the names that its modules and
tensors have in the whole.

Nothing here is a list of models. The text config and the whole class are transformers' own, and the text
model is the module of the whole that has the class of the causal language model's base.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from dsft.errors import Problem, SpecError
from dsft.model.conversion import TensorMap
from dsft.model.experts import expert_layers


@dataclass(frozen=True)
class Whole:
    """A multimodal model, and where its text model is.

    model   the whole, on the meta device
    parts   name of a module of the causal language model -> its name in the whole
    """

    model: PreTrainedModel
    parts: Mapping[str, str]

    def name(self, name: str) -> str:
        """Return the name in the whole of a module or tensor of the causal language model."""
        for part, there in self.parts.items():
            if not part:
                return f"{there}.{name}"
            if name == part or name.startswith(f"{part}."):
                return there + name[len(part) :]
        raise _error(self.model.config, f"has no place for {name} of its text model")

    def text_map(self, tensors: TensorMap, causal_lm: PreTrainedModel) -> TensorMap:
        """Return the part of a map of the whole's files that is the text model's, by the names in
        `causal_lm`; all other tensors of the files are left alone. Unexpected are those that would be the
        text model's and that transformers does not ignore. Raises SpecError where one of the text model's is
        made from others."""
        ours = {self.name(name): name for name in causal_lm.state_dict()}
        if made := [one.first for one in tensors.conversions if one.first in ours]:
            raise _error(self.model.config, f"has other tensors in its files than in memory ({made[0]})")
        return TensorMap(
            {ours[there]: key for there, key in tensors.unchanged.items() if there in ours},
            [],
            [name for name in tensors.unexpected if self.is_of_text(name) and not self.ignores(name)],
        )

    def is_of_text(self, name: str) -> bool:
        """Whether a tensor of the whole with this name would be the text model's."""
        return any(name.startswith(f"{there}.") for there in self.parts.values())

    def ignores(self, name: str) -> bool:
        """Whether transformers ignores a tensor of this name when it reads the whole, such as those of
        multi-token prediction."""
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)


def text_config(whole: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return a copy of the config of the text model in a multimodal one, which `AutoModelForCausalLM` then
    builds; None where there is none, or no causal language model for it."""
    if type(whole) not in MODEL_FOR_MULTIMODAL_LM_MAPPING or not whole.sub_configs:
        return None
    try:
        found = whole.get_text_config()
    except ValueError:  # several
        return None
    if found is whole or whole.is_encoder_decoder or not _has_causal_class(type(found)):
        return None
    text = copy.deepcopy(found)
    whole_class: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(whole)]
    if whole_class._tied_weights_keys:  # then its own key decides, not that of the text config
        text.tie_word_embeddings = bool(getattr(whole, "tie_word_embeddings", False))
    if (quantized := getattr(whole, "quantization_config", None)) is not None:
        text.quantization_config = quantized
    return text


def text_key(whole: PreTrainedConfig) -> str:
    """Return the key of a multimodal model's config that has the text model's."""
    text = whole.get_text_config()
    return next(name for name in whole.sub_configs if getattr(whole, name, None) is text)


def whole_of(config: PreTrainedConfig, causal_lm: PreTrainedModel) -> Whole:
    """Build the whole on the meta device, and find `causal_lm` in it. Raises SpecError where it is not there,
    or has not exactly one place."""
    if expert_layers(causal_lm):
        raise _error(config, "has a mixture of experts in its text model, which is not supported there yet")
    whole_class: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    try:
        with torch.device("meta"):
            model: PreTrainedModel = whole_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception as error:  # whatever a tower does with odd values, or without its packages
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _error(config, f"cannot be built by transformers ({reason})") from None
    places = _named(model, type(causal_lm))
    if places == [""]:
        raise _error(config, "is its own text model")
    if len(places) == 1:
        return Whole(model, {"": places[0]})
    bases, head = _named(model, type(causal_lm.base_model)), model.get_output_embeddings()
    own_head = causal_lm.get_output_embeddings()
    if len(bases) != 1 or head is None or own_head is None or type(head) is not type(own_head):
        name = type(causal_lm.base_model).__name__
        raise _error(config, f"has not one {name} and one output layer, as its text model has")
    if _is_tied(model) != _is_tied(causal_lm):
        raise _error(config, "ties its embeddings, or not, unlike its text model")
    heads = {id(module): name for name, module in (*model.named_modules(), *causal_lm.named_modules())}
    return Whole(model, {causal_lm.base_model_prefix: bases[0], heads[id(own_head)]: heads[id(head)]})


def _named(model: PreTrainedModel, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is kind]


def _is_tied(model: PreTrainedModel) -> bool:
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    return head.weight is embedding.weight


def _has_causal_class(config_class: type[PreTrainedConfig]) -> bool:
    """Whether AutoModelForCausalLM builds a model of this config. transformers has no such class for some
    text models of multimodal ones (Qwen-VL), only their base: then the base with an output layer is it."""
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    if config_class not in MODEL_MAPPING:
        return False
    base: Any = MODEL_MAPPING[config_class]
    name = base.__name__.removesuffix("Model") + "ForCausalLM"
    parts = {"__module__": base.__module__, "config_class": config_class, "base_class": base}
    made = type(name, (_WithHead, base.__bases__[0], GenerationMixin), parts)
    AutoModelForCausalLM.register(config_class, made, exist_ok=True)
    return True


class _WithHead(nn.Module):
    """What makes a base of transformers a causal language model: an output layer without a bias, as the whole
    class has it. Whether that is all is proved before training."""

    base_class: Any
    post_init: Any
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> CausalLMOutputWithPast:
        output = self.model(input_ids=input_ids, position_ids=position_ids, **more)
        logits = self.lm_head(output.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


def _error(config: PreTrainedConfig, reason: str) -> SpecError:
    message = f"a {config.model_type} model {reason}, so it cannot be trained; choose another model"
    return SpecError("The text model cannot be found in the whole.", [Problem("model", message)])
