"""Convert parameter names: from a transformers model to its files, and from peft's names to plain ones.

They differ where transformers renames on reading (GPT-NeoX's files say embed_out, its modules lm_head). The
names are converted back by transformers' own mapping, as in its save_pretrained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

ADAPTER = "default"
"""The name that peft gives the adapter."""

_ADAPTED = re.compile(r"\.base_layer(?=\.|$)")
_FACTOR = re.compile(rf"(\.lora_[AB])\.{ADAPTER}(?=\.|$)")
_MAGNITUDE = re.compile(rf"(\.lora_magnitude_vector)\.{ADAPTER}\.weight$")


def has_file_names(model: PreTrainedModel) -> bool:
    """Whether each parameter is one tensor of the file: none is split, joined or transposed on reading."""
    converters, _ = _reversed(model)
    names = [name for name, _ in model.named_parameters()]
    return all(one.rename_source_key(name)[1] is None for one in converters for name in names)


def file_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return name in the module -> name in the file, for a model for which `has_file_names` is true."""
    _, renamings = _reversed(model)
    found = dict[str, str]()
    for name in names:
        found[name] = name
        for renaming in renamings:
            found[name], _ = renaming.rename_source_key(found[name])
    return found


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model's file that are no parameters, and that no training changes, by their
    names in the module: the layer scalars of Gemma 4."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _reversed(model: PreTrainedModel) -> tuple[list[WeightConverter], list[WeightRenaming]]:
    """Return the reversed conversions, as in `revert_weight_conversion` of transformers.core_model_loading:
    last first, without adding prefixes, which a folder of text weights does not have."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    turned = [c.reverse_transform() for c in conversions if not isinstance(c, PrefixChange)]
    converters = [c for c in turned if isinstance(c, WeightConverter)]
    return converters, [c for c in turned if isinstance(c, WeightRenaming)]


def plain_name(name: str) -> str:
    """Return the name that a parameter or module has without adapters; an adapter's weight gets its name in
    an adapter's file, without the prefix there."""
    return _MAGNITUDE.sub(r"\1", _FACTOR.sub(r"\1", _ADAPTED.sub("", name)))


def is_adapter(name: str) -> bool:
    """Whether a parameter's name, in files or in the module, is that of an adapter's weight."""
    return ".lora_" in name
