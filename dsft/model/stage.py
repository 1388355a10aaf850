"""One pipeline stage of a model: takes a transformers model, leaves out in place what other stages own.

The layers of other stages become pass-throughs under the same index, so masks, rotary tables and sliding
windows stay transformers' own code and parameters keep the names of the Hugging Face file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dsft.errors import Problem, SpecError
from dsft.plan.layout import layer_range

CUTTABLE = ("llama",)
"""Architectures for which two stages were shown to equal the whole model (tests/unit/model, tests/parity)."""


class PassThrough(nn.Module):
    """Stands for a layer of another stage: gives hidden states back as they came."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for kind in ("attention_type", "layer_type"):  # by which some models choose a layer's mask
            if hasattr(layer, kind):
                setattr(self, kind, getattr(layer, kind))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def check_cut(config: PreTrainedConfig, stages: int) -> None:
    """Raises SpecError where this architecture cannot be cut into so many stages."""
    if stages == 1:
        return
    layers = config.num_hidden_layers
    if config.model_type not in CUTTABLE:
        known = ", ".join(CUTTABLE)
        raise _error(f"a {config.model_type} model cannot be cut into stages yet, only {known} can; set 1")
    if config.tie_word_embeddings:
        raise _error("a model with tied embeddings cannot be cut into stages yet; set 1")
    if stages > layers:
        raise _error(f"{stages} stages are more than the model's {layers} layers; set {layers} or fewer")


def cut(model: PreTrainedModel, stage: int, stages: int) -> None:
    """Leave `model` with stage `stage` of `stages`: embeddings in the first, final norm and head in the
    last."""
    base: Any = model.base_model
    owned = layer_range(len(base.layers), stage, stages)
    for index, layer in enumerate(base.layers):
        if index not in owned:
            base.layers[index] = PassThrough(layer)
    if stage > 0:
        base.embed_tokens = nn.Identity()
    if stage < stages - 1:
        base.norm = nn.Identity()
        model.lm_head = nn.Identity()


def _error(message: str) -> SpecError:
    return SpecError("The model cannot be cut.", [Problem("parallel.pipeline_stages", message)])
