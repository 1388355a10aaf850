"""Find the text model inside a multimodal one: its config, its class, and the names that its modules and
tensors have in the whole.

Nothing here is a list of models. The text config and the whole class are transformers' own, and the text
model is the module of the whole that has the class of the causal language model's base.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
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
from dsft.model.conversion import (
    ConvertedTensors,
    TensorMap,
    UnsupportedConversionError,
    name_patterns,
    write_map,
)
from dsft.model.experts import expert_layers
from dsft.model.weights import Shape

MIXTURES = ("qwen3_vl_moe_text",)
"""Model types of text models with experts that transformers has only the base of, and that are tested to be
trained right (tests/architectures)."""


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
        text model's and that transformers does not ignore."""
        ours = self._names(causal_lm)
        made = [one for one in tensors.conversions if one.first in ours]
        return TensorMap(
            {ours[there]: key for there, key in tensors.unchanged.items() if there in ours},
            [replace(one, rename=lambda name: ours.get(name, name)) for one in made],
            [name for name in tensors.unexpected if self.is_of_text(name) and not self.ignores(name)],
        )

    def converted_back(
        self,
        tensors: TensorMap,
        causal_lm: PreTrainedModel,
        shape_in_files: Callable[[str], Shape],
        read: Callable[[str, int, Tensor], None],
    ) -> ConvertedTensors:
        """Return the tensors of the files that are converted into the text model's, made from these again.
        tensors: the map of the whole's files; read: as in `ConvertedTensors`, by the names in `causal_lm`.
        Raises SpecError where they would not have the names and shapes that they have in the files."""
        ours = self._names(causal_lm)
        keys = [key for one in tensors.conversions if one.first in ours for _, key in one.parts]
        made = write_map(self.model, ours.keys() - tensors.unchanged.keys(), name_patterns(keys)).conversions
        back = [replace(one, parts=[(pattern, ours[name]) for pattern, name in one.parts]) for one in made]
        renamed = {one.first: one.rename(one.first) for one in back}
        text = causal_lm.state_dict()

        def in_files(name: str) -> Tensor:  # the shape for which some operations ask
            return torch.empty(shape_in_files(renamed[name]), device="meta")

        bare = SimpleNamespace(
            config=self.model.config, get_parameter=in_files, get_parameter_or_buffer=in_files
        )
        try:
            found = ConvertedTensors(back, lambda name: tuple(text[name].shape), read, bare)
        except UnsupportedConversionError:
            found = ConvertedTensors([], shape_in_files, read, bare)
        expected = {key: shape_in_files(key) for key in keys}
        if wrong := sorted(expected.items() ^ found.shapes.items()):
            message = (
                f"{wrong[0][0]} is missing in the files of this {self.model.config.model_type} model, or has "
                "a form that cannot be made from the tensors in memory, so it could not be exported; give "
                "the complete folder, or choose another model"
            )
            raise SpecError("The model's files cannot be written again.", [Problem("model", message)])
        return found

    def _names(self, causal_lm: PreTrainedModel) -> dict[str, str]:
        """Return the names in the whole of the tensors of `causal_lm` -> their names there."""
        return {self.name(name): name for name in causal_lm.state_dict()}

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
    if isinstance(causal_lm, _WithHead) and causal_lm.config.model_type not in MIXTURES:
        if expert_layers(causal_lm):
            raise _error(config, "has a mixture of experts in its text model that is not tested")
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
    config: Any
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
