"""Map tensors between a model's files and its modules, in both directions, by transformers' own table of the
architecture (`get_model_conversion_mapping`): some tensors only have another name (GPT-NeoX's files say
embed_out, its modules lm_head), others are converted (experts fused, a projection split).

All that dsft uses of transformers.core_model_loading is here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

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


class PartRange(NamedTuple):
    """Consecutive elements of a tensor: `length` of the flattened tensor `name`, beginning with `start`."""

    name: str
    start: int
    length: int


@dataclass
class Conversion:
    """Tensors of one side that become other tensors on the other side. parts: (pattern of the transform,
    name) of each; rename: from a result's name in the transform to that on the other side."""

    transform: WeightConverter
    first: str
    rename: Callable[[str], str]
    parts: list[tuple[str, str]] = field(default_factory=list)

    def apply(self, tensors: Iterable[Tensor], model: Any) -> dict[str, Tensor]:
        """Return the converted tensors by name, from those of `parts`, in their order."""
        own = deepcopy(self.transform)  # it stores its inputs
        for (pattern, name), tensor in zip(self.parts, tensors, strict=True):
            own.collected_tensors[pattern].append(tensor)  # as when it saves
            own.layer_targets[self.first].add(name)
        converted = own.convert(self.first, model=model, config=model.config)
        return {
            self.rename(name): value[0] if isinstance(value, list) else value
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

    def runs(
        self, shape_of: Callable[[str], Shape], shapes: Mapping[str, Shape], model: Any
    ) -> dict[str, list[PartRange]] | None:
        """Return where the elements of each converted tensor come from, in their order; None for a conversion
        that does not just move whole rows (those along the last dimension), such as one that transposes.

        The conversion is applied to the numbers of the rows: a converted tensor then has the shape of
        `shapes` but for rows of one element, and each number is in one place. shapes: of the results.
        """
        given = {name: shape_of(name) for _, name in self.parts}
        (width, *other_widths) = {_row(shape) for shape in (*given.values(), *shapes.values())}
        if other_widths:
            return None
        ends = torch.tensor([_rows(shape) for shape in given.values()]).cumsum(0)
        numbers = torch.arange(int(ends[-1])).tensor_split(ends[:-1])
        narrow = (n.view(_narrowed(shape)) for n, shape in zip(numbers, given.values(), strict=True))
        try:
            moved = self.apply(narrow, model)
        except Exception:  # whatever an operation of transformers does with tensors of other shapes
            return None
        every = torch.cat([value.flatten() for value in moved.values()])
        if any(tuple(value.shape) != _narrowed(shapes[name]) for name, value in moved.items()):
            return None
        if not torch.equal(every.sort().values, torch.arange(len(every))):
            return None
        names = [name for _, name in self.parts]
        return {name: _runs(value.flatten(), names, ends, width) for name, value in moved.items()}


def _row(shape: Shape) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _rows(shape: Shape) -> int:
    return math.prod(shape) // _row(shape)


def _narrowed(shape: Shape) -> Shape:
    return (*shape[:-1], 1) if len(shape) > 1 else shape


def _runs(rows: Tensor, names: Sequence[str], ends: Tensor, width: int) -> list[PartRange]:
    """Return the runs of numbered rows of tensors; ends: the number of the row after each tensor's last."""
    parts = torch.bucketize(rows, ends, right=True)
    is_first = torch.ones(len(rows), dtype=torch.bool)
    is_first[1:] = (rows[1:] != rows[:-1] + 1) | (parts[1:] != parts[:-1])
    firsts = is_first.nonzero().flatten()
    begins = (rows - torch.cat([ends.new_zeros(1), ends])[parts])[firsts].tolist()
    counts = [end - start for start, end in pairwise([*firsts.tolist(), len(rows)])]
    return [
        PartRange(names[part], begin * width, count * width)
        for part, begin, count in zip(parts[firsts].tolist(), begins, counts, strict=True)
    ]


class ConvertedTensors:
    """The results of conversions, of which ranges are read: where a conversion just moves rows, only the
    elements that are asked for; else all tensors of one conversion at a time."""

    def __init__(
        self,
        conversions: Iterable[Conversion],
        shape_of: Callable[[str], Shape],
        read: Callable[[str, int, Tensor], None],
        model: Any,
    ) -> None:
        """`read` fills a flat tensor from the tensor of a name on the other side, beginning with an element.
        model: its config and its tensors, on the meta device. Raises UnsupportedConversionError for a
        conversion whose shapes cannot be found without the values."""
        self._shape_of, self._read, self._model = shape_of, read, model
        self.conversions: dict[str, Conversion] = {}
        self.shapes: dict[str, Shape] = {}
        for conversion in conversions:
            shapes = conversion.shapes(shape_of, model)
            self.shapes |= shapes
            self.conversions |= dict.fromkeys(shapes, conversion)
        self._last: tuple[Conversion, dict[str, list[PartRange]] | None, dict[str, Tensor]] | None = None

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, (n,) of any type on the CPU, from the flattened tensor, beginning with element
        `start`."""
        conversion = self.conversions[name]
        if self._last is None or self._last[0] is not conversion:
            runs = conversion.runs(self._shape_of, self.shapes_of(conversion), self._model)
            self._last = (conversion, runs, {} if runs else self._whole(conversion, out.dtype))
        _, runs, whole = self._last
        if not runs:
            out.copy_(whole[name].reshape(-1)[start : start + len(out)])
            return
        begin = -start  # of the run, in `out`
        for run in runs[name]:
            low, high = max(begin, 0), min(begin + run.length, len(out))
            if low < high:
                self._read(run.name, run.start + low - begin, out[low:high])
            begin += run.length

    def shapes_of(self, conversion: Conversion) -> dict[str, Shape]:
        return {name: self.shapes[name] for name, one in self.conversions.items() if one is conversion}

    def _whole(self, conversion: Conversion, dtype: torch.dtype) -> dict[str, Tensor]:
        parts = [torch.empty(self._shape_of(name), dtype=dtype) for _, name in conversion.parts]
        for (_, name), part in zip(conversion.parts, parts, strict=True):
            self._read(name, 0, part.view(-1))
        return conversion.apply(parts, self._model)


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
    table, tensors = get_model_conversion_mapping(model), model.state_dict()
    return _mapped(
        keys,
        lambda key: _renamed_on_reading(model, key, table, tensors),
        _by_kind(table)[1],
        str,
        tensors,
    )


def _renamed_on_reading(
    model: PreTrainedModel, key: str, table: Sequence[WeightTransform], tensors: dict[str, Tensor]
) -> tuple[str, str | None]:
    """Return the name in the module of a file's tensor, and the pattern of the converter that takes it."""
    renamings, converters = _by_kind(table)
    prefix = model.base_model_prefix
    found = rename_source_key(key, renamings, converters, prefix, tensors)
    if found[0] not in tensors and key in tensors:
        return rename_source_key(key, [], [], prefix, tensors)
    return found


def write_map(
    model: PreTrainedModel, names: Iterable[str], read_from: Iterable[str] | None = None
) -> TensorMap:
    """Return how the tensors `names` of a model's modules become those of its files, as in transformers'
    `revert_weight_conversion`: each entry of the conversion table is reversed, and the last is applied first.

    read_from: the patterns (`name_patterns`) of the files that the model comes from. Only the entries that
    changed one of these names are reversed, so that the names are those of these files. None for a fresh
    model: all entries but those that change a prefix, which the files of a text model do not have.
    """
    table = get_model_conversion_mapping(model, add_legacy=False)
    if read_from is None:
        table = [entry for entry in table if not isinstance(entry, PrefixChange)]
    else:
        tensors = model.state_dict()
        for pattern in read_from:
            _renamed_on_reading(model, pattern.replace("*", "0"), table, tensors)
        table = [entry for entry in table if entry.was_used()]
    renamings, converters = _by_kind(entry.reverse_transform() for entry in table[::-1])

    def rename(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def match(name: str) -> tuple[str, str | None]:
        for converter in converters:
            first, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return first, pattern
        return rename(name), None

    return _mapped(names, match, converters, rename, None)


def name_patterns(names: Iterable[str]) -> list[str]:
    """Return the distinct names with * for the number of a layer or an expert."""
    return sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})


def renames(model: PreTrainedModel) -> bool:
    """Whether names in files of this architecture can be other than those of its modules."""
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _mapped(
    names: Iterable[str],
    match: Callable[[str], tuple[str, str | None]],
    converters: Sequence[WeightConverter],
    rename: Callable[[str], str],
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
            conversion = conversions.setdefault(there, Conversion(by_pattern[pattern], there, rename))
            conversion.parts.append((pattern, name))
    return TensorMap(unchanged, list(conversions.values()), unexpected)


def _by_kind(transforms: Iterable[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    every = list(transforms)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    return renamings, [one for one in every if isinstance(one, WeightConverter)]


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model's file that are no parameters, and that no training changes, by their
    names in the module: the layer scalars of Gemma 4."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
