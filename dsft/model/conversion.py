"""Map tensors between a model's files and its modules, in both directions, by transformers' own table of the
architecture (`get_model_conversion_mapping`): some tensors only have another name (GPT-NeoX's files say
embed_out, its modules lm_head), others are converted (experts fused, a projection split).

All that dsft uses of transformers.core_model_loading is here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from dsft.model.weights import Shape


class UnsupportedConversionError(Exception):
    """A conversion that cannot be derived from shapes alone."""


@dataclass
class Conversion:
    """Tensors of one side that become other tensors on the other side. parts: (pattern of the transform,
    name) of each; renamings: of the results."""

    transform: WeightConverter
    first: str
    renamings: Sequence[WeightRenaming]
    parts: list[tuple[str, str]] = field(default_factory=list)

    def apply(self, tensors: Iterable[Tensor], model: Any) -> dict[str, Tensor]:
        """Return the converted tensors by name, from those of `parts`, in their order."""
        own = deepcopy(self.transform)  # it stores its inputs
        for (pattern, name), tensor in zip(self.parts, tensors, strict=True):
            own.collected_tensors[pattern].append(tensor)  # type: ignore[arg-type]  # as when it saves
            own.layer_targets[self.first].add(name)
        converted = own.convert(self.first, model=model, config=model.config)
        return {
            renamed(name, self.renamings): value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }

    def shapes(self, shape_of: Callable[[str], Shape], model: Any) -> dict[str, Shape]:
        """Return the shapes of the converted tensors by name, found on the meta device without any values.
        Raises UnsupportedConversionError where that is impossible."""
        parts = (torch.empty(shape_of(name), device="meta") for _, name in self.parts)
        try:
            return {name: tuple(value.shape) for name, value in self.apply(parts, model).items()}
        except Exception as error:  # whatever an operation of transformers does with tensors without values
            raise UnsupportedConversionError(f"{type(self.transform).__name__} of {self.first}") from error


@dataclass(frozen=True)
class TensorMap:
    """How the tensors of one side become those of the other.

    unchanged    name there -> name here, for tensors that have only another name
    conversions  of all other tensors
    unexpected   names of tensors for which the other side has no place
    """

    unchanged: dict[str, str]
    conversions: list[Conversion]
    unexpected: list[str]


def read_map(model: PreTrainedModel, keys: Iterable[str]) -> TensorMap:
    """Return how the tensors `keys` of a model's files become those of its modules, matched as in
    transformers' `convert_and_load_state_dict_in_model`."""
    renamings, converters = _by_kind(get_model_conversion_mapping(model))
    tensors, prefix = model.state_dict(), model.base_model_prefix

    def match(key: str) -> tuple[str, str | None]:
        found = rename_source_key(key, renamings, converters, prefix, tensors)
        if found[0] not in tensors and key in tensors:
            return rename_source_key(key, [], [], prefix, tensors)
        return found

    return _mapped(keys, match, converters, (), tensors)


def write_map(model: PreTrainedModel, names: Iterable[str]) -> TensorMap:
    """Return how the tensors `names` of a model's modules become those of its files, as in transformers'
    `revert_weight_conversion`: each entry of the conversion table is reversed, and the last is applied first.
    Entries that change a prefix are left out: the files of a text model do not have these prefixes."""
    table = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    reverse = [entry.reverse_transform() for entry in table if not isinstance(entry, PrefixChange)]
    renamings, converters = _by_kind(reverse)

    def match(name: str) -> tuple[str, str | None]:
        for converter in converters:
            first, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return first, pattern
        return renamed(name, renamings), None

    return _mapped(names, match, converters, renamings, None)


def has_conversions(model: PreTrainedModel) -> bool:
    """Whether a parameter is not one tensor of the files: some are split, joined or transposed on reading."""
    return bool(write_map(model, (name for name, _ in model.named_parameters())).conversions)


def _mapped(
    names: Iterable[str],
    match: Callable[[str], tuple[str, str | None]],
    converters: Sequence[WeightConverter],
    renamings: Sequence[WeightRenaming],
    expected: Container[str] | None,
) -> TensorMap:
    """Sort the names by what becomes of each. `match`: name -> its name on the other side, and the pattern of
    the converter that takes it; expected: the names that the other side has a place for, None for any."""
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    unchanged: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unexpected: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        there, pattern = match(name)
        if expected is not None and there not in expected:
            unexpected.append(there)
        elif pattern is None:
            unchanged.setdefault(there, name)
        else:
            conversion = conversions.setdefault(there, Conversion(by_pattern[pattern], there, renamings))
            conversion.parts.append((pattern, name))
    return TensorMap(unchanged, list(conversions.values()), unexpected)


def _by_kind(transforms: Iterable[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    every = list(transforms)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    return renamings, [one for one in every if isinstance(one, WeightConverter)]


def renamed(name: str, renamings: Iterable[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model's file that are no parameters, and that no training changes, by their
    names in the module: the layer scalars of Gemma 4."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
