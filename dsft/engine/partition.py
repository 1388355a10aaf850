"""Keep this rank's share of a model while it is being filled: all of it, or its partition under ZeRO 3.

ZeRO 3 partitions one parameter after the other, so that no rank ever has the whole model.
`zero.Init(module=…)` would send each whole parameter from rank 0 to all; here the ranks read their own
ranges.
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
from deepspeed.utils import groups
from torch import Tensor, nn

from dsft.dist.world import World
from dsft.model.weights import Sharding


def sharding_for(config: Mapping[str, Any], world: World, *, frozen: bool = False) -> Sharding:
    """Return the `Sharding` of a layout: the whole of each parameter, except under ZeRO 3. frozen: the model
    is not trained."""
    if config["zero_optimization"]["stage"] != 3:
        return Sharding()
    copied = config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    # An empty module: only for what zero.Init does besides partitioning, such as its own linear function. A
    # process makes the groups of the second copies once (groups.py:938 _ZERO_PARAM_INTRA_PARALLEL_GROUP).
    init = deepspeed.zero.Init(
        module=nn.Module(),
        config_dict_or_path=copy.deepcopy(dict(config)),
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group() if copied else None,
    )
    if init.param_swapper is not None:
        # Else it reads into pinned memory of any address, which fails without an error (see align_gradients).
        init.param_swapper._is_io_aligned = lambda numel: False

    def span(numel: int) -> tuple[int, int]:
        """Return this rank's range: equal parts, the last ones short, as in `Init._partition_param`
        (partition_parameters.py:1778 _partition_param)."""
        size = -(-numel // world.world_size)
        return min(size * world.rank, numel), min(size * (world.rank + 1), numel)

    def take(parameter: Any, part: Tensor | None) -> None:
        if part is None and world.world_size == 1:  # it is the whole, and need not be copied
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
            parameter.ds_secondary_tensor = part  # else a copy of the whole is made, which is not here
        parameter.partition()
        drop_copies([parameter])

    return Sharding(span, take)


def _at_home(part: Tensor, parameter: Any, init: Any, frozen: bool) -> Tensor:
    """Move the partition to where it stays: the device that computes, or host memory when offloaded, except
    for small ones, which stay on the device. A trained one is not pinned here: DeepSpeed moves it into one
    pinned tensor (stage3.py:906 pin_memory), and torch would keep the pinned memory that it leaves."""
    if parameter.ds_persist or init.remote_device not in (OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme):
        return part.to(init.local_device)
    pinned = init.pin_memory and (frozen or not parameter.requires_grad)
    return get_accelerator().pin_memory(part) if pinned else part


def _padded(part: Tensor, parameter: Any) -> Tensor:
    """Pad the last partitions to the size that all have."""
    size = -(-parameter.ds_numel // parameter.ds_zero_partition_world_size)
    return part if len(part) == size else F.pad(part, (0, size - len(part)))


def _swap_out(part: Tensor, parameter: Any, init: Any) -> bool:
    """Write the partition to NVMe if it is large enough, through one of the swapper's buffers, as
    `Init._partition_param` does. Return whether it was written."""
    swapper = init.param_swapper
    if swapper is None or not swapper.swappable_tensor(numel=len(part)):
        return False
    tensor = torch.empty(0, dtype=part.dtype)
    tensor.data = swapper.get_buffer(parameter, len(part)).copy_(part)
    _set_partition(parameter, tensor, OffloadDeviceEnum.nvme)
    swapper.swap_out_and_release([parameter])
    return True


def _set_partition(parameter: Any, part: Tensor, location: OffloadDeviceEnum | None = None) -> None:
    """Set the attributes that `Init._partition_param` would set, which needs the whole parameter to copy
    from."""
    tensor: Any = part
    tensor.ds_numel = len(part)
    tensor.status = PartitionedParamStatus.AVAILABLE
    tensor.final_location = location
    parameter.ds_tensor = tensor
    parameter.ds_numel_aligned = len(part) * parameter.ds_zero_partition_world_size


def drop_copies(parameters: Iterable[nn.Parameter]) -> None:
    """Drop this rank's part of the second copies (hpZ) of parameters whose values have changed, as a step
    does (stage3.py:755 invalidate_secondary_tensor). Their next use makes new ones."""
    for parameter in parameters:
        if hasattr(parameter, "ds_secondary_tensor"):
            parameter.ds_secondary_tensor = None


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the whole parameter, whether ZeRO 3 has partitioned it or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def share_buffers(module: nn.Module, world: World) -> None:
    """Copy rank 0's floating-point buffers into those of the same name. A collective. Processors of different
    kinds may compute a rotary table with different last bits."""
    own = {
        n: buffer for n, buffer in module.named_buffers() if buffer.is_floating_point() and not buffer.is_meta
    }
    for name, value in world.broadcast({name: buffer.cpu() for name, buffer in own.items()}).items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers to the device. DeepSpeed does so itself, except for a module whose parameters are
    partitioned (engine.py:2093 dont_change_device)."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


class Snapshot:
    """A snapshot of parameter values that can be swapped in temporarily. Under ZeRO 3 the values are this
    rank's shares, and what was gathered from other values is released on entry and on exit. The optimizer's
    state is not changed.

    values: this rank's share of each parameter, as it was.
    """

    def __init__(self, engine: Any, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._homes = [home_of(parameter) for parameter in self._parameters]
        self.values = [home.detach().clone() for home in self._homes]
        self._sharded = engine if engine.zero_optimization_stage() == 3 else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters the values of the snapshot inside the block. No gradients and no step
        inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the memory of both; no element is copied."""
        if self._sharded:
            self._sharded.optimizer.empty_partition_cache()
        for index, home in enumerate(self._homes):
            home.data, self.values[index] = self.values[index], home.data
        drop_copies(self._parameters)


def home_of(parameter: nn.Parameter) -> Tensor:
    """Return the tensor with this rank's share of the parameter, whatever is gathered."""
    home: Tensor = getattr(parameter, "ds_tensor", parameter)
    return home
