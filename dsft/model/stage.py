"""One pipeline stage of a model: takes a transformers model and its joints, leaves out in place what other
stages own.

A stage stays the model's own class, so masks, rotary tables, sliding windows and kinds of layers are
transformers' own code, and parameters keep the names of the Hugging Face file. Layers of other stages become
pass-throughs under the same index. What a stage receives comes in at the place of the first layer, behind all
that the class does to embeddings (a scale, a normalizer, learned positions), and what it sends on goes out at
the place of the last layer, before all that the class does to the end result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsft.plan.cut import Cut


@dataclass(frozen=True)
class Joints:
    """Where a model comes apart, by the names of its modules.

    layers    the list of its layers
    before    what has parameters and is called before the first layer: embeddings
    after     what has parameters and is called after the last one: final norm, head
    in_tuple  whether a layer gives its hidden states as the first of a tuple
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    in_tuple: bool


class PassThrough(nn.Module):
    """Stands for a layer of another stage: gives hidden states back as they came."""

    def __init__(self, layer: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # by some of which a model chooses a layer's mask
            if isinstance(value, (str, int)) and not hasattr(self, name):
                setattr(self, name, value)
        self.in_tuple = in_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.in_tuple else hidden_states


class Entry(PassThrough):
    """In the place of the first layer: gives what the stage before has sent."""

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        assert self.received is not None, "it is given before each pass"
        hidden, self.received = self.received, None
        return super().forward(hidden)


class Exit(PassThrough):
    """In the place of the last layer: keeps what goes to the next stage."""

    leaving: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        self.leaving = hidden_states
        return super().forward(hidden_states)

    def taken(self) -> Tensor:
        hidden, self.leaving = self.leaving, None
        assert hidden is not None, "a pass went through"
        return hidden


class Absent(nn.Module):
    """Stands for an embedding or a norm of another stage, whose result nobody uses: gives hidden states
    (B, T, H) back, and of positions or a mask (B, T) a zero, to be added."""

    def forward(self, inputs: Tensor, *_: Any, **__: Any) -> Tensor:
        return inputs if inputs.dim() == 3 else torch.zeros((), device=inputs.device)


def cut_to_stage(model: PreTrainedModel, joints: Joints, stage: int, cut: Cut) -> None:
    """Leave `model` with the layers of one stage, with what comes before them on the first and what comes
    after them on the last. An embedding that is the head too is on both."""
    layers: Any = model.get_submodule(joints.layers)
    is_first, is_last = stage == 0, stage == cut.stages - 1
    owned = cut.layers(stage)
    for index, layer in enumerate(layers):
        if index not in owned:
            layers[index] = PassThrough(layer, joints.in_tuple)
    if not is_first:
        layers[0] = Entry(layers[0], joints.in_tuple)
    if not is_last:
        layers[-1] = Exit(layers[-1], joints.in_tuple)
    kept = {id(p) for p in _parameters(model, joints.after)} if is_last else set()
    for name in () if is_first else joints.before:
        if not kept.intersection(map(id, model.get_submodule(name).parameters())):
            model.set_submodule(name, Absent())
    for name in () if is_last else joints.after:
        model.set_submodule(name, Absent())


def _parameters(model: nn.Module, names: tuple[str, ...]) -> Iterator[nn.Parameter]:
    for name in names:
        yield from model.get_submodule(name).parameters()
