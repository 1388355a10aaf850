"""One pipeline stage of a model: takes a transformers model, leaves out in place what other stages own.

The layers of other stages become pass-throughs under the same index, so masks, rotary tables and sliding
windows stay transformers' own code and parameters keep the names of the Hugging Face file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dsft.errors import Problem, SpecError
from dsft.plan.cut import Cut

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


def why_not_cut(config: PreTrainedConfig) -> str | None:
    """Why this model cannot be cut into stages; None where it can."""
    if config.model_type not in CUTTABLE:
        known = ", ".join(CUTTABLE)
        return f"a {config.model_type} model cannot be cut into stages yet, only {known} can"
    if config.tie_word_embeddings:
        return "a model with tied embeddings cannot be cut into stages yet"
    return None


def check_cut(config: PreTrainedConfig, cut: Cut) -> None:
    """Raises SpecError where this model cannot be cut so."""
    if cut.stages == 1:
        return
    reason = why_not_cut(config)
    if reason is not None:
        raise _error(f"{reason}; set it to 1")
    if cut.num_layers != config.num_hidden_layers:
        raise _error(f"a cut of {cut.num_layers} layers is not one of {config.num_hidden_layers}")


def cut_to_stage(model: PreTrainedModel, stage: int, cut: Cut) -> None:
    """Leave `model` with one stage: embeddings in the first, final norm and head in the last."""
    base: Any = model.base_model
    owned = cut.layers(stage)
    for index, layer in enumerate(base.layers):
        if index not in owned:
            base.layers[index] = PassThrough(layer)
    if stage > 0:
        base.embed_tokens = nn.Identity()
    if stage < cut.stages - 1:
        base.norm = nn.Identity()
        model.lm_head = nn.Identity()


def _error(message: str) -> SpecError:
    return SpecError("The model cannot be cut.", [Problem("parallel.pipeline_stages", message)])
