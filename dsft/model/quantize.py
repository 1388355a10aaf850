"""Store the frozen weights of linear layers in 4 bits, by bitsandbytes: the types NF4 and FP4 in blocks of
64, whose scales are quantized too (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

What bitsandbytes has of a weight is one parameter here: its bytes, in the type that the model computes in
(`packed_bytes`). To DeepSpeed and a pipeline it is a parameter like any other, only smaller, and ZeRO 3
gathers 4 bits. bitsandbytes is imported only for a model with such weights.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dsft.errors import MissingInputError, Problem, SpecError, brief
from dsft.model.experts import expert_layers
from dsft.model.head import output_layer
from dsft.model.names import plain_name
from dsft.plan.storage import BLOCK, SCALES, Form, packed_bytes
from dsft.spec.patterns import matches, unmatched
from dsft.spec.schema import Model

READ_BY_OTHERS = ("prediction_coefs", "correction_coefs")
"""Linear layers of Gemma 3n whose weights its AltUp clamps itself while it trains; they are not quantized."""


LINEAR = nn.Linear, Conv1D


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is stored in 4 bits. It is whole in the type of the parameter while its
    product is computed, in the forward and again in the backward. form: the type of its 4 bits."""

    form: Form

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (…, out) of inputs (…, in)."""
        output: Tensor = _Product.apply(inputs, self)
        return output

    def dequantized(self) -> Tensor:
        """Return the weight, (out, in)."""
        functional, code = bitsandbytes(), _code(self.weight.device)
        numel, dtype = self.out_features * self.in_features, self.weight.dtype
        values, scales, of_scales, offset = self.weight.detach().view(torch.uint8).split(packed_bytes(numel))
        floats = torch.cat([of_scales, offset]).view(torch.float32)  # copied: aligned for float32
        nested = functional.QuantState(floats[:-1], code=code, blocksize=SCALES, dtype=torch.float32)
        whole = functional.QuantState(
            scales[: -(-numel // BLOCK)],
            shape=torch.Size((self.out_features, self.in_features)),
            blocksize=BLOCK,
            quant_type=self.form,
            dtype=dtype,
            offset=floats[-1],
            state2=nested,
        )
        found: Tensor = functional.dequantize_4bit(values.view(-1, 1), whole)
        return found


class _Product(torch.autograd.Function):
    """The product with a frozen weight. Saves nothing: ZeRO 3 gathers the module again for the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        return F.linear(inputs, linear.dequantized(), linear.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.linear.dequantized(), None


def quantize_linears(causal_lm: PreTrainedModel, model: Model) -> None:
    """Make the linear layers that model.quantize means `QuantizedLinear`s, and freeze their weights: all but
    the output layer, those that are trained, and those of model.quantize_skip. `causal_lm` has its adapters,
    and is on the meta device. A model without adapters, such as a reference, has no trained one. Raises
    SpecError for a model with none, for a pattern that matches none, and for a mixture of experts."""
    if model.quantize is None:
        return
    if expert_layers(causal_lm):
        raise _error(model, "is for linear layers, and the experts of a mixture are none; leave it out")
    head = output_layer(causal_lm)
    found = {
        f"{plain_name(name)}.weight": module
        for name, module in causal_lm.named_modules()
        if type(module) is nn.Linear and module is not head and ".lora_" not in name
        if model.lora is None or not module.weight.requires_grad
        if not plain_name(name).endswith(READ_BY_OTHERS)
    }
    skip = model.quantize_skip
    if found and (problems := list(unmatched("model.quantize_skip.{}", skip, found))):
        raise SpecError("These weights are not quantized in any case.", problems)
    left = [module for name, module in found.items() if not any(matches(name, one) for one in skip)]
    if not left:
        kind, others = causal_lm.config.model_type, " and not in model.quantize_skip" if skip else ""
        own = {
            type(module).__name__
            for name, module in causal_lm.named_modules()
            if isinstance(module, LINEAR) and ".lora_" not in name
        }
        if names := sorted(own - {"Linear"}):
            others += f" (its layers are {' and '.join(names)})"
        raise _error(
            model,
            f"is for layers of the class nn.Linear, of which a {kind} model has none that is frozen{others}; "
            "leave it out",
        )
    for module in left:
        in_4_bits(module, model.quantize).requires_grad_(False)


def bitsandbytes_config(
    causal_lm: PreTrainedModel,
    model: Model,
    dtype: torch.dtype,
    in_files: Callable[[str], str],
    whole: nn.Module,
) -> dict[str, Any] | None:
    """Return the keys of transformers' BitsAndBytesConfig with which it quantizes the same weights as
    training in `dtype` does; None where model.quantize is not given. `causal_lm` is as in `quantize_linears`;
    in_files: from a name in it to that in `whole`, the model that transformers reads, such as itself."""
    if model.quantize is None:
        return None
    quantize_linears(causal_lm, model)
    ours = {in_files(plain_name(n)) for n, m in causal_lm.named_modules() if isinstance(m, QuantizedLinear)}
    linears = {
        plain_name(name)
        for name, module in whole.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": model.quantize,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "llm_int8_skip_modules": sorted(linears - ours),
    }


def quantize_loaded(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Quantize the weights of a model that has been read. config: from `bitsandbytes_config`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in config["llm_int8_skip_modules"]:
            form = config["bnb_4bit_quant_type"]
            module.weight = nn.Parameter(packed(module.weight.detach(), form), requires_grad=False)
            in_4_bits(module, form)


def in_4_bits(linear: nn.Linear, form: Form) -> QuantizedLinear:
    """Make a linear layer one whose weight is, or will be, stored in 4 bits, in place."""
    linear.__class__ = QuantizedLinear
    assert isinstance(linear, QuantizedLinear)
    linear.form = form
    return linear


def quantized_weights(causal_lm: nn.Module) -> dict[int, Form]:
    """Return the ids of the weights that are stored in 4 bits -> their form."""
    return {id(m.weight): m.form for m in causal_lm.modules() if isinstance(m, QuantizedLinear)}


def packed(weight: Tensor, form: Form) -> Tensor:
    """Return the elements, in the type of `weight` (out, in), that hold it in 4 bits. They are on the CPU;
    a GPU that this process uses computes them."""
    place = torch.device("cuda") if torch.cuda.is_initialized() else weight.device
    values, state = bitsandbytes().quantize_4bit(
        weight.to(place), blocksize=BLOCK, compress_statistics=True, quant_type=form
    )
    parts = (values, state.absmax, state.state2.absmax, state.offset)
    found = torch.zeros(sum(packed_bytes(weight.numel())), dtype=torch.uint8)
    for place, part in zip(found.split(packed_bytes(weight.numel())), parts, strict=True):
        part = part.reshape(-1).view(torch.uint8)
        place[: len(part)] = part
    return found.view(weight.dtype)


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


def _error(model: Model, reason: str) -> SpecError:
    return SpecError(
        "The model cannot be quantized.", [Problem("model.quantize", f"{model.quantize} {reason}")]
    )
