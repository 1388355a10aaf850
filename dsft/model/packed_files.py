"""Read weights in 4 bits from safetensors files as bitsandbytes saves them (`save_pretrained` of a model that
was loaded with `load_in_4bit`).

The bytes of the weight NAME are the tensor NAME. Beside it are its scales, NAME.absmax, the scales of these,
NAME.nested_absmax, the tables of both codes, and as JSON what else bitsandbytes needs,
NAME.quant_state.bitsandbytes__nf4 (bitsandbytes 0.50, functional.py, QuantState.as_dict).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from dsft.errors import MissingInputError
from dsft.model.quantize import dequantized, joined
from dsft.model.weights import Shape
from dsft.plan.storage import BLOCK, SCALES, Form, packed_bytes

STATE = ".quant_state.bitsandbytes__"
PARTS = "", ".absmax", ".nested_absmax"
TABLES = ".quant_map", ".nested_quant_map"
AS_HERE = {"blocksize": BLOCK, "nested_blocksize": SCALES, "nested_dtype": "float32"}


class PackedWeights:
    """The weights in 4 bits of some files. shapes: of each before it was quantized, by its name in the files;
    beside: the names of tensors that are no weights, but belong to one of these."""

    def __init__(self, keys: Collection[str], read: Callable[[str], Tensor], where: str) -> None:
        """read: from a name to its tensor's bytes; where: the model's name in errors. Raises
        MissingInputError for weights that were quantized in another way than `packed` does."""
        self._read, self._where = read, where
        self._states: dict[str, tuple[Any, float]] = {}
        self.shapes: dict[str, Shape] = {}
        for key in keys:
            name, _, form = key.partition(STATE)
            if form:
                try:
                    state = json.loads(bytes(read(key).tolist()))
                    self.shapes[name] = tuple(map(int, state["shape"]))
                    self._states[name] = form, float(state.get("nested_offset", 0))
                except (ValueError, TypeError, LookupError, AttributeError):
                    raise MissingInputError(f"{where}: {key} is damaged; copy it again.") from None
                if any(state.get(key) != value for key, value in AS_HERE.items()):
                    raise MissingInputError(
                        f"{where}: the scales of {name} in 4 bits are not quantized, or are of other blocks "
                        f"than {BLOCK} elements; save it with bnb_4bit_use_double_quant=True, or give the "
                        "model that was quantized."
                    )
        self.beside = {f"{name}{other}" for name in self.shapes for other in (*PARTS[1:], *TABLES)}
        self.beside |= {f"{name}{STATE}{form}" for name, (form, _) in self._states.items()}

    def elements(self, name: str, form: Form, dtype: torch.dtype) -> Tensor | None:
        """Return a weight's elements as `packed` gives them, in this type; None where the files do not have
        it in this form. Raises MissingInputError where they are incomplete."""
        if name not in self._states or self._states[name][0] != form:
            return None
        numel = math.prod(self.shapes[name])
        values, _, of_scales, _ = packed_bytes(numel)
        try:
            parts = [self._read(f"{name}{part}") for part in PARTS]
        except KeyError:
            parts = []
        if [*map(len, parts)] != [values, -(-numel // BLOCK), of_scales]:
            raise MissingInputError(f"{self._where}: {name} in 4 bits is incomplete; copy the model again.")
        return joined([*parts, torch.tensor([self._states[name][1]])], numel).view(dtype)

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, (n,), from the flattened weight, dequantized, beginning with element `start`."""
        form, _ = self._states[name]
        elements = self.elements(name, form, out.dtype)
        assert elements is not None, "it has this form"
        out.copy_(dequantized(elements, form, self.shapes[name]).flatten()[start : start + len(out)])
