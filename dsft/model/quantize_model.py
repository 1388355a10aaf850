"""Choose which weights of a model are stored in 4 bits, and say so to transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from dsft.errors import Problem, SpecError
from dsft.model.experts import computed_alike, expert_layers, routers, stacks
from dsft.model.head import output_layer
from dsft.model.names import plain_name
from dsft.model.quantize import QuantizedLinear, dequantized, held, in_4_bits, packed
from dsft.model.stacked import StackedExperts, stack
from dsft.plan.storage import Form
from dsft.spec.patterns import matches, unmatched
from dsft.spec.schema import Model

READ_BY_OTHERS = ("prediction_coefs", "correction_coefs")
"""Linear layers of Gemma 3n whose weights its AltUp clamps itself while it trains; they are not quantized."""


LINEAR = nn.Linear, Conv1D

EXPERTS = "experts_in_4_bits"
"""dsft's own key beside those of BitsAndBytesConfig, which knows linear layers only: names of parameters.
Exports have it in their config.json."""


def quantize_model(causal_lm: PreTrainedModel, model: Model) -> None:
    """Make the linear layers that model.quantize means `QuantizedLinear`s, and the routed experts
    `StackedExperts`, and freeze their weights: all but the output layer, routers, those that are trained, and
    those of model.quantize_skip. `causal_lm` has its adapters, and is on the meta device. A model without
    adapters, such as a reference, has no trained one. Raises SpecError for a model with none, for a pattern
    that matches none, and for experts that cannot be stored so."""
    if model.quantize is None:
        return
    head, left_out = output_layer(causal_lm), routers(causal_lm)
    in_files = getattr(causal_lm.config, "quantization_config", None) or {}  # of a model saved in 4 bits
    linears = {
        f"{plain_name(name)}.weight": module
        for name, module in causal_lm.named_modules()
        if type(module) is nn.Linear and module is not head and ".lora_" not in name and name not in left_out
        if model.lora is None or not module.weight.requires_grad
        if not plain_name(name).endswith(READ_BY_OTHERS)
        if should_convert_module(plain_name(name), in_files.get("llm_int8_skip_modules"))
    }
    modules = [layer.experts for layer in expert_layers(causal_lm)]
    experts = {plain_name(name): causal_lm.get_submodule(name) for name in modules}
    stacked = [f"{name}.{own}" for name, module in experts.items() for own in stacks(module)]
    skip, names = model.quantize_skip, [*linears, *stacked]
    if names and (problems := list(unmatched("model.quantize_skip.{}", skip, names))):
        raise SpecError("These weights are not quantized in any case.", problems)
    chosen = {name for name in names if not any(matches(name, one) for one in skip)}
    if not chosen:
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
    for name, module in linears.items():
        if name in chosen:
            in_4_bits(module, model.quantize).requires_grad_(False)
    for name, mixture in experts.items():
        if taken := [one for one in stacks(mixture) if f"{name}.{one}" in chosen]:
            _stack(mixture, dict.fromkeys(taken, model.quantize), model)


def _stack(experts: nn.Module, forms: dict[str, Form], model: Model) -> None:
    if not computed_alike(experts):
        reason = f"is not supported for experts of the class {type(experts).__name__}"
        raise _error(model, f"{reason}; leave them in 16 bits with quantize_skip: ['*.experts.*']")
    stack(experts).forms = forms
    for name in forms:
        experts.get_parameter(name).requires_grad_(False)


def bitsandbytes_config(
    causal_lm: PreTrainedModel,
    model: Model,
    dtype: torch.dtype,
    in_files: Callable[[str], str],
    whole: nn.Module,
) -> dict[str, Any] | None:
    """Return the keys of transformers' BitsAndBytesConfig with which it quantizes the same weights as
    training in `dtype` does; None where model.quantize is not given. `causal_lm` is as in `quantize_model`;
    in_files: from a name in it to that in `whole`, the model that transformers reads, such as itself."""
    if model.quantize is None:
        return None
    quantize_model(causal_lm, model)
    ours = {in_files(plain_name(n)) for n, m in causal_lm.named_modules() if isinstance(m, QuantizedLinear)}
    mixtures = {n: m for n, m in causal_lm.named_modules() if isinstance(m, StackedExperts)}
    stacked = sorted(in_files(f"{plain_name(n)}.{own}") for n, m in mixtures.items() for own in m.forms)
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
        **({EXPERTS: stacked} if stacked else {}),
    }


def quantize_loaded(model: PreTrainedModel, config: Mapping[str, Any], whole: bool = False) -> None:
    """Quantize the weights of a model that has been read. config: from `bitsandbytes_config`; whole: give
    experts the values of their 4 bits instead, for adapters of peft's, which add to them."""
    form: Form = config["bnb_4bit_quant_type"]
    for name in config.get(EXPERTS, ()):
        weight, (path, _, own) = model.get_parameter(name), name.rpartition(".")
        if whole:
            weight.data = dequantized(packed(weight.detach(), form), form, tuple(weight.shape))
        else:
            stack(model.get_submodule(path)).forms[own] = form
            put_packed(model.get_submodule(path), own, form)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name not in config["llm_int8_skip_modules"]:
            put_packed(module, "weight", form)
            in_4_bits(module, form)
        elif type(module).__name__ == "Linear4bit":  # bitsandbytes', of a model that was saved in 4 bits
            theirs: Any = module.get_parameter("weight")
            elements = held(theirs.data, theirs.quant_state).view(model.dtype)
            module.weight = nn.Parameter(elements, requires_grad=False)
            in_4_bits(module, form)


def put_packed(module: nn.Module, name: str, form: Form) -> None:
    """Replace a module's weight of this name by its bytes in 4 bits."""
    weight = module.get_parameter(name).detach()
    setattr(module, name, nn.Parameter(packed(weight, form), requires_grad=False))


def quantized_weights(causal_lm: nn.Module) -> dict[int, tuple[Form, int]]:
    """Return the ids of the weights that are stored in 4 bits -> their form, and the number of matrices that
    are quantized separately."""
    found: dict[int, tuple[Form, int]] = {}
    for module in causal_lm.modules():
        if isinstance(module, QuantizedLinear):
            found[id(module.weight)] = module.form, 1
        elif isinstance(module, StackedExperts):
            found |= {id(module.get_parameter(n)): (f, module.shapes[n][0]) for n, f in module.forms.items()}
    return found


def _error(model: Model, reason: str) -> SpecError:
    return SpecError(
        "The model cannot be quantized.", [Problem("model.quantize", f"{model.quantize} {reason}")]
    )
