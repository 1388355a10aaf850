"""Keep what a multimodal model has around its text model: its config and processor files go into every
checkpoint's model folder; its other tensors are copied into an export from the files that training began
from, byte for byte and a piece at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from dsft.checkpoint.compare import check_same_base
from dsft.checkpoint.merge import model_of
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.tensors import TensorSource
from dsft.engine.api import StateKind
from dsft.errors import CheckpointError, MissingInputError
from dsft.model.build import around
from dsft.model.config import config_around
from dsft.model.conversion import TensorMap, read_map
from dsft.model.files import TENSOR_TYPES, SafetensorsFile, digests, folder_with, weight_files
from dsft.model.whole import text_key
from dsft.system.json_file import read_json

CONFIG = "config.json"
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of what makes a model's inputs of images, video and sound."""


def files_around(name_or_path: str | None, text: PreTrainedConfig) -> dict[str, bytes]:
    """Return config.json and the processor files of the multimodal model whose text model has the config
    `text`, by name; none where the model is a text model. In config.json only the size of the vocabulary
    changes."""
    whole = None if name_or_path is None else config_around(name_or_path)
    if name_or_path is None or whole is None:
        return {}
    folder = folder_with(name_or_path, [CONFIG, *PROCESSORS])
    config = read_json(folder / CONFIG)
    if whole.get_text_config().vocab_size != text.vocab_size:
        _text_keys(config, whole)["vocab_size"] = text.vocab_size
    files = {name: (folder / name).read_bytes() for name in PROCESSORS if (folder / name).is_file()}
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode(), **files}


def set_dtype(config: dict[str, Any], dtype: torch.dtype, whole: PreTrainedConfig) -> None:
    """Set the type of the text model's weights in the keys of a multimodal model's config.json; other parts
    that name their own type keep it."""
    name = str(dtype).removeprefix("torch.")
    for keys in (config, _text_keys(config, whole)):
        keys.pop("torch_dtype", None)
        keys["dtype"] = name


def _text_keys(config: dict[str, Any], whole: PreTrainedConfig) -> dict[str, Any]:
    """Return the part of a config.json that has the text model's keys; older files have them at the top."""
    found = config.get(text_key(whole))
    return found if isinstance(found, dict) else config


class TensorsAround:
    """The tensors of a multimodal model by their names in its files: those of the text model from `values`,
    converted where the files have other tensors than memory; all others as the files have them. dtypes: of
    these others; not_finite: those of them in which `read` has met a value that is not finite."""

    def __init__(
        self, values: TensorSource, checkpoint: CheckpointReader, causal_lm: PreTrainedModel
    ) -> None:
        """`causal_lm`: the text model, on the meta device. Raises MissingInputError where the files are gone,
        CheckpointError where they have changed since training began or have other tensors than the model."""
        model = model_of(checkpoint)
        name = str(model.name_or_path)
        try:
            files = weight_files(name)
            whole = around(model, causal_lm)
        except MissingInputError as error:
            raise MissingInputError(
                f"{checkpoint.path} has the text model alone, and an export copies the other tensors from "
                f"model.name_or_path {name!r}, which cannot be read ({str(error).splitlines()[0]}); put it "
                "back, then run dsft export."
            ) from None
        check_same_base(checkpoint, name, digests(files))
        if whole is None:
            raise CheckpointError(
                f"{checkpoint.path} is of the text model of a multimodal model, and model.name_or_path "
                f"{name!r} is now another model; put the model back as it was."
            )
        self._values = values
        self.not_finite: set[str] = set()
        self._file_of = {key: file for file in map(SafetensorsFile, files) for key in file.keys}
        tensors = read_map(whole.model, self._file_of)
        self._converted = whole.converted_back(
            tensors, causal_lm, lambda key: self._file_of[key].shape(key), self._read
        )
        self._names = _trained_names(whole.text_map(tensors, causal_lm), causal_lm)
        made = self._converted.shapes
        others = {key: file for key, file in self._file_of.items() if key not in made}
        self.dtypes = {
            key: TENSOR_TYPES[file.dtype(key)] for key, file in others.items() if key not in self._names
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key: values.shapes[self._names[key]] if key in self._names else file.shape(key)
            for key, file in others.items()
        } | made  # those of one conversion follow each other

    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor:
        if name in self._names:
            return self._values.read(self._names[name], kind, start, stop)
        if name in self._converted.shapes:
            out = torch.empty(stop - start)
            self._converted.read(name, start, out)
            return out
        piece = torch.empty(stop - start, dtype=self.dtypes[name])
        self._file_of[name].read(name, start, piece)
        if piece.is_floating_point() and not piece.float().isfinite().all():
            self.not_finite.add(name)
        return piece

    def _read(self, name: str, start: int, out: Tensor) -> None:
        out.copy_(self._values.read(name, "value", start, start + len(out)))


def _trained_names(text_map: TensorMap, causal_lm: PreTrainedModel) -> dict[str, str]:
    """Return the names in the files of the text model's parameters -> their first names in `causal_lm`, of
    those that are not converted."""
    first = {id(parameter): name for name, parameter in causal_lm.named_parameters()}
    names = {name: first[id(p)] for name, p in causal_lm.named_parameters(remove_duplicate=False)}
    return {key: names[name] for name, key in text_map.unchanged.items() if name in names}
