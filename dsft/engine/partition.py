"""What a rank keeps of a model that is being filled: takes the DeepSpeed configuration, gives a `Keep`.

Under ZeRO 3 it is this rank's partition of one parameter after the other, so that no rank ever holds the
model. Not by `zero.Init(module=…)`, which sends each whole parameter from rank 0 to all: the ranks read their
own ranges.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor, nn

from dsft.engine.world import World
from dsft.model.weights import Keep


def keep_for(config: Mapping[str, Any], world: World, *, frozen: bool = False) -> Keep:
    """All of each parameter, except under ZeRO 3. frozen: of a model that is not trained."""
    if config["zero_optimization"]["stage"] != 3:
        return Keep()
    # An empty module: for what zero.Init does beside the partitioning, such as its own linear function.
    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=copy.deepcopy(dict(config)))

    def span(numel: int) -> tuple[int, int]:
        """Equal parts, the last ones short, as in `Init._partition_param` (partition_parameters.py:1778
        _partition_param)."""
        size = -(-numel // world.world_size)
        return min(size * world.rank, numel), min(size * (world.rank + 1), numel)

    def take(parameter: Any, part: Tensor | None) -> None:
        if part is None and world.world_size == 1:  # all is there, and need not be copied
            part = parameter.data.reshape(-1)
        if part is None:
            parameter.data = parameter.data.to(init.local_device)
            init._convert_to_deepspeed_param(parameter)
        else:
            parameter.data = part.new_empty(1, device=init.local_device).expand(parameter.shape)
            init._convert_to_deepspeed_param(parameter)
            part = _padded(part, parameter)
            if not _swap_out(part, parameter, init):
                _set_partition(parameter, _at_home(part, parameter, init, frozen))
        parameter.partition()

    return Keep(span, take)


def _at_home(part: Tensor, parameter: Any, init: Any, frozen: bool) -> Tensor:
    """Where the partition stays: on the device that computes, or in the host's memory, where small ones are
    kept on the device all the same. A trained one is not page-locked: DeepSpeed moves it into one page-locked
    tensor (stage3.py:906 pin_memory), and torch would keep the locked memory that it leaves."""
    if parameter.ds_persist or init.remote_device not in (OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme):
        return part.to(init.local_device)
    pinned = init.pin_memory and (frozen or not parameter.requires_grad)
    return get_accelerator().pin_memory(part) if pinned else part


def _padded(part: Tensor, parameter: Any) -> Tensor:
    """Every partition has the same size, so the last ones are padded."""
    size = -(-parameter.ds_numel // parameter.ds_zero_partition_world_size)
    return part if len(part) == size else F.pad(part, (0, size - len(part)))


def _swap_out(part: Tensor, parameter: Any, init: Any) -> bool:
    """Write it where it is large enough for the disk, through one of the swapper's buffers, as
    `Init._partition_param` does."""
    swapper = init.param_swapper
    if swapper is None or not swapper.swappable_tensor(numel=len(part)):
        return False
    tensor = torch.empty(0, dtype=part.dtype)
    tensor.data = swapper.get_buffer(parameter, len(part)).copy_(part)
    _set_partition(parameter, tensor, OffloadDeviceEnum.nvme)
    swapper.swap_out_and_release([parameter])
    return True


def _set_partition(parameter: Any, part: Tensor, location: OffloadDeviceEnum | None = None) -> None:
    """What `Init._partition_param` would make of the whole parameter, of which there is none to copy from."""
    tensor: Any = part
    tensor.ds_numel = len(part)
    tensor.status = PartitionedParamStatus.AVAILABLE
    tensor.final_location = location
    parameter.ds_tensor = tensor
    parameter.ds_numel_aligned = len(part) * parameter.ds_zero_partition_world_size


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the whole parameter, whether ZeRO 3 has cut it or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def share_buffers(module: nn.Module, world: World) -> None:
    """A collective. Copy rank 0's floating-point buffers into those of the same name: processors of different
    kinds may compute a rotary table with another last bit."""
    own = {
        n: buffer for n, buffer in module.named_buffers() if buffer.is_floating_point() and not buffer.is_meta
    }
    for name, value in world.broadcast({name: buffer.cpu() for name, buffer in own.items()}).items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """DeepSpeed moves a module to its device, except one whose parameters are cut (engine.py:2093
    dont_change_device)."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


class Remembered:
    """Values of some parameters as they are now, to be put in their place for a while. Under ZeRO 3 these are
    this rank's shares, and whatever was gathered from other values is released on the way in and on the way
    out. Nothing here changes what the optimizer holds.

    values: what this rank holds of each parameter, as it was.
    """

    def __init__(self, engine: Any, parameters: Iterable[nn.Parameter]) -> None:
        self._homes = [home_of(parameter) for parameter in parameters]
        self.values = [home.detach().clone() for home in self._homes]
        self._sharded = engine if engine.zero_optimization_stage() == 3 else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters have the remembered values meanwhile. Without gradients, and no step inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """The memory of one for that of the other; no element is copied."""
        if self._sharded:
            self._sharded.optimizer.empty_partition_cache()
        for index, home in enumerate(self._homes):
            home.data, self.values[index] = self.values[index], home.data


def home_of(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of it, whatever is gathered."""
    home: Tensor = getattr(parameter, "ds_tensor", parameter)
    return home
