"""Read and write what ZeRO 3 keeps in files when offloading to NVMe.

A sub-group's fp32 value and moments are a file each where the value has 1 MiB or more, or a block of aio
(optimizer_utils.py, is_swappable_tensor); smaller ones stay in memory. Between steps the files are complete:
a step waits for its last swap (stage3.py:2761 _optimizer_states_and_gradient_swap_out). DeepSpeed's own
checkpoint of them does not restore the moments; here they are read and written through its own swapper,
sub-group by sub-group. File and line are those of version 0.19.8.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor

from dsft.engine.api import StateKind


def align_gradients(optimizer: Any) -> None:
    """Let the optimizer swap only those parts of gradients that begin at an aligned address of the sub-group.
    DeepSpeed reads a gradient from its file to its offset in the sub-group's buffer; where that address is
    no multiple of 512 bytes the kernel refuses to read past the page cache, and async_io does not look at the
    result (deepspeed_aio_common.cpp:112 _do_io_complete), so that the optimizer steps with what the buffer
    had before. Called once after `deepspeed.initialize`."""
    if getattr(optimizer, "swap_optimizer", False):
        swapper = _swapper(optimizer)
        split = swapper._adjust_for_misaligned_lengths  # cuts off what is left at the end
        swapper._adjust_for_misaligned_lengths = functools.partial(
            _split_at_aligned, split, swapper.numel_alignment
        )


def _split_at_aligned(
    split: Any, alignment: int, tensors: Sequence[Tensor], offsets: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """Split each of `tensors` at its first element whose offset is a multiple of `alignment` elements, then
    as `split` does. What is small stays in memory (optimizer_utils.py:225 is_swappable_tensor)."""
    parts: list[Tensor] = []
    starts: list[int] = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        head = min(-offset % alignment, tensor.numel())
        for start, stop in ((0, head), (head, tensor.numel())):
            if stop > start:
                parts.append(tensor[start:stop])
                starts.append(offset + start)
    return split(tensors=parts, offsets=starts)


def is_swapped(optimizer: Any, home: Any) -> bool:
    """Whether the fp32 tensor `home` is empty between steps, with its elements in a file."""
    return getattr(optimizer, "swap_optimizer", False) and home.ds_id in _swapper(optimizer).swap_params_info


def memory_map(optimizer: Any, home: Any, kind: StateKind) -> Tensor | None:
    """Return (n,) fp32, a private memory map of the file: read from the disk on access, valid until the next
    step. None where there is no such moment yet."""
    info = _swapper(optimizer).swap_params_info[home.ds_id]
    value, *moments = info.tensors
    for tensor in (value,) if kind == "value" else moments:
        if kind == "value" or tensor.compute_tensor.ds_id == f"{kind}-{home.ds_id}":
            path, size = tensor.swap_path, info.numel()
            return torch.from_file(path, shared=False, size=size, dtype=info.dtype())
    return None


@contextmanager
def swapped_in(optimizer: Any, home: Tensor) -> Iterator[None]:
    """Swap `home` and its moments into memory for the block, then write them back as the block has left them,
    and the parameters' own values with them. Where the block raises, nothing is written: the run
    ends with that error, and partly read values in the files would look complete."""
    group = next(i for i, other in enumerate(optimizer.fp32_partitioned_groups_flat) if other is home)
    optimizer._optimizer_states_and_gradient_swap_in(group)
    yield
    _place(optimizer, group)
    optimizer._optimizer_states_and_gradient_swap_out(group)


def write_parameters(optimizer: Any) -> None:
    """Write the files of parameters whose fp32 values are in memory."""
    if not getattr(optimizer, "params_in_nvme_and_cpu", False):
        return
    for group, home in enumerate(optimizer.fp32_partitioned_groups_flat):
        if not is_swapped(optimizer, home):
            _place(optimizer, group)


def discard_moments(optimizer: Any) -> None:
    """Swap the values alone, as before a first step. Files of moments are written again."""
    if getattr(optimizer, "swap_optimizer", False):
        _swapper(optimizer).purge_state()


def _place(optimizer: Any, group: int) -> None:
    """Copy the sub-group's fp32 values into its parameters, in memory or in files."""
    for parameter in optimizer.fp16_groups[group]:
        part = parameter.ds_tensor
        on_disk = part.final_location == OffloadDeviceEnum.nvme
        if (
            on_disk and part.status == PartitionedParamStatus.AVAILABLE
        ):  # prefetched: only memory would change
            parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
    optimizer._reassign_or_swap_out_partitioned_parameters(group)


def _swapper(optimizer: Any) -> Any:
    return optimizer.optimizer_swapper
