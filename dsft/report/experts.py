"""Compute the metrics of a mixture of experts from what its routers chose in the steps of a record."""

from __future__ import annotations

import re

from torch import Tensor

from dsft.model.routing import Routing

STARVED = 0.1
"""Fraction of the mean load below which an expert counts as starved."""


def expert_record(routing: Routing, table: Tensor, steps: int) -> dict[str, float]:
    """Return the metrics of each layer, and of all layers the largest load and the mean share of starved
    experts, and the balance loss per step. table: the sum of `Routing.pop` over all ranks and steps."""
    record: dict[str, float] = {}
    loads, starved = [], []
    for layer, row in zip(routing.layers, table, strict=True):
        tokens = row[: layer.num_experts]
        mean = tokens.mean()
        loads.append(float(tokens.max() / mean))
        starved.append(float((tokens < STARVED * mean).double().mean()))
        name = f"train/experts/layer_{layer_number(layer.block)}"
        record |= {f"{name}/load": loads[-1], f"{name}/starved": starved[-1]}
    record |= {
        "train/experts/load": max(loads),
        "train/experts/starved": sum(starved) / len(starved),
    }
    if routing.experts.balance != "none":
        record["train/experts/balance_loss"] = float(table[:, -1].sum()) / steps
    return record


def layer_number(block: str) -> int:
    """Return the number of the layer that a module is in: model.layers.3.mlp is in layer 3."""
    found = re.search(r"\.(\d+)(\.|$)", block)
    return int(found.group(1)) if found else 0
