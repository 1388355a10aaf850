"""Store frozen weights in 4 bits, by bitsandbytes: the types NF4 and FP4 in blocks of 64, whose scales are
quantized too (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

What bitsandbytes has of a weight is one parameter here: its bytes, in the type that the model computes in
(`packed_bytes`). To DeepSpeed and a pipeline it is a parameter like any other, only smaller, and ZeRO 3
gathers 4 bits. The experts of a mixture have the bytes of each one's own matrix, one after the other.
bitsandbytes is imported only for a model with such weights.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsft.errors import MissingInputError, brief
from dsft.plan.storage import BLOCK, DEQUANTIZED_AT_ONCE, SCALES, Form, packed_bytes

IN_CACHE = 1 << 18
"""Most elements of experts that are dequantized by one call on a CPU, where more of them leave its caches."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is stored in 4 bits. It is whole in the type of the parameter while its
    product is computed, in the forward and again in the backward. form: the type of its 4 bits."""

    form: Form

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (…, out) of inputs (…, in)."""
        output: Tensor = _Product.apply(inputs, self)
        return output

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """Its 4 bits, by the name for which peft's DoRA takes `dequantize` (integrations.py
        dequantize_module_weight)."""
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the weight, (out, in)."""
        return dequantized(self.weight, self.form, (self.out_features, self.in_features))


class _Product(torch.autograd.Function):
    """The product with a frozen weight. Saves nothing: ZeRO 3 gathers the module again for the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        return F.linear(inputs, linear.dequantize(), linear.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.linear.dequantize(), None


def in_4_bits(linear: nn.Linear, form: Form) -> QuantizedLinear:
    """Make a linear layer one whose weight is, or will be, stored in 4 bits, in place."""
    linear.__class__ = QuantizedLinear
    assert isinstance(linear, QuantizedLinear)
    linear.form = form
    return linear


def packed(weight: Tensor, form: Form) -> Tensor:
    """Return the elements, in the type of `weight` (out, in), that hold it in 4 bits; of (experts, out, in)
    those of each expert, one after the other. They are on the CPU; a GPU that this process uses computes
    them."""
    if weight.ndim > 2:
        return torch.cat([packed(one, form) for one in weight])
    place = torch.device("cuda") if torch.cuda.is_initialized() else weight.device
    values, state = bitsandbytes().quantize_4bit(
        weight.to(place), blocksize=BLOCK, compress_statistics=True, quant_type=form
    )
    return held(values, state).view(weight.dtype)


def held(values: Tensor, state: Any) -> Tensor:
    """Return the bytes that hold a matrix, from its values in 4 bits and bitsandbytes' state of them."""
    return joined((values, state.absmax, state.state2.absmax, state.offset), math.prod(state.shape))


def joined(parts: Sequence[Tensor], numel: int) -> Tensor:
    """Return the bytes that hold a matrix of `numel` elements in 4 bits: its values, scales, their scales
    and their offset."""
    found = torch.zeros(sum(packed_bytes(numel)), dtype=torch.uint8)
    for place, part in zip(found.split(packed_bytes(numel)), parts, strict=True):
        part = part.reshape(-1).view(torch.uint8)
        place[: len(part)] = part
    return found


@torch.no_grad()
def dequantized(weight: Tensor, form: Form, shape: tuple[int, ...]) -> Tensor:
    """Return the matrices (…, out, in) of this shape whose bytes, one matrix after the other, `weight` has:
    what `packed` makes of each of them."""
    functional, code, numel = bitsandbytes(), _code(weight.device), math.prod(shape[-2:])
    parts = weight.view(torch.uint8).view(math.prod(shape[:-2]), -1).split(packed_bytes(numel), dim=1)
    found = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    # Where their blocks are full, bitsandbytes can take several matrices for one.
    limit = DEQUANTIZED_AT_ONCE if weight.is_cuda else IN_CACHE
    at_once = 1 if numel % (BLOCK * SCALES) else max(1, limit // numel)
    pieces = zip(*(part.split(at_once) for part in (*parts, found.view(-1, numel))), strict=True)
    for values, scales, of_scales, offset, out in pieces:
        floats = torch.cat([of_scales, offset], 1).view(torch.float32)  # copied: aligned for float32
        nested = functional.QuantState(
            floats[:, :-1].flatten(), code=code, blocksize=SCALES, dtype=torch.float32
        )
        absmax = functional.dequantize_blockwise(scales[:, : -(-numel // BLOCK)].flatten(), nested)
        absmax.view(len(out), -1).add_(floats[:, -1:])
        state = functional.QuantState(
            absmax,
            shape=torch.Size((out.numel() // shape[-1], shape[-1])),
            blocksize=BLOCK,
            quant_type=form,
            dtype=weight.dtype,
        )
        if weight.is_cuda:
            functional.dequantize_4bit(values.reshape(-1, 1), state, out=out.view(state.shape))
        else:  # for which bitsandbytes has no operation that writes into a tensor
            out.copy_(functional.dequantize_4bit(values.reshape(-1, 1), state).view_as(out))
    return found


def bitsandbytes(key: str = "model.quantize") -> Any:
    """Return the module bitsandbytes.functional. Raises MissingInputError where it is not installed. key: of
    the spec, that needs it."""
    found = load_bitsandbytes()
    if found is None:
        raise MissingInputError(
            f"{key} needs the package bitsandbytes, which is not installed; install it, or leave {key} out."
        )
    return found


@functools.cache
def load_bitsandbytes() -> Any:
    """Return the module bitsandbytes.functional, None where it is not installed. Raises MissingInputError
    where it is installed and cannot be imported. peft imports it too, so it comes first: without
    torch.compile, which it wraps around functions that are not used here, and which would import the
    compiler, a tenth of a rank's start; and without its warning, on some CPUs, that a kernel for inference
    has to be downloaded."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    compile, torch.compile = torch.compile, lambda function, **options: function  # type: ignore[assignment]
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ModuleNotFoundError as error:
        if error.name == "bitsandbytes":
            return None
        raise _broken(error) from error
    except Exception as error:  # such as OSError of a library of CUDA
        raise _broken(error) from error
    finally:
        torch.compile = compile


def _broken(error: Exception) -> MissingInputError:
    return MissingInputError(
        f"The package bitsandbytes, which peft uses, is installed but cannot be imported ({brief(error)}); "
        "install it again, or uninstall it (only model.quantize and optim.name: adamw_8bit need it)."
    )


@functools.cache
def _code(device: torch.device) -> Tensor:
    """Return the 256 values that a quantized scale can have."""
    code: Tensor = bitsandbytes().create_dynamic_map().to(device)
    return code
