"""Reduce a transformers model to one pipeline stage, in place: remove what other stages own.

A stage stays the model's own class, so masks, rotary tables, sliding windows and kinds of layers are
transformers' own code, and parameters keep the names of the Hugging Face file. Layers of other stages become
pass-throughs under the same index. What a stage receives enters at the place of the first layer, after all
that the class does to embeddings (a scale, a normalizer, learned positions), and what it sends leaves at the
place of the last layer, before all that the class does to the final result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsft.plan.cut import Cut


@dataclass(frozen=True)
class SplitPoints:
    """Where a model can be cut, by the names of its modules.

    layers    the list of its layers
    before    what has parameters and is called before the first layer: embeddings
    after     what has parameters and is called after the last one: final norm, head
    in_tuple  whether a layer returns its hidden states as the first of a tuple
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    in_tuple: bool


class PassThrough(nn.Module):
    """Replaces a layer of another stage: returns hidden states unchanged."""

    def __init__(self, layer: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # a model chooses a layer's mask by some of these
            if isinstance(value, (str, int)) and not hasattr(self, name):
                setattr(self, name, value)
        self.in_tuple = in_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.in_tuple else hidden_states


class StageInput(PassThrough):
    """Replaces the first layer: returns what the previous stage has sent."""

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        assert self.received is not None, "it is given before each pass"
        hidden, self.received = self.received, None
        return super().forward(hidden)


class StageOutput(PassThrough):
    """Replaces the last layer: keeps what goes to the next stage."""

    leaving: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        self.leaving = hidden_states
        return super().forward(hidden_states)

    def pop(self) -> Tensor:
        hidden, self.leaving = self.leaving, None
        assert hidden is not None, "a pass went through"
        return hidden


class Placeholder(nn.Module):
    """Replaces an embedding or a norm of another stage, whose result is unused: returns hidden states (B, T,
    H) unchanged, and for positions or a mask (B, T) a zero, to be added."""

    def forward(self, inputs: Tensor, *_: Any, **__: Any) -> Tensor:
        return inputs if inputs.dim() == 3 else torch.zeros((), device=inputs.device)


def cut_to_stage(model: PreTrainedModel, split_points: SplitPoints, stage: int, cut: Cut) -> None:
    """Reduce `model` to the layers of one stage, with what comes before them on the first and what comes
    after them on the last. An embedding that is tied to the head is on both."""
    layers: Any = model.get_submodule(split_points.layers)
    is_first, is_last = stage == 0, stage == cut.stages - 1
    owned = cut.layers(stage)
    for index, layer in enumerate(layers):
        if index not in owned:
            layers[index] = PassThrough(layer, split_points.in_tuple)
    if not is_first:
        layers[0] = StageInput(layers[0], split_points.in_tuple)
    if not is_last:
        layers[-1] = StageOutput(layers[-1], split_points.in_tuple)
    after = split_points.after if is_last else ()
    shared = {id(p) for name in after for p in model.get_submodule(name).parameters()}
    for name in () if is_first else split_points.before:
        if not shared.intersection(map(id, model.get_submodule(name).parameters())):
            model.set_submodule(name, Placeholder())
    for name in () if is_last else split_points.after:
        model.set_submodule(name, Placeholder())
