"""Compute what offload to CPU and NVMe takes: bytes on the disk, pinned memory, and the keys of the DeepSpeed
JSON.

A GPU copies from and to pinned memory without interruption, but pinned pages cannot be swapped out or used
for anything else, so a run may pin at most half of a host's memory.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.plan.census import Census, Parameter
from dsft.plan.cut import Cut
from dsft.plan.memory.sizes import GIB, compute_bytes, moment_bytes
from dsft.plan.storage import FP32
from dsft.spec.layout import Layout
from dsft.spec.patterns import is_orthogonalized
from dsft.spec.schema import Spec

SUB_GROUP = 100_000_000
"""Elements that ZeRO 3 updates at a time. Limits the fp32 gradients in memory at once to 400 MB."""

STATE_BUFFERS = 4
"""Swap buffers of the optimizer: value, two moments and gradient of one sub-group."""

PARAMETER_BUFFERS = 5
"""Swap buffers for parameters; each is in use from reading a parameter until its release after use. Modules
of the supported architectures have at most three large parameters."""

PARAMETER_BUFFER = 100_000_000
"""Elements of such a buffer if the model is not known."""

AIO_ROWS: Mapping[str, tuple[Any, str]] = {
    "block_size": (1_048_576, "bytes of a request; also the least that is swapped"),
    "queue_depth": (8, "requests at a time"),
    "intra_op_parallelism": (1, "threads per read or write"),
    "single_submit": (False, "requests are submitted together"),
    "overlap_events": (True, "waits for requests while others are submitted"),
    "use_gds": (False, "through the host's memory: dsft does not use GPUDirect Storage"),
}


def swap_keys(spec: Spec) -> list[str]:
    """Return the offload keys of the spec whose device is nvme."""
    keys = ("offload_optimizer", "offload_parameters")
    return [key for key in keys if getattr(spec.parallel, key).device == "nvme"]


def aio_rows(spec: Spec) -> Iterator[tuple[str, Any, str]]:
    """Yield the keys of section aio. Other values come from the user's own JSON (docs/offload.md)."""
    if swap_keys(spec):
        for key, (value, reason) in AIO_ROWS.items():
            yield f"aio.{key}", value, reason


def optimizer_rows() -> Iterator[tuple[str, Any, str]]:
    """Yield the NVMe keys of offload_optimizer, without the section's name."""
    reason = "value, two moments and gradient of the sub-group that is being updated"
    yield "buffer_count", STATE_BUFFERS, reason
    yield "pipeline_read", False, "a sub-group is read when it is updated, so one set of buffers is enough"
    reason = "it is written before the next is read, so the files are complete after a step"
    yield "pipeline_write", False, reason


def parameter_rows(largest: int | None) -> Iterator[tuple[str, Any, str]]:
    """Yield the NVMe keys of offload_param, without the section's name. largest: elements of the largest
    parameter's shard, None if not known."""
    yield "buffer_count", PARAMETER_BUFFERS, "parameters that are in host memory at a time"
    known = ": the largest parameter's shard" if largest else "; a run uses the size of the largest shard"
    yield "buffer_size", largest or PARAMETER_BUFFER, f"elements of a buffer{known}"
    yield "max_in_cpu", 0, "elements that stay in host memory, besides tensors below 1 MiB"


@dataclass(frozen=True)
class Swapped:
    """Maximum bytes that one rank swaps; tensors below 1 MiB stay in memory.

    states      on the disk: fp32 values, moments and gradients of the trained parameters
    parameters  on the disk: parameters in the type of forward and backward
    locked      pinned buffers in host memory
    """

    states: int
    parameters: int
    locked: int

    @property
    def on_disk(self) -> int:
        return self.states + self.parameters


def swapped(census: Census, spec: Spec, ranks: int, sub_group: int = SUB_GROUP) -> Swapped:
    """Return what each of the `ranks` ranks among which the model is sharded swaps to its disk. sub_group:
    elements updated at a time."""
    keys, moments, weight = swap_keys(spec), moment_bytes(spec), compute_bytes(spec)
    trained = [parameter.numel for parameter in census.parameters if parameter.trained]
    share = sum(-(-numel // ranks) for numel in trained)
    updated = min(share, sub_group + -(-max(trained, default=0) // ranks))
    states = locked = parameters = 0
    if "offload_optimizer" in keys:
        states = share * (FP32 + moments + FP32)
        locked += STATE_BUFFERS * updated * FP32
    if "offload_parameters" in keys:
        parameters = _shards(census.parameters, spec, ranks)
        # whole sizes, not parts (stage3.py:1015 max_partition_numel)
        whole = min(sum(trained), updated * ranks)
        locked += (PARAMETER_BUFFERS * largest_part(census, ranks) + whole) * weight
    return Swapped(states, parameters, locked)


def updated_at_once(parameters: Iterable[Parameter], spec: Spec, ranks: int) -> int:
    """Return the most trained elements that a rank of ZeRO 3 updates at once: those of whole parameters, and
    so more than SUB_GROUP (stage3.py:1226 local_sub_group_size), by muon or not."""
    most, sizes = 0, [0, 0]
    for parameter in parameters:
        if parameter.trained:
            group = is_orthogonalized(parameter.name, parameter.shape, spec.optim)
            sizes[group] += -(-parameter.numel // ranks)
            most = max(most, sizes[group])
            sizes[group] *= sizes[group] < SUB_GROUP
    return most


def _shards(parameters: Iterable[Parameter], spec: Spec, ranks: int) -> int:
    """Return the bytes of one rank's shares of the parameters."""
    stored = (tensor for parameter in parameters for tensor in parameter.stored(spec.train.precision))
    return sum(tensor.shard(ranks).bytes for tensor in stored)


def largest_part(census: Census, ranks: int) -> int:
    """Return the number of elements of the largest parameter's shard on one rank."""
    return max(-(-parameter.numel // ranks) for parameter in census.parameters)


SHARE = 0.5
"""Share of a host's memory that all of its ranks together may pin."""

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Environment variable that configures torch's allocators, from torch 2.9 on. The older name
PYTORCH_CUDA_ALLOC_CONF has precedence if both are set (c10/cuda/CUDAAllocatorConfig.h)."""
OLDER = "PYTORCH_CUDA_ALLOC_CONF"


def locked_bytes(census: Census, spec: Spec, layout: Layout, stage: int, cut: Cut) -> int:
    """Return the bytes that one rank of a stage pins if pin_memory is true in every section with device cpu.

    ZeRO 1 and 2: fp32 weights, their gradient, and the updated weights on their way back
    (stage_1_and_2.py:565 pin_memory, stage_1_and_2.py:940 pin_memory, stage_1_and_2.py:572 temp_pinned); in
    fp32 also the accumulated gradients (stage_1_and_2.py:1825 pin_memory). ZeRO 3: the gradient as it
    accumulates (stage3.py:795 pin_memory) and as the optimizer reads it (stage3.py:1340 pin_memory);
    offloaded weights, of which DeepSpeed pins the trained ones even if pin_memory is false (stage3.py:906
    pin_memory).
    """
    ranks, zero, weight = layout.shards, spec.parallel.zero_stage, compute_bytes(spec)
    own = census.stage(stage, cut)
    share = -(-sum(p.numel for p in own if p.trained) // ranks)
    total = 0
    if spec.parallel.offload_optimizer.device == "cpu":
        accumulated = FP32 if zero < 3 and weight == FP32 else 0
        total += share * (2 * FP32 + (weight if zero < 3 else 0) + accumulated)
    if spec.parallel.offload_parameters.device == "cpu":
        total += _shards(own, spec, ranks)
    return total


def allocator(spec: Spec, environ: Mapping[str, str], torch_version: str) -> dict[str, str]:
    """Return the environment variables for torch's allocators, to set before a rank imports torch. Empty if
    the user has set them or torch is a build for a device other than CUDA.

    expandable_segments: GPU memory is taken in pages by which a segment grows, so that micro-batches of other
    lengths reuse what earlier ones have freed (docs/performance.md); not under WSL2, where some drivers
    refuse them at the first allocation (pytorch/pytorch#192330). pinned_max_round_threshold_mb, if the run
    offloads: large tensors are pinned at their own size. Otherwise torch rounds up to the next power of two
    of bytes, up to twice the size (torch, ATen/core/CachingHostAllocator.h); the option exists from torch
    2.13 on. pinned_max_cached_size_mb: what is not rounded is not cached either, since torch's cache looks
    for a block by the power of two alone (get_free_block there) and would return one that is too small.
    """
    version, _, build = torch_version.partition("+")
    if {ALLOCATOR, OLDER} & environ.keys() or build.startswith(("cpu", "rocm", "xpu")):
        return {}
    is_wsl = "microsoft" in platform.release().lower()
    options, parallel = [] if is_wsl else ["expandable_segments:True"], spec.parallel
    devices = {parallel.offload_optimizer.device, parallel.offload_parameters.device}
    offloads = devices != {"none"} or spec.model.activation_offload
    major, minor = (int(part) for part in version.split(".")[:2])
    if offloads and (major, minor) >= (2, 13):
        options += ["pinned_max_round_threshold_mb:64", "pinned_max_cached_size_mb:64"]
    return {ALLOCATOR: ",".join(options)} if options else {}


def may_pin(ranks: Sequence[tuple[str, int, int]]) -> tuple[bool, str]:
    """Return whether no host would pin more than SHARE of its memory, and a clause with the figures. ranks:
    for each rank its host, the bytes that it would pin, and the host's memory in bytes."""
    pinned: dict[str, int] = {}
    memory: dict[str, int] = {}
    for host, mine, whole in ranks:
        pinned[host] = pinned.get(host, 0) + mine
        memory[host] = min(whole, memory.get(host, whole))
    fullest = max(pinned, key=lambda host: pinned[host] / memory[host])
    found = f"{pinned[fullest] / GIB:.1f} GiB of {fullest}'s {memory[fullest] / GIB:.1f} GiB"
    if pinned[fullest] <= memory[fullest] * SHARE:
        return True, f"which pins {found}"
    return False, f"since it would pin {found}, more than half; pin_memory: true in the spec overrides this"
