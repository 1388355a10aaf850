"""Find the mixtures of experts of a model by its modules, since each architecture counts its experts under
another key of its config, and some layers of a mixture are dense.

transformers (5.23) builds each mixture as one block with two children: a router (named gate or router), which
scores the experts, and the experts, which store all of their weights in a few parameters of the shape
[experts, out, in]. The experts are called with the hidden states (tokens, hidden), the experts of each token
(tokens, top_k) and the weights of these (tokens, top_k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

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
        if not _are_experts(experts):
            continue
        block = name.rpartition(".")[0]
        for child, module in model.get_submodule(block).named_children():
            if child in ROUTERS:
                router: Any = module
                layer = ExpertLayer(block, f"{block}.{child}", name, _count(experts), int(router.top_k or 0))
                found.append(layer)
    return found


def _are_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of several experts in one parameter each."""
    return hasattr(module, "num_experts") and any(p.dim() == 3 for p in module.parameters(recurse=False))


def _count(experts: Any) -> int:
    return int(experts.num_experts)
