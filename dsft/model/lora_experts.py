"""What adapters mean in a mixture of experts: the routed experts of a layer are a few tensors and no linear
layers, so they get none; attention, shared experts and dense layers do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dsft.model.experts import expert_layers

OF_EXPERTS = ("experts", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of experts' weights, in modules and in files."""

NO_ADAPTERS = (
    "the routed experts, which get no adapters: the weights of all experts of a layer are one tensor; leave "
    "it out, so that attention, dense layers and shared experts get adapters, or train experts in full with "
    "model.trainable"
)


def routers(causal_lm: nn.Module) -> frozenset[str]:
    """Return the names of the modules that choose experts, and of those below them."""
    roots = tuple(layer.router for layer in expert_layers(causal_lm))
    names = (name for name, _ in causal_lm.named_modules())
    return frozenset(
        name for name in names if name in roots or name.startswith(tuple(f"{r}." for r in roots))
    )


def of_experts(causal_lm: nn.Module, wanted: str, module: str | None = None) -> bool:
    """Whether a name that someone wrote for a layer means routed experts. module: the module that it names,
    None if there is none."""
    layers = expert_layers(causal_lm)
    if module is not None:
        return any(module == layer.experts or module.startswith(f"{layer.experts}.") for layer in layers)
    return bool(layers) and wanted.rpartition(".")[2] in OF_EXPERTS


def left_out(causal_lm: nn.Module) -> Iterator[str]:
    """Yield the line for the start of a run whose adapters leave out experts."""
    if expert_layers(causal_lm):
        yield (
            "adapters: the routed experts get none and stay as they are; attention, dense layers and shared "
            "experts have them as model.lora.target_modules says"
        )


@contextmanager
def own_names() -> Iterator[None]:
    """Let peft read names of modules as they are inside the block. Otherwise it takes gate_proj, up_proj and
    down_proj of some mixtures for those of their experts in files of transformers 4, though the model has
    layers of these names (peft 0.21, utils/transformers_weight_conversion.py)."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # an older peft
        yield
        return
    changing = "convert_peft_config_for_transformers"
    original = getattr(conversion, changing)
    setattr(conversion, changing, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(conversion, changing, original)


def misread(causal_lm: PreTrainedModel, config: Any) -> bool:
    """Whether peft's own loader would take some of the adapters for others (`own_names`). config: peft's."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return False
    read = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(read, model=causal_lm, conversions=None)
    except ValueError:  # some of gate_proj, up_proj and down_proj, not all
        return True
    return bool(set(read.target_modules) != set(config.target_modules))
