"""The optimizer that DeepSpeed drives: takes trained parameters by name and a spec's `optim`, gives an
optimizer.

It stands here and not in the DeepSpeed JSON, since the right class depends on where the update runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from dsft.engine.partition import full_shape
from dsft.spec.schema import Optim


def build_optimizer(
    trained: Mapping[str, nn.Parameter], optim: Optim, offloaded: bool
) -> torch.optim.Optimizer:
    """AdamW or SGD over few groups. `offloaded`: fp32 weights and moments live in the host's memory, where
    DeepSpeed's own Adam updates them; compiled at its first use. Elsewhere torch's fused AdamW."""
    groups = list(parameter_groups(trained, optim))
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.momentum)
    settings: dict[str, Any] = {"lr": optim.learning_rate, "betas": optim.betas, "eps": optim.eps}
    if offloaded:
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, **settings, adamw_mode=True, fp32_optimizer_states=True
        )
        return optimizer
    return torch.optim.AdamW(groups, **settings, fused=True)


RATE = "rate"
"""Key of an optimizer's group: its learning rate as a multiple of the step's."""


def parameter_groups(trained: Mapping[str, nn.Parameter], optim: Optim) -> Iterator[dict[str, Any]]:
    """As few groups as there are pairs of learning rate and weight decay. None is without parameters, so that
    none meets the code of DeepSpeed that flattens groups."""
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        found.setdefault(_settings(name, parameter, optim), []).append(parameter)
    for (rate, weight_decay), parameters in found.items():
        learning_rate = optim.learning_rate * rate
        yield {"params": parameters, "weight_decay": weight_decay, "lr": learning_rate, RATE: rate}


def _settings(name: str, parameter: nn.Parameter, optim: Optim) -> tuple[float, float]:
    """Multiple of the learning rate, and weight decay, by the first group of the spec whose pattern fits.

    A decay that a group states holds for all of it. Otherwise matrices and embeddings decay; biases, norms
    and other vectors do not.
    """
    group = next((g for g in optim.groups if fnmatchcase(name, g.parameters)), None)
    rate, decay = 1.0, optim.weight_decay if len(full_shape(parameter)) > 1 else 0.0
    if group is not None and group.learning_rate is not None:
        rate = group.learning_rate / optim.learning_rate
    if group is not None and group.weight_decay is not None:
        decay = group.weight_decay
    return rate, decay
