"""Rebuild a whole model's tensors from a checkpoint that has only the trained ones; the rest comes from the
base.

The checkpoint has adapters, which are merged in, or the parameters that model.trainable names. Tensors are
computed one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dsft.checkpoint.compare import check_same_base
from dsft.checkpoint.read import CheckpointReader
from dsft.engine.api import StateKind
from dsft.model.build import around, has_frozen, initial_values
from dsft.model.config import on_meta
from dsft.model.files import digests, model_files
from dsft.model.lora import PREFIX, inject, misread, scale
from dsft.model.lora_targets import condensed, saved_modules, saved_names
from dsft.model.names import plain_name
from dsft.model.quantize_model import bitsandbytes_config, quantize_model, quantized_weights
from dsft.model.stacked import peft_name, peft_shape, to_peft
from dsft.model.vocabulary import NewRows, vocabulary_names
from dsft.model.whole import Whole
from dsft.plan.storage import Form
from dsft.spec.schema import Lora, Model

LORA_A = ".lora_A.weight"


class Adapter:
    """The tensors of an adapter's file, by their names there, with the `read` of a `CheckpointReader`.
    config: the content of adapter_config.json; is_misread: whether peft's own loader would take some of its
    layers for experts; quantization: of its base, from `bitsandbytes_config`. Embeddings with new rows are
    included, trained or not, since the base lacks these rows."""

    def __init__(
        self,
        checkpoint: CheckpointReader,
        meta: PreTrainedModel,
        dtype: torch.dtype,
        whole: Whole | None = None,
    ) -> None:
        """`meta`: the model without adapters, on the meta device; `dtype`: of the base in training; `whole`:
        the multimodal model around it. Raises as `WholeModel` does where embeddings have new rows."""
        model = model_of(checkpoint)
        assert model.lora is not None, "the checkpoint is of an adapter"
        self._checkpoint, self._frozen = checkpoint, _frozen_embeddings(checkpoint, meta, dtype)
        shapes = {**checkpoint.shapes, **{name: tuple(t.shape) for name, t in self._frozen.items()}}
        first_names = {name: name for name in shapes} | _tied(meta)
        targets = _targets(meta, checkpoint, model.lora, whole) if whole else {}
        in_file = whole.name if whole else str
        made = inject(meta, model.lora, in_file)
        self.is_misread = misread(whole.model if whole else meta, made)
        config = made.to_dict() | {
            "base_model_name_or_path": model.name_or_path,
            "modules_to_save": saved_names(meta, model.lora) or None,
            "inference_mode": True,
            **targets,
        }
        self.quantization = bitsandbytes_config(meta, model, dtype, in_file, whole.model if whole else meta)
        self.config = {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()}
        self._names = {
            PREFIX + in_file(peft_name(name, shapes)): first
            for name, first in sorted(first_names.items())
            if first in shapes
        }
        self.shapes = {name: peft_shape(first, shapes[first]) for name, first in self._names.items()}

    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of the flattened tensor, as float32 on the CPU."""
        if (first := self._names[name]) in self._frozen:
            return self._frozen[first].flatten()[start:stop]
        shape = torch.Size(self._checkpoint.shapes[first])
        if peft_shape(first, shape) == shape:
            return self._checkpoint.read(first, kind, start, stop)
        whole = self._checkpoint.read(first, kind, 0, shape.numel()).view(shape)
        return to_peft(first, whole).flatten()[start:stop]


def _targets(
    meta: PreTrainedModel, checkpoint: CheckpointReader, lora: Lora, whole: Whole
) -> dict[str, list[str] | None]:
    """Return which modules of a multimodal model have adapters and which are trained in full, for
    adapter_config.json. Last parts of names could mean modules of its towers too."""
    modules = dict(whole.model.named_modules())
    adapted = [
        n.removesuffix(LORA_A) for n, s in checkpoint.shapes.items() if n.endswith(LORA_A) and len(s) == 2
    ]
    saved = [name for name, _ in saved_modules(meta, lora, whole.name)[0]]
    target, in_full = (sorted(condensed([*map(whole.name, n)], modules)) for n in (adapted, saved))
    return {"target_modules": target, "modules_to_save": in_full or None}


def _frozen_embeddings(
    checkpoint: CheckpointReader, meta: PreTrainedModel, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return embeddings with new rows that were not trained, under their first names."""
    if rows_of(checkpoint) is None:
        return {}
    whole = WholeModel(checkpoint, meta, dtype)
    names = (name for name in vocabulary_names(meta) if name in whole.shapes)
    return {name: whole.tensor(name) for name in names if name not in checkpoint.shapes}


def _tied(meta: PreTrainedModel) -> dict[str, str]:
    """Return further names of tied parameters -> the first."""
    first = {id(parameter): name for name, parameter in meta.named_parameters()}
    named = meta.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if name != first[id(parameter)]}


class WholeModel:
    """All tensors of a model, with the `read` of a `CheckpointReader`. shapes: of every parameter, by
    Hugging Face name."""

    def __init__(
        self,
        checkpoint: CheckpointReader,
        meta: PreTrainedModel,
        dtype: torch.dtype,
        *,
        dequantize: bool = False,
    ) -> None:
        """`meta`: the model without adapters, on the meta device; `dtype`: of the base in training;
        dequantize: give weights that training has in 4 bits the values of these. Raises MissingInputError
        where the base is missing, CheckpointError where it has changed."""
        if (name := model_of(checkpoint).name_or_path) is not None:
            check_same_base(checkpoint, name, digests(model_files(name)))
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(parameter.shape) for name, parameter in meta.named_parameters()
        }
        self._checkpoint = checkpoint
        self._meta, self._forms = meta, _forms_of(checkpoint, meta) if dequantize else {}
        self._lora = model_of(checkpoint).lora
        seed = checkpoint.state["spec"]["train"]["seed"]
        self._base = initial_values(model_of(checkpoint), meta, seed, dtype, rows_of(checkpoint))
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of the flattened tensor, as float32 on the CPU. `kind` is ignored:
        there are only values, no optimizer states."""
        if name != self._last[0]:
            self._last = (name, self.tensor(name).flatten())
        return self._last[1][start:stop]

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor in float32, with its adapter merged in."""
        module = name.removesuffix(".weight")
        if name in self._checkpoint.shapes:
            return self._trained(name)
        base = self._base(name, self._forms.get(name, "plain")).float()
        if self._lora is None or f"{module}.lora_A.weight" not in self._checkpoint.shapes:
            return base
        is_turned = name != module and isinstance(self._meta.get_submodule(module), Conv1D)  # (in, out)
        merged = self._merged(base.T if is_turned else base, module, self._lora)
        return merged.T if is_turned else merged

    def _merged(self, weight: Tensor, module: str, lora: Lora) -> Tensor:
        """Return the merged weight (out, in): W + s·B·A; with DoRA each of its rows is scaled to the
        magnitude (https://arxiv.org/abs/2402.09353, eq. 5)."""
        a, b = self._trained(f"{module}.lora_A.weight"), self._trained(f"{module}.lora_B.weight")
        merged = weight + scale(lora) * (b @ a)
        if not lora.use_dora:
            return merged
        magnitude = self._trained(f"{module}.lora_magnitude_vector")
        norms: Tensor = torch.linalg.norm(merged, dim=1)
        return merged * (magnitude / norms)[:, None]

    def _trained(self, name: str) -> Tensor:
        shape = torch.Size(self._checkpoint.shapes[name])
        return self._checkpoint.read(name, "value", 0, shape.numel()).view(shape)


def _forms_of(checkpoint: CheckpointReader, meta: PreTrainedModel) -> dict[str, Form]:
    """Return the names of the weights that training has in 4 bits -> their form. `meta`: see `WholeModel`."""
    model = model_of(checkpoint)
    if model.quantize is None or model.lora is None:
        return {}
    whole, adapted = around(model, meta), on_meta(meta.config)
    inject(adapted, model.lora, whole.name if whole else str)
    quantize_model(adapted, model)
    found = quantized_weights(adapted)
    return {plain_name(n): found[id(p)][0] for n, p in adapted.named_parameters() if id(p) in found}


def rows_of(checkpoint: CheckpointReader) -> NewRows | None:
    """Return the rows of the embeddings that were new when the run began; None where there were none."""
    rows = checkpoint.state.get("new_rows")
    return None if rows is None else NewRows(**rows)


def model_of(checkpoint: CheckpointReader) -> Model:
    """Return the model section of the checkpoint's spec."""
    return Model.model_validate(checkpoint.state["spec"].get("model", {}))


def is_partial(checkpoint: CheckpointReader) -> bool:
    """Return whether the checkpoint has only part of the model's parameters, or adapters."""
    return has_frozen(model_of(checkpoint))
