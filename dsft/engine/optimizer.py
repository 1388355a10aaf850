"""The optimizer that DeepSpeed drives: takes trained parameters by name and a spec's `optim`, gives an
optimizer.

It stands here and not in the DeepSpeed JSON, since the right class depends on where the update runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from dsft.spec.schema import Optim


def build_optimizer(
    trained: Mapping[str, nn.Parameter], optim: Optim, offloaded: bool
) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups. `offloaded`: fp32 weights and moments live in the host's memory, where
    DeepSpeed's own Adam updates them; compiled at its first use. Elsewhere torch's fused AdamW.

    To be called before ZeRO 3 cuts the parameters: the groups go by their shapes.
    """
    groups = decay_groups(trained, optim.weight_decay)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.momentum)
    settings: dict[str, Any] = {"lr": optim.learning_rate, "betas": optim.betas, "eps": optim.eps}
    if offloaded:
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, **settings, adamw_mode=True, fp32_optimizer_states=True
        )
        return optimizer
    return torch.optim.AdamW(groups, **settings, fused=True)


def decay_groups(trained: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; biases, norms and other vectors do not. A group without parameters is
    left out, so that it cannot meet the code of DeepSpeed that flattens groups."""
    decayed = [p for p in trained.values() if p.ndim > 1]
    others = [p for p in trained.values() if p.ndim <= 1]
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
