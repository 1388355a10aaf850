"""Read and write each parameter's fp32 value and moments where DeepSpeed keeps them, without its checkpoints.

Local: no collective, whatever the ZeRO stage. Only state.py knows the optimizers' insides; file and line of
what DeepSpeed does are those of version 0.19.8.

    ZeRO 0, fp32       the optimizer's own state, by parameter; equal on all ranks of a stage
    ZeRO 0, bf16       fp32 copies beside the parameters, by parameter or flat; equal on all ranks of a stage
    ZeRO 1, 2          a flat fp32 partition per parameter group; `param._hp_mapping` says which part is here
    ZeRO 3             a flat fp32 partition per sub-group, of which each parameter has an equal, padded part;
                       offloaded to NVMe, sub-groups of 1 MiB and more are files (nvme.py)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dsft.engine.adamw_8bit import KINDS, AdamW8bit, Part
from dsft.engine.api import Fragment, Kind, ReadRange
from dsft.engine.muon import Muon, split_over
from dsft.engine.nvme import discard_moments, is_swapped, memory_map, swapped_in, write_parameters
from dsft.engine.partition import drop_copies, full_shape
from dsft.errors import CheckpointError


@dataclass(frozen=True)
class StateShard:
    """The part of one parameter whose fp32 value and moments are on this rank.

    start   index of its first element in the flattened parameter
    size    its number of elements
    home    the fp32 tensor that has the value and is the key of `optimizer.state`; may have others too
    offset  index of its first element in the flattened `home`
    """

    start: int
    size: int
    home: Tensor
    offset: int

    def part(self, start: int, stop: int) -> StateShard:
        """Return the elements [start, stop), counted in the flattened parameter and limited to this part."""
        start, stop = max(start, self.start), min(stop, self.start + self.size)
        return StateShard(start, max(stop - start, 0), self.home, self.offset + start - self.start)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view (size,) of this part in `tensor`, which is shaped like `home`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)


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
        kinds: tuple[Kind, ...] = ("value", *_moments(engine.optimizer, shard.home))
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
    _empty_state(optimizer, applied_steps)
    homes = [home for home in _homes(optimizer) if is_swapped(optimizer, home)]
    swapped: dict[int, list[tuple[str, nn.Parameter, StateShard]]] = {id(home): [] for home in homes}

    def load_one(name: str, parameter: nn.Parameter, shard: StateShard | None) -> None:
        _set_value(name, parameter, shard, read)
        if shard is not None and shard.size:
            for kind in _moments(optimizer, shard.home) if applied_steps else ():
                values = read(name, kind, shard.start, shard.start + shard.size)
                if isinstance(base, AdamW8bit):
                    moments = base.moments(shard.home, shard.offset)
                    assert moments is not None
                    moments.write(KINDS.index(kind), values)
                else:
                    shard.of(base.state[shard.home][kind]).copy_(values)

    for name, parameter in _once(named):
        shard = locate(parameter)
        if shard is not None and id(shard.home) in swapped:
            swapped[id(shard.home)].append((name, parameter, shard))
        else:
            load_one(name, parameter, shard)
    for home in homes:
        with swapped_in(optimizer, home):
            _fresh_state(optimizer, home, applied_steps)
            for entry in swapped[id(home)]:
                load_one(*entry)
    write_parameters(optimizer)
    drop_copies(named.values())


def undo_first_step(engine: Any) -> None:
    """Undo the step that the optimizers of ZeRO 0 in bf16 take, with zero gradients, when they are built
    (unfused_optimizer.py:412 initialize_optimizer_states, fused_optimizer.py:125
    initialize_optimizer_states): it counts in Adam's bias correction and decays weights. Other optimizers are
    left as they are. Called once after `deepspeed.initialize`."""
    if isinstance(engine.optimizer, (FP16_UnfusedOptimizer, FP16_Optimizer)):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def set_parts(engine: Any, named: Mapping[str, nn.Parameter]) -> None:
    """Set the parts of parameters in the tensors of adamw_8bit and muon; others need none. Called once after
    `deepspeed.initialize`. A collective of the data-parallel ranks."""
    base, (locate, is_replicated) = _base(engine.optimizer), _locator(engine.optimizer)
    if isinstance(base, Muon):
        base.ranks = None if is_replicated else engine.optimizer.dp_process_group
        homes = list(_homes(engine.optimizer))
        numbers = {id(home): number for number, home in enumerate(homes)}
        mine = {}
        for name, parameter in named.items():
            shard = locate(parameter) if name in base.names else None
            if shard is not None and shard.size:
                place = numbers[id(shard.home)], shard.offset, shard.size
                mine[name] = (full_shape(parameter), *place)
        base.matrices = split_over(mine, homes, base.ranks)
    if isinstance(base, AdamW8bit):
        parts: dict[Tensor, list[Part]] = {}
        for _, parameter in _once(named):
            shard = locate(parameter)
            if shard is not None and shard.size:
                numel = math.prod(full_shape(parameter))
                part = Part(shard.start, shard.offset, shard.size, numel)
                parts.setdefault(shard.home, []).append(part)
        base.parts = parts


def allocate_moments(engine: Any) -> None:
    """Allocate the moments, as zeros after one step, except those swapped to a disk, which take no memory.
    Undone by `reset_state`."""
    _empty_state(engine.optimizer, 1)


def reset_state(engine: Any) -> None:
    """Remove the moments and the step count, as before a first step; for steps that have changed no
    weight."""
    _empty_state(engine.optimizer, 0)


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


def _base(optimizer: Any) -> Any:
    """Return the torch optimizer inside DeepSpeed's."""
    return getattr(optimizer, "optimizer", optimizer)


def _reader(optimizer: Any, shard: StateShard, kind: Kind) -> Callable[[], Tensor] | None:
    """Return what reads the value or a moment of a part, (size,) float32; None where there is no such moment
    yet."""
    base = _base(optimizer)
    if isinstance(base, AdamW8bit) and kind != "value":
        moments = base.moments(shard.home, shard.offset)
        if moments is None:
            return None
        first = shard.offset - moments.part.offset
        return lambda: moments.read(KINDS.index(kind))[first : first + shard.size]
    tensor = _tensor(optimizer, shard.home, kind)
    return None if tensor is None else functools.partial(shard.of, tensor)


def _tensor(optimizer: Any, home: Tensor, kind: Kind) -> Tensor | None:
    """Return all of `home`, or a moment of it, in memory or on disk; None where there is no such moment
    yet."""
    if is_swapped(optimizer, home):
        return memory_map(optimizer, home, kind)
    if kind == "value":
        return home
    moment: Tensor | None = _base(optimizer).state.get(home, {}).get(kind)
    return moment


def _moments(optimizer: Any, home: Tensor | None = None) -> tuple[Kind, ...]:
    """Return the moments of the optimizer, or those that it has of one of its tensors."""
    base = _base(optimizer)
    if isinstance(base, Muon) and home in base.matrices:
        return ("momentum_buffer",)
    if "betas" in base.defaults:
        return ("exp_avg", "exp_avg_sq")
    if "momentum" in base.defaults:
        return ("momentum_buffer",) if any(group["momentum"] for group in base.param_groups) else ()
    raise CheckpointError(
        f"Checkpoints of the optimizer {type(base).__name__} are not supported; use "
        "adamw, adamw_8bit, muon or sgd."
    )


def _locator(optimizer: Any) -> tuple[Locate, bool]:
    """Return a function that finds a parameter's state, and whether all ranks of a stage have the same."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return lambda parameter: _shard_zero3(optimizer, parameter), False
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        return lambda parameter: _shard_zero12(optimizer, parameter), False
    if isinstance(optimizer, (FP16_UnfusedOptimizer, FP16_Optimizer)):
        return _replicated_shards(optimizer).__getitem__, True
    if isinstance(optimizer, torch.optim.Optimizer):
        return lambda parameter: StateShard(0, parameter.numel(), parameter, 0), True
    raise CheckpointError(f"Checkpoints of DeepSpeed's {type(optimizer).__name__} are not supported.")


def _shard_zero12(optimizer: Any, parameter: nn.Parameter) -> StateShard | None:
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # set by deepspeed's link_hp_params
    if mapping is None:
        return None
    here, home = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
    return StateShard(here.start, here.numel, flat, home.start)


def _shard_zero3(optimizer: Any, parameter: Any) -> StateShard:
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]  # size with padding
    start = size * parameter.ds_zero_partition_rank
    home = optimizer.fp32_partitioned_groups_flat[group]
    return StateShard(start, max(min(size, parameter.ds_numel - start), 0), home, offset)


def _replicated_shards(optimizer: Any) -> dict[nn.Parameter, StateShard]:
    """Return the parts at ZeRO 0 in bf16: one fp32 tensor per parameter (unfused) or per group (DeepSpeed's
    FusedAdam)."""
    found: dict[nn.Parameter, StateShard] = {}
    for index, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for position, parameter in enumerate(group):
            if isinstance(optimizer, FP16_UnfusedOptimizer):
                home, offset = optimizer.fp32_groups[index][position], 0
            else:
                home = optimizer.fp32_groups_flat[index]
            found[parameter] = StateShard(0, parameter.numel(), home, offset)
            offset += parameter.numel()
    return found


def _homes(optimizer: Any) -> Iterable[Tensor]:
    """Return all keys of the base optimizer's state on this rank, including those with nothing but
    padding."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return optimizer.fp32_partitioned_groups_flat
    return (home for group in _base(optimizer).param_groups for home in group["params"])


def _empty_state(optimizer: Any, applied_steps: int) -> None:
    """Set the base optimizer's state as after `applied_steps`, with moments of zeros; none after 0 steps, nor
    for swapped-out tensors."""
    base = _base(optimizer)
    base.state.clear()
    discard_moments(optimizer)
    _unlink_moments(optimizer)
    for home in _homes(optimizer):
        if not is_swapped(optimizer, home):
            _fresh_state(optimizer, home, applied_steps)
    if applied_steps and isinstance(base, DeepSpeedCPUAdam):
        _replay_powers(base, applied_steps)


def _fresh_state(optimizer: Any, home: Tensor, applied_steps: int) -> None:
    """Set the state of one tensor of the optimizer, which is in memory."""
    base, kinds = _base(optimizer), _moments(optimizer, home)
    if not applied_steps:
        return
    if isinstance(base, AdamW8bit):
        base.allocate(home, applied_steps)
        return
    base.state[home] = {kind: torch.zeros_like(home, requires_grad=False) for kind in kinds}
    if "exp_avg" in kinds:
        base.state[home]["step"] = _step_count(base, home, applied_steps)


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


def _step_count(base: Any, home: Tensor, applied_steps: int) -> int | Tensor:
    if "fused" not in base.defaults:
        return applied_steps  # DeepSpeed's FusedAdam and DeepSpeedCPUAdam count in integers
    on_device = any(
        base.defaults.get(key) for key in ("fused", "capturable")
    )  # torch/optim/adam.py, _init_group
    return torch.tensor(float(applied_steps), dtype=torch.float32, device=home.device if on_device else "cpu")


def _replay_powers(base: DeepSpeedCPUAdam, applied_steps: int) -> None:
    """Advance DeepSpeedCPUAdam's powers step by step, on an element that is thrown away. Its C++ side
    multiplies β₁ᵗ and β₂ᵗ step by step, and takes pow() after a jump (cpu_adam.h, IncrementStep), which
    differs in the last bits."""
    scrap = [torch.zeros(1) for _ in range(4)]
    group = base.param_groups[0]
    beta1, beta2 = group["betas"]
    for step in range(1, applied_steps + 1):
        base.ds_opt_adam.adam_update(
            base.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *scrap
        )


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
    if (
        parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE
    ):  # else `write_parameters` writes its file
        parameter.ds_tensor.narrow(0, 0, shard.size).copy_(part)
    if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # small ones are whole on every rank
        parameter.data.copy_(read(name, "value", 0, parameter.ds_numel).view(parameter.ds_shape))
