"""The tensors of an export: those of a checkpoint and those that a model's files have beside the parameters,
under the names and in the shapes of the files that the model was read from.

Writes and reads the two files of a checkpoint's model folder that this takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from dsft.checkpoint.files import write_json
from dsft.engine.api import StateKind
from dsft.errors import StorageError
from dsft.model.conversion import ConvertedTensors, dot_natural_key, name_patterns, write_map
from dsft.system.json_file import read_json

BESIDE = "beside.safetensors"
"""File in a checkpoint's model folder with the tensors that a model's file has beside the parameters. Most
models have none."""

NAMES = "tensor_names.json"
"""File in a checkpoint's model folder with the names in the files that the model was read from, as patterns.
Missing for fresh models, and where files and modules have the same names."""


class TensorSource(Protocol):
    """Tensors by name, of which ranges are read: those of a checkpoint, or computed from them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor: ...


class TensorsWithExtras:
    """`values`, with the tensors that a model's file has beside the parameters. dtypes: of the latter that
    would lose digits in the type `dtype`, which are exported as they are."""

    def __init__(self, values: TensorSource, model_folder: Path, dtype: torch.dtype) -> None:
        path = model_folder / BESIDE
        self._values = values
        self._beside = load_file(path) if path.exists() else {}
        self.dtypes = {n: t.dtype for n, t in self._beside.items() if not torch.equal(t.to(dtype).to(t), t)}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **values.shapes,
            **{name: tuple(tensor.shape) for name, tensor in self._beside.items()},
        }

    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor:
        if name in self._beside:
            return self._beside[name].flatten()[start:stop]
        return self._values.read(name, kind, start, stop)


class FileTensors:
    """`values` under the names and in the shapes of a model's files. dtypes: of those that are not exported
    in the type of the weights."""

    def __init__(
        self, values: TensorsWithExtras, model: PreTrainedModel, read_from: Iterable[str] | None
    ) -> None:
        """`model` is on the meta device; read_from: as in `write_map`."""
        tensor_map = write_map(model, values.shapes, read_from)
        self._values, self._names = values, tensor_map.unchanged
        shape_of = values.shapes.__getitem__
        self._converted = ConvertedTensors(tensor_map.conversions, shape_of, self._read, model)
        first = dict(self._names)
        first |= {key: conversion.parts[0][1] for key, conversion in self._converted.conversions.items()}
        shapes = {key: shape_of(name) for key, name in self._names.items()} | self._converted.shapes
        # In the order of the values, so that those of one conversion follow each other.
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key: shapes[key] for key in sorted(first, key=lambda key: dot_natural_key(first[key]))
        }
        self.dtypes = {key: values.dtypes[name] for key, name in first.items() if name in values.dtypes}

    def read(self, key: str, kind: StateKind, start: int, stop: int) -> Tensor:
        if key in self._names:
            return self._values.read(self._names[key], kind, start, stop)
        out = torch.empty(stop - start)
        self._converted.read(key, start, out)
        return out

    def _read(self, name: str, start: int, out: Tensor) -> None:
        out.copy_(self._values.read(name, "value", start, start + len(out)))


def write_beside(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors that a model's file has beside the parameters (`persistent_buffers`) into the model
    folder."""
    if not tensors:
        return
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / BESIDE)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{folder / BESIDE} cannot be written ({error}).") from None


def write_names(folder: Path, names: Iterable[str]) -> None:
    """Write the names of the tensors in the files that the model is read from into the model folder."""
    try:
        write_json(folder / NAMES, name_patterns(names))
    except OSError as error:
        raise StorageError(f"{folder / NAMES} cannot be written ({error.strerror or error}).") from None


def read_names(folder: Path) -> list[str] | None:
    """Return the patterns that `write_names` wrote; None where it wrote none."""
    found: list[str] | None = read_json(folder / NAMES) if (folder / NAMES).exists() else None
    return found
