"""Parameter names without peft's own parts. Pure.

peft puts a module that it adapts under `base_layer`, and its name of the adapter into those of the adapter's
weights. Here alone both are taken out again.
"""

from __future__ import annotations

import re

ADAPTER = "default"
"""peft's name of the adapter."""

_ADAPTED = re.compile(r"\.base_layer(?=\.|$)")
_FACTOR = re.compile(rf"(\.lora_[AB])\.{ADAPTER}(?=\.|$)")
_MAGNITUDE = re.compile(rf"(\.lora_magnitude_vector)\.{ADAPTER}\.weight$")


def plain_name(name: str) -> str:
    """The name that a parameter or module has without adapters; an adapter's weight gets its name in an
    adapter's file, without the prefix there."""
    return _MAGNITUDE.sub(r"\1", _FACTOR.sub(r"\1", _ADAPTED.sub("", name)))


def is_adapter(name: str) -> bool:
    """Whether a parameter's name, in files or in the module, is that of an adapter's weight."""
    return ".lora_" in name
