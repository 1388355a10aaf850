"""Read a pretrained model's weights from its files: each tensor once, or only the range that a rank keeps.

Names and conversions between file and module are transformers' own (`get_model_conversion_mapping`). A tensor
that the files lack, have in excess or have in another shape is an error, except where transformers allows it:
the second name of a tied tensor, a buffer that is computed, what a class declares to ignore. A parameter that
is not finite is an error too, found by the rank that reads it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.loading_report import LoadStateDictInfo

from dsft.errors import MissingInputError, brief
from dsft.model.config import on_meta
from dsft.model.conversion import read_map
from dsft.model.init import init_scope, initialize_module, mark_initialized, module_seed
from dsft.model.quantize import dequantized, packed
from dsft.model.weights import (
    DTYPES,
    PRECISIONS,
    NamedModule,
    Shape,
    Sharding,
    StorageOf,
    TensorReader,
    TensorSlots,
    check_finite,
    initialization_order,
    own_tensors,
)
from dsft.plan.storage import Form, Storage

SHOWN = 5
"""Number of tensors that an error names."""
SCORE = "score.weight"

PackedOf = Callable[[str, Form, torch.dtype], Tensor | None]


class ReadWeights:
    """Weights from `values`, such as a model's files; implements `Weights`."""

    def __init__(
        self, model: PreTrainedModel, values: TensorReader, packed_of: PackedOf = lambda *_: None
    ) -> None:
        """Check the values. `model` is on the meta device, as transformers builds it. packed_of: what the
        files have of a weight in 4 bits (`SafetensorsReader.packed`). Raises MissingInputError where the
        values are not exactly this model's."""
        self._kind = type(model).__name__
        self._order = tuple(initialization_order(model, model))
        self._values, self._packed_of = values, packed_of
        self._names = _names(model)
        check_tensors(model, values.shapes, values.unexpected, values.where)

    def fill(self, root: nn.Module, storage_of: StorageOf, sharding: Sharding) -> None:
        """See `Weights.fill`. Raises MissingInputError where the files have two values for a tied tensor."""
        slots = TensorSlots(root)
        with init_scope():
            for named in self._order:
                if not slots.has(named.module):
                    continue
                for old in own_tensors(named.module):
                    if isinstance(old, nn.Parameter) and old.is_meta:
                        self._fill_parameter(old, storage_of(old), slots, sharding)
                self._fill_buffers(named, slots)
        slots.end(sharding, self._kind)

    def tensor(self, old: Tensor, dtype: torch.dtype, form: Form = "plain") -> Tensor:
        """Return the whole value of one of the model's tensors; form: that which is stored so."""
        if form != "plain":
            storage = Storage(PRECISIONS[dtype], form, old.shape[:-2].numel())
            (one,) = storage.tensors(old.numel())
            return dequantized(self._quantized(old, storage, 0, one.numel), form, tuple(old.shape))
        value = torch.empty(old.numel(), dtype=dtype)
        self._read(old, 0, value)
        return value.view(old.shape)

    def _fill_parameter(self, old: Tensor, storage: Storage, slots: TensorSlots, sharding: Sharding) -> None:
        dtype = DTYPES[storage.precision]
        (stored,) = storage.tensors(old.numel())
        shape = old.shape if storage.form == "plain" else (stored.numel,)
        start, stop = sharding.span(stored.numel)
        if storage.form != "plain":
            part = self._quantized(old, storage, start, stop)
        else:
            part = torch.empty(stop - start, dtype=dtype)
            self._read(old, start, part)
        if len(part) == stored.numel:
            slots.take(slots.put(old, part.view(shape)), sharding)
        else:
            without_memory = torch.empty(1, dtype=dtype).expand(shape)
            slots.take(slots.put(old, without_memory), sharding, part)

    def _quantized(self, old: Tensor, storage: Storage, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of the stored parameter, as the files have them, if they do. Else
        reads and quantizes one after the other the matrices that are in this range, whole, since their scales
        need that."""
        for name in self._names[id(old)]:
            if (held := self._packed_of(name, storage.form, DTYPES[storage.precision])) is not None:
                return held[start:stop].clone()
        (one,) = Storage(storage.precision, storage.form).tensors(numel := old.numel() // storage.matrices)
        matrix = torch.empty(old.shape[-2:], dtype=DTYPES[storage.precision])
        first, last = start // one.numel, -(-stop // one.numel)
        found = matrix.new_empty(last - first, one.numel)
        for number, row in enumerate(found, first):
            self._read(old, number * numel, matrix.view(-1))
            row.copy_(packed(matrix, storage.form))
        first *= one.numel
        found = found.view(-1)
        return found if stop - start == len(found) else found[start - first : stop - first].clone()

    def _read(self, old: Tensor, start: int, out: Tensor) -> None:
        first, *others = (name for name in self._names[id(old)] if name in self._values.shapes)
        self._values.read(first, start, out)
        if isinstance(old, nn.Parameter):  # a buffer may hold -inf, as a mask does
            check_finite(out, f"{self._values.where}: {self._values.origin(first)}", old.shape, start)
        for other in others:
            again = torch.empty_like(out)
            self._values.read(other, start, again)
            if not torch.equal(out, again):
                raise MissingInputError(
                    f"{self._values.where}: {first} and {other} differ, but config.json says that they are "
                    "tied; set tie_word_embeddings to false there, or give the folder as it was saved."
                )

    def _fill_buffers(self, named: NamedModule, slots: TensorSlots) -> None:
        """Read buffers of the file whole; the others are computed by transformers' own initialization."""
        buffers = [old for old in named.module._buffers.values() if old is not None and old.is_meta]
        if not buffers:
            return
        for parameter in named.module.parameters(recurse=False):
            mark_initialized(parameter)
        blanks = [slots.blank(old) for old in buffers]
        initialize_module(named, frozenset())
        for old, new in zip(buffers, blanks, strict=True):
            if any(name in self._values.shapes for name in self._names.get(id(old), ())):
                self._read(old, 0, new.view(-1))


class LoadedModelReader:
    """The values of a model that transformers' own loader has read: all tensors are in this rank's memory."""

    def __init__(self, model: PreTrainedModel, unexpected: Iterable[str], where: str) -> None:
        self.where = where
        self.unexpected = unexpected
        self._tensors = model.state_dict()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def origin(self, name: str) -> str:
        return name

    def read(self, name: str, start: int, out: Tensor) -> None:
        out.copy_(self._tensors[name].reshape(-1)[start : start + len(out)])


class WithFreshScore:
    """`values` of a causal language model, with a fresh layer of scores in place of its output layer."""

    def __init__(self, model: PreTrainedModel, values: TensorReader, seed: int) -> None:
        """`model`, on the meta device, gives a score. The layer is drawn from the seed and its name, as
        `dsft.model.init` draws it for a fresh model."""
        config = copy.deepcopy(model.config)
        config.architectures = None
        replaced = read_map(on_meta(config), values.unexpected).unchanged.values()  # by its output layer
        self.where = values.where
        self.unexpected = [name for name in values.unexpected if name not in replaced]
        self._values = values
        shape = tuple(model.get_parameter(SCORE).shape)
        layer = nn.Linear(shape[1], shape[0], bias=False, device="meta").to_empty(device="cpu")
        with init_scope():
            torch.default_generator.manual_seed(module_seed(seed, "score"))
            initialize_module(NamedModule(layer, "score", model), frozenset())
        self._score = layer.weight.detach().flatten()
        self.shapes: Mapping[str, Shape] = {**values.shapes, SCORE: shape}

    def origin(self, name: str) -> str:
        """See `TensorReader.origin`."""
        return name if name == SCORE else self._values.origin(name)

    def read(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorReader.read`."""
        if name == SCORE:
            out.copy_(self._score[start : start + len(out)])
        else:
            self._values.read(name, start, out)


def read_whole(
    config: PreTrainedConfig, name_or_path: str, dtype: torch.dtype, vocab_size: int
) -> LoadedModelReader:
    """Read a model by transformers' own loader, with as many tokens as the files have. Raises
    MissingInputError where it cannot be read, or only in part."""
    config = copy.deepcopy(config)
    config.vocab_size = vocab_size
    where = f"model.name_or_path {name_or_path!r}"
    read, unexpected = load_whole(AutoModelForCausalLM, name_or_path, config, dtype, where)
    return LoadedModelReader(read, unexpected, where)


def load_whole(
    auto_class: Any, name_or_path: str, config: PreTrainedConfig, dtype: torch.dtype | str, where: str
) -> tuple[PreTrainedModel, set[str]]:
    """Load a model by transformers' own loader, without printing its report. Return the model and the names
    of tensors in the files that it does not have. where: the model's name in errors. Raises MissingInputError
    where it cannot be read, or only in part."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        model, info = auto_class.from_pretrained(
            name_or_path, config=config, dtype=dtype, trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True,  # reported below, by name
        )  # fmt: skip
    except Exception as error:  # whatever the libraries raise for odd files and values
        reason = brief(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run the code in it
            reason = "its weights are a damaged pickle, or one with more than tensors"
        elif "above report" in reason:
            reason = "some tensors are missing, or have another shape than the model's"
        raise MissingInputError(
            f"{where} has no readable weights ({reason}); give a folder with safetensors files, or a hub id "
            "that is in the cache or can be downloaded."
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} has shape {list(theirs)} instead of {list(ours)}"
        for name, theirs, ours in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise _unfit(where, problems)
    return model, info["unexpected_keys"]


def _names(model: PreTrainedModel) -> dict[int, list[str]]:
    """Return a tensor's id -> its names, for all tensors that a file has."""
    found: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return found


def check_tensors(
    model: PreTrainedModel,
    shapes: Mapping[str, Shape],
    unexpected: Iterable[str],
    where: str,
    others: Iterable[str] = (),
) -> None:
    """Raise MissingInputError unless a model's files have its tensors, as far as transformers does not allow
    that they lack some or have more. shapes: in the files, by the names in the model; unexpected: names of
    tensors that the model has no place for; where: the model's name in the error; others: more that is wrong.
    """
    tensors = model.state_dict()
    missing = [same for same in _names(model).values() if not any(name in shapes for name in same)]
    report = LoadStateDictInfo(
        missing_keys={same[0] for same in missing},
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(report)
    problems = [f"{name} is missing" for name in tensors if name in report.missing_keys]
    problems += [f"{name} is not a tensor of the model" for name in sorted(report.unexpected_keys)]
    problems += [
        f"{name} has shape {list(shape)} instead of {list(tensors[name].shape)}"
        for name, shape in shapes.items()
        if name in tensors and shape != tuple(tensors[name].shape)
    ]
    problems += others
    if problems:
        raise _unfit(where, problems)


def _unfit(where: str, problems: list[str]) -> MissingInputError:
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return MissingInputError(
        f"{where} does not contain this model: {'; '.join(problems[:SHOWN])}{more}. Give the "
        "folder as transformers saved it, with its own config.json."
    )
