"""What a rank keeps of a model that is being filled: takes the DeepSpeed configuration, gives a `Keep`.

Under ZeRO 3 it is this rank's partition, made by DeepSpeed's own code for one parameter after the other, so
that no rank ever holds the model. Not by `zero.Init(module=…)`, which sends each whole parameter from rank 0
to all: the ranks read their own ranges.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from dsft.engine.world import World
from dsft.model.weights import Keep


def keep_for(config: Mapping[str, Any], world: World) -> Keep:
    """All of each parameter, except under ZeRO 3."""
    if config["zero_optimization"]["stage"] != 3:
        return Keep()
    # An empty module: for what zero.Init does beside the partitioning, such as its own linear function.
    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=copy.deepcopy(dict(config)))

    def span(numel: int) -> tuple[int, int]:
        """As `Init._partition_param` (partition_parameters.py:1778): equal parts, the last ones short."""
        size = -(-numel // world.world_size)
        return min(size * world.rank, numel), min(size * (world.rank + 1), numel)

    def take(parameter: Any) -> None:
        parameter.data = parameter.data.to(init.local_device)
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return Keep(span, take)


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the whole parameter, whether ZeRO 3 has cut it or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """DeepSpeed moves a module to its device, except one whose parameters are cut (engine.py:2093)."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
