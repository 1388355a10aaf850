"""Dropout switched off: takes a model, changes what its modules do in training."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def switch_off_dropout(causal_lm: PreTrainedModel) -> tuple[str, ...]:
    """Set every probability of dropout to 0: of dropout modules, of modules that keep one as a number
    (attention_dropout, layerdrop), and in the config, which some read in each forward pass.

    Gives "NAME VALUE" of each that was on, by the config's names where it has any.
    """
    found: dict[str, float] = {}
    for path, module in causal_lm.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found |= _off(module, ("p",), path.rpartition(".")[2])
        else:
            found |= _off(module, _named(module))
    config: Any = causal_lm.config
    by_config = _off(config, _named(config))
    text = config.get_text_config()
    by_config |= _off(text, _named(text))
    return tuple(f"{name} {value:g}" for name, value in sorted((by_config or found).items()))


def _named(owner: object) -> tuple[str, ...]:
    return tuple(name for name in vars(owner) if "drop" in name)


def _off(owner: object, names: tuple[str, ...], shown: str | None = None) -> dict[str, float]:
    """Those that were on, by name."""
    on = {name: value for name in names if isinstance(value := getattr(owner, name), float) and value > 0}
    for name in on:
        setattr(owner, name, 0.0)
    return {shown or name: value for name, value in on.items()}
