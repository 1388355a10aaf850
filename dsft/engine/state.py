"""Read and write each parameter's fp32 value and moments where DeepSpeed keeps them, without its checkpoints.

Local: no collective, whatever the ZeRO stage. This module alone finds where a parameter's state is; file and
line of what DeepSpeed does are those of version 0.19.8.

    ZeRO 0, fp32       the optimizer's own state, by parameter; equal on all ranks of a stage
    ZeRO 0, bf16       fp32 copies beside the parameters, by parameter; equal on all ranks of a stage
    ZeRO 1, 2          a flat fp32 partition per parameter group; `param._hp_mapping` says which part is here
    ZeRO 3             a flat fp32 partition per sub-group, of which each parameter has an equal, padded part;
                       offloaded to NVMe, sub-groups of 1 MiB and more are files (nvme.py)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dsft.engine.api import Fragment, ReadRange, StateKind
from dsft.engine.base_optimizer import BaseOptimizer, StateShard
from dsft.engine.nvme import discard_moments, is_swapped, memory_map, swapped_in, write_parameters
from dsft.engine.partition import drop_copies
from dsft.errors import CheckpointError

Locate = Callable[[nn.Parameter], StateShard | None]


def owned_fragments(
    engine: Any, named: Mapping[str, nn.Parameter], shard_rank: int, shards: int
) -> Iterator[Fragment]:
    """Yield the state that this rank owns; over all ranks each element occurs exactly once.

    `named` maps Hugging Face names to the engine's parameters. A tied parameter with two names occurs once,
    under the first; one on two pipeline stages only on the first of them. Before the first applied step there
    are no moments, and none are yielded. Raises CheckpointError for an unknown optimizer.
    """
    for name, shard in owned_shards(engine, named, shard_rank, shards):
        kinds: tuple[StateKind, ...] = ("value", *_base(engine.optimizer).kinds_of(shard.home))
        for kind in kinds:
            read = _reader(engine.optimizer, shard, kind)
            if read is not None:
                yield Fragment(name, kind, shard.start, shard.size, read)


def owned_shards(
    engine: Any, named: Mapping[str, nn.Parameter], shard_rank: int, shards: int
) -> Iterator[tuple[str, StateShard]]:
    """Yield the part of each parameter of which this rank owns the state; see `owned_fragments`."""
    locate, replicated = _locator(engine.optimizer)
    for name, parameter in _once(named):
        shard = None if is_copy(parameter) else locate(parameter)
        if shard is not None and replicated:
            shard = shard.part(*_share(shard.size, shard_rank, shards))
        if shard is not None and shard.size:
            yield name, shard


def master_weights(engine: Any, named: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield the float32 values of trained parameters, as `owned_fragments` reads them, where all ranks of a
    stage have the same and they are not the parameters themselves."""
    locate, is_replicated = _locator(engine.optimizer)
    for name, parameter in _once(named) if is_replicated else ():
        shard = locate(parameter)
        if shard is not None and shard.home is not parameter:
            yield name, shard.of(shard.home)


@torch.no_grad()
def load(engine: Any, named: Mapping[str, nn.Parameter], read: ReadRange, applied_steps: int) -> None:
    """Load values, moments and the step count, so that the next step is the one that would have followed.

    With applied_steps 0 the moments are as before a first step. Raises what `read` raises.
    """
    optimizer, base = engine.optimizer, _base(engine.optimizer)
    locate, _ = _locator(optimizer)
    empty_state(engine, applied_steps)
    homes = [home for home in _homes(optimizer) if is_swapped(optimizer, home)]
    swapped: dict[int, list[tuple[str, nn.Parameter, StateShard]]] = {id(home): [] for home in homes}

    def load_one(name: str, parameter: nn.Parameter, shard: StateShard | None) -> None:
        _set_value(name, parameter, shard, read)
        if shard is not None and shard.size:
            for kind in base.kinds_of(shard.home) if applied_steps else ():
                base.write(shard, kind, read(name, kind, shard.start, shard.start + shard.size))

    for name, parameter in _once(named):
        shard = locate(parameter)
        if shard is not None and id(shard.home) in swapped:
            swapped[id(shard.home)].append((name, parameter, shard))
        else:
            load_one(name, parameter, shard)
    for home in homes:
        with swapped_in(optimizer, home):
            if applied_steps:
                base.allocate(home, applied_steps)
            for entry in swapped[id(home)]:
                load_one(*entry)
    write_parameters(optimizer)
    drop_copies(named.values())


def undo_first_step(engine: Any) -> None:
    """Undo the step that the optimizer of ZeRO 0 in bf16 takes, with zero gradients, when it is built
    (unfused_optimizer.py:412 initialize_optimizer_states): it counts in Adam's bias correction and decays
    weights. Others are left as they are. Called once after `deepspeed.initialize`."""
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def set_parts(engine: Any, named: Mapping[str, nn.Parameter]) -> None:
    """Tell the optimizer which parts of parameters its tensors have. Called once after
    `deepspeed.initialize`. A collective of the data-parallel ranks."""
    optimizer, (locate, is_replicated) = engine.optimizer, _locator(engine.optimizer)
    found = {name: locate(parameter) for name, parameter in _once(named)}
    parts = {name: shard for name, shard in found.items() if shard is not None and shard.size}
    ranks = None if is_replicated else optimizer.dp_process_group
    _base(optimizer).set_parts(parts, list(_homes(optimizer)), ranks)


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether an earlier stage has the parameter too; the attribute is DeepSpeed's, whose norms leave such
    out."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def _once(named: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    yielded: set[int] = set()
    for name, parameter in named.items():
        if id(parameter) not in yielded:
            yielded.add(id(parameter))
            yield name, parameter


def _share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of `size` elements that one of `ranks` equal copies writes."""
    return size * rank // ranks, size * (rank + 1) // ranks


def _base(optimizer: Any) -> BaseOptimizer:
    """Return the optimizer that DeepSpeed drives."""
    base = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(base, BaseOptimizer):
        raise CheckpointError(f"Checkpoints of the optimizer {type(base).__name__} are not supported.")
    return base


def _reader(optimizer: Any, shard: StateShard, kind: StateKind) -> Callable[[], Tensor] | None:
    """Return what reads the value or a moment of a part, (size,) float32, in memory or on disk; None where
    there is no such moment yet."""
    if is_swapped(optimizer, shard.home):
        mapped = memory_map(optimizer, shard.home, kind)
        return None if mapped is None else functools.partial(shard.of, mapped)
    if kind == "value":
        return functools.partial(shard.of, shard.home)
    return _base(optimizer).reader(shard, kind)


def _locator(optimizer: Any) -> tuple[Locate, bool]:
    """Return a function that finds a parameter's state, and whether all ranks of a stage have the same."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return lambda parameter: _shard_zero3(optimizer, parameter), False
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        return lambda parameter: _shard_zero12(optimizer, parameter), False
    copies: dict[nn.Parameter, Tensor] = {}
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        copies = dict(zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True))
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError(f"Checkpoints of DeepSpeed's {type(optimizer).__name__} are not supported.")
    return lambda p: StateShard(0, p.numel(), copies.get(p, p), 0, p.shape), True


def _shard_zero12(optimizer: Any, parameter: nn.Parameter) -> StateShard | None:
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # set by deepspeed's link_hp_params
    if mapping is None:
        return None
    here, home = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
    return StateShard(here.start, here.numel, flat, home.start, parameter.shape)


def _shard_zero3(optimizer: Any, parameter: Any) -> StateShard:
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]  # size with padding
    start = size * parameter.ds_zero_partition_rank
    home = optimizer.fp32_partitioned_groups_flat[group]
    size = max(min(size, parameter.ds_numel - start), 0)
    return StateShard(start, size, home, offset, parameter.ds_shape)


def _homes(optimizer: Any) -> Iterable[Tensor]:
    """Return all keys of the base optimizer's state on this rank, including those with nothing but
    padding."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return optimizer.fp32_partitioned_groups_flat
    return (home for group in _base(optimizer).param_groups for home in group["params"])


def empty_state(engine: Any, applied_steps: int) -> None:
    """Set the optimizer's state as after `applied_steps`, with moments of zeros; none after 0 steps, nor for
    swapped-out tensors, which take no memory."""
    optimizer, base = engine.optimizer, _base(engine.optimizer)
    base.state.clear()
    discard_moments(optimizer)
    _unlink_moments(optimizer)
    for home in _homes(optimizer) if applied_steps else ():
        if not is_swapped(optimizer, home):
            base.allocate(home, applied_steps)
    base.set_steps(applied_steps)


def _unlink_moments(optimizer: Any) -> None:
    """Remove the links to the moments from each parameter: DeepSpeed's are views
    (mixed_precision_linkage.py:37 set_optim_state_fragment), which would keep the memory of the moments until
    a step has made others."""
    if not hasattr(optimizer, "_hp_optimizer_states_linked"):
        return
    optimizer._hp_optimizer_states_linked = False
    groups = optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups
    for parameter in (parameter for group in groups for parameter in group):
        if parameter._hp_mapping is not None:
            parameter._hp_mapping.optim_fragment = None


def _set_value(name: str, parameter: Any, shard: StateShard | None, read: ReadRange) -> None:
    """Set the fp32 value that this rank stores, and the weights in the type that forward and backward use."""
    if not hasattr(parameter, "ds_tensor"):
        whole = read(name, "value", 0, parameter.numel())
        parameter.data.copy_(whole.view(parameter.shape))
        if shard is not None:
            shard.of(shard.home).copy_(whole.narrow(0, shard.start, shard.size))
        return
    assert shard is not None, "ZeRO 3 gives every rank a part of each parameter"
    part = read(name, "value", shard.start, shard.start + shard.size) if shard.size else torch.empty(0)
    shard.of(shard.home).copy_(part)
    if parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE:  # else `write_parameters` writes it
        parameter.ds_tensor.narrow(0, 0, shard.size).copy_(part)
    if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # small ones are whole on every rank
        parameter.data.copy_(read(name, "value", 0, parameter.ds_numel).view(parameter.ds_shape))
