"""Find the mixtures of experts of a model, and choose what computes them.

They are found by modules, since each architecture counts its experts under another key of its config, and
some layers of a mixture are dense. transformers (5.23) builds each mixture as one block with two children: a
router (named gate or router), which scores the experts, and the experts, which store all of their weights in
a few parameters of the shape [experts, out, in]. The experts are called with the hidden states (tokens,
hidden), the experts of each token (tokens, top_k) and the weights of these (tokens, top_k).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dsft.errors import Problem, SpecError
from dsft.model.kernels import on_gpu
from dsft.model.names import is_adapter
from dsft.spec.architecture import unused_loss

ROUTERS = ("gate", "router")
"""transformers' names of the module that chooses the experts of each token."""


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture of experts in a model.

    block        name of the module that contains the two others, such as model.layers.3.mlp
    router       name of the module that chooses each token's experts
    experts      name of the module with the weights of all experts
    num_experts  number of experts that tokens are routed to; shared experts are not counted
    top_k        number of experts that each token is routed to
    """

    block: str
    router: str
    experts: str
    num_experts: int
    top_k: int


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the mixtures of experts of a model, or of a pipeline stage of it, in the order of its layers;
    an empty list for a dense model."""
    found = []
    for name, experts in model.named_modules():
        shapes = [*stacks(experts).values()]
        if not shapes or not (hasattr(experts, "num_experts") or name.endswith(".experts")):
            continue
        block = name.rpartition(".")[0]
        for child, module in model.get_submodule(block).named_children():
            if child in ROUTERS:
                router: Any = module
                count = max(shape[0] for shape in shapes)
                top_k = router.top_k if hasattr(router, "top_k") else router.config.top_k_experts  # Gemma 4
                found.append(ExpertLayer(block, f"{block}.{child}", name, count, int(top_k or 0)))
    return found


def stacks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that have the weights of several experts, by name and without their
    adapters, also where ZeRO 3 has partitioned them."""
    shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in module.named_parameters(recurse=False)}
    return {name: shape for name, shape in shapes.items() if len(shape) == 3 and not is_adapter(name)}


def computed_alike(experts: nn.Module) -> bool:
    """Whether a module of experts has weights (experts, out, in) without biases, which transformers can
    compute by grouped products (`use_experts_implementation`)."""
    return getattr(experts, "is_transposed", True) is False and not getattr(experts, "has_bias", True)


ALIGNED = 8
"""Grouped matrix products need rows of a multiple of 16 bytes, which are 8 elements of 16 bits."""


ONE_KERNEL = (9, 10)
"""Major compute capabilities for which torch (2.10 to 2.13, ATen/native/cuda/GroupedBlas.cpp) computes a
grouped product in bf16 by one kernel. For others, fp16 and fp32 it multiplies expert by expert, and waits for
the device once per product: for transformers' two products of a layer 2 times in the forward and 4 in the
backward. That is still less than eager, which waits 5 times per expert (docs/experts.md)."""


def choose_experts(causal_lm: PreTrainedModel, choice: str) -> None:
    """Set what computes the experts: model.experts.implementation, or for auto grouped_mm where transformers
    and the widths of the experts allow it, else eager. `causal_lm` is on the meta device. Raises SpecError
    for a dense model, for a router of no or too many experts, and for an implementation that the model
    cannot use."""
    layers = expert_layers(causal_lm)
    kind = causal_lm.config.model_type
    if not layers and choice != "auto":
        raise _error(
            "model.experts.implementation", f"{choice}, but this {kind} model has no experts; leave it out"
        )
    for layer in layers:
        if not 0 < layer.top_k <= layer.num_experts:
            message = f"a token cannot go to {layer.top_k} of {layer.num_experts} experts; set the config's "
            raise _error("model", f"{message}num_experts_per_tok to a number from 1 to {layer.num_experts}")
    if not layers:
        return
    obstacle = _obstacle(causal_lm, layers)
    if obstacle and choice not in ("auto", "eager"):
        raise _error("model.experts.implementation", f"{choice} is not possible, since {obstacle}; set auto")
    wanted = "grouped_mm" if choice == "auto" else choice
    causal_lm.set_experts_implementation("eager" if obstacle else wanted)


def _obstacle(causal_lm: PreTrainedModel, layers: list[ExpertLayer]) -> str:
    """Return why the experts can only be computed one after the other; empty where nothing prevents it."""
    for layer in layers:
        experts = causal_lm.get_submodule(layer.experts)
        if not hasattr(experts, "is_transposed"):  # which transformers' use_experts_implementation sets
            return f"{type(experts).__name__} has an implementation of its own"
        widths = {width for shape in stacks(experts).values() for width in shape[1:]}
        if odd := sorted(width for width in widths if width % ALIGNED):
            return f"the experts have the width {odd[0]}, which is not a multiple of {ALIGNED}"
    return ""


def described(causal_lm: PreTrainedModel) -> Iterator[str]:
    """Yield lines for the start of a run: what computes the experts, and a loss that is not trained."""
    if layers := expert_layers(causal_lm):
        kinds = sorted({(layer.top_k, layer.num_experts) for layer in layers})
        counts = " or ".join(f"{top_k} of {num_experts}" for top_k, num_experts in kinds)
        how = causal_lm.config._experts_implementation
        if how == "grouped_mm" and _one_by_one(causal_lm.dtype):
            how += ", expert by expert: one kernel for all needs bf16 and compute capability 9 or 10"
        yield f"experts: {counts} for each token, computed by {how}"
        yield from unused_loss(vars(causal_lm.config))


def _one_by_one(dtype: torch.dtype) -> bool:
    """Return whether this process's GPU has no kernel for a grouped product in `dtype`."""
    if not on_gpu() or not torch.cuda.is_available():
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] not in ONE_KERNEL


OF_EXPERTS = ("experts", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of experts' weights, in modules and in files."""

JOINED = "is a name that routed experts have in files only; write experts to adapt them, or leave it out"


def routers(causal_lm: nn.Module) -> frozenset[str]:
    """Return the names of the modules that choose experts, and of those below them."""
    roots = tuple(layer.router for layer in expert_layers(causal_lm))
    names = (name for name, _ in causal_lm.named_modules())
    return frozenset(
        name for name in names if name in roots or name.startswith(tuple(f"{r}." for r in roots))
    )


def of_experts(causal_lm: nn.Module, wanted: str, module: str | None = None) -> bool:
    """Whether a name that someone wrote for a layer means routed experts. module: the module that it names,
    None if there is none."""
    layers = expert_layers(causal_lm)
    if module is not None:
        return any(module == layer.experts or module.startswith(f"{layer.experts}.") for layer in layers)
    return bool(layers) and wanted.rpartition(".")[2] in OF_EXPERTS


def left_out(causal_lm: nn.Module) -> Iterator[str]:
    """Yield the line for the start of a run whose adapters leave out experts."""
    layers = expert_layers(causal_lm)
    experts = [causal_lm.get_submodule(layer.experts) for layer in layers]
    if layers and not any(is_adapter(name) for module in experts for name, _ in module.named_parameters()):
        yield (
            "adapters: the routed experts get none and stay as they are; attention, dense layers and shared "
            "experts have them as model.lora.target_modules says"
        )


def _error(where: str, message: str) -> SpecError:
    return SpecError("The model cannot be trained.", [Problem(where, message)])
