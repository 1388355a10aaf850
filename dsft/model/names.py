"""Convert peft's names of parameters and modules to those that they have without adapters."""

from __future__ import annotations

import re

ADAPTER = "default"
"""The name that peft gives the adapter."""

_ADAPTED = re.compile(r"\.base_layer(?=\.|$)")
_FACTOR = re.compile(rf"(\.lora_[AB])\.{ADAPTER}(?=\.|$)")
_STACKED = re.compile(r"_lora_([AB])$")
_MAGNITUDE = re.compile(rf"(\.lora_magnitude_vector)\.{ADAPTER}\.weight$")


def plain_name(name: str) -> str:
    """Return the name that a parameter or module has without adapters; an adapter's weight gets its name in
    an adapter's file, without the prefix there, or the weight's with .lora_A.weight where that is of experts
    (`dsft.model.stacked`)."""
    plain = _MAGNITUDE.sub(r"\1", _FACTOR.sub(r"\1", _ADAPTED.sub("", name)))
    return _STACKED.sub(r".lora_\1.weight", plain)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name, in files or in the module, is that of an adapter's weight."""
    return ".lora_" in name or _STACKED.search(name) is not None
