"""States and parameters in host memory and on disks (offload to CPU and NVMe): takes a census, a spec and a
layout, gives bytes on the disk, page-locked bytes, and the keys of DeepSpeed's JSON. Pure.

A GPU copies from and to locked pages without a stop in between, but they can never leave the memory, and the
host has them no more for anything else, so a run may lock at most half of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.plan.census import Census
from dsft.plan.cut import Cut
from dsft.plan.layout import Layout
from dsft.plan.memory.sizes import FP32, GIB, moment_bytes, weight_bytes
from dsft.spec.schema import Spec

SUB_GROUP = 100_000_000
"""Elements that ZeRO 3 updates at a time: bounds the fp32 gradients that live at once to 400 MB."""

STATE_BUFFERS = 4
"""A sub-group's value, two moments and gradient are in memory at a time."""

PARAMETER_BUFFERS = 5
"""Parameters read at a time, from their reading until they are released after their use; a module of the
architectures that dsft knows has at most three that are large."""

PARAMETER_BUFFER = 100_000_000
"""Elements of one of them, where the model is not known."""

AIO: Mapping[str, Any] = {
    "block_size": 1_048_576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}

AIO_REASONS = {
    "block_size": "bytes of a request; also the least that is swapped",
    "queue_depth": "requests at a time",
    "intra_op_parallelism": "threads per read or write",
    "single_submit": "requests are handed over together",
    "overlap_events": "some are waited for while others are handed over",
    "use_gds": "through the host's memory: GPUDirect Storage is not offered",
}


def swap_keys(spec: Spec) -> list[str]:
    """The keys of the spec whose device is nvme."""
    return [key for key in KEYS if getattr(spec.parallel, key).device == "nvme"]


KEYS = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
"""Of `parallel`, and what DeepSpeed calls them."""


def aio_rows(spec: Spec) -> Iterator[tuple[str, Any, str]]:
    """Fixed in generated files; a run measures its disks and writes its own into its deepspeed.json."""
    if swap_keys(spec):
        for key, value in AIO.items():
            yield f"aio.{key}", value, f"{AIO_REASONS[key]}; the run measures its disks and takes the fastest"


def optimizer_rows() -> Iterator[tuple[str, Any, str]]:
    """Of offload_optimizer, without the section's name."""
    reason = "value, two moments and gradient of the sub-group that is being updated"
    yield "buffer_count", STATE_BUFFERS, reason
    yield "pipeline_read", False, "a sub-group is read when it is updated: no second set of buffers"
    yield "pipeline_write", False, "it is written before the next is read: the files are whole after a step"


def parameter_rows() -> Iterator[tuple[str, Any, str]]:
    """Of offload_param, without the section's name."""
    yield "buffer_count", PARAMETER_BUFFERS, "parameters that are in host memory at a time"
    reason = "elements of a buffer; the run takes the largest parameter's part"
    yield "buffer_size", PARAMETER_BUFFER, reason
    yield "max_in_cpu", 0, "elements that stay in host memory beside what is below 1 MiB"


@dataclass(frozen=True)
class Swapped:
    """Bytes of one rank, at most: what is below 1 MiB stays in memory.

    states      on the disk: fp32 values, moments and gradients of what is trained
    parameters  on the disk: in the type of forward and backward
    locked      buffers in host memory, locked
    """

    states: int
    parameters: int
    locked: int

    @property
    def on_disk(self) -> int:
        return self.states + self.parameters


def swapped(census: Census, spec: Spec, ranks: int, sub_group: int = SUB_GROUP) -> Swapped:
    """What one of `ranks` ranks that share the model swaps to its disk; sub_group: elements updated at a
    time."""
    keys, moments, weight = swap_keys(spec), moment_bytes(spec), weight_bytes(spec)
    trained = [parameter.numel for parameter in census.parameters if parameter.trained]
    share = sum(-(-numel // ranks) for numel in trained)
    updated = min(share, sub_group + -(-max(trained, default=0) // ranks))
    states = locked = parameters = 0
    if "offload_optimizer" in keys:
        states = share * (FP32 + moments + FP32)
        locked += STATE_BUFFERS * updated * FP32
    if "offload_parameters" in keys:
        parameters = sum(-(-parameter.numel // ranks) for parameter in census.parameters) * weight
        # whole sizes, not parts (stage3.py:1015 max_partition_numel)
        whole = min(sum(trained), updated * ranks)
        locked += (PARAMETER_BUFFERS * largest_part(census, ranks) + whole) * weight
    return Swapped(states, parameters, locked)


def largest_part(census: Census, ranks: int) -> int:
    """Elements of the largest parameter on one rank."""
    return max(-(-parameter.numel // ranks) for parameter in census.parameters)


SHARE = 0.5
"""Of a host's memory, that all of its ranks may lock together."""

SECTIONS = ("offload_optimizer", "offload_param")
"""Of DeepSpeed's zero_optimization."""

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""The variable that torch's allocators read, from 2.9 on. PYTORCH_CUDA_ALLOC_CONF is its older name, which
counts where both are set (c10/cuda/CUDAAllocatorConfig.h)."""
OLDER = "PYTORCH_CUDA_ALLOC_CONF"


def locked_bytes(census: Census, spec: Spec, layout: Layout, stage: int, cut: Cut) -> int:
    """By one rank of a stage, were pin_memory true wherever it is cpu.

    ZeRO 1 and 2: fp32 weights, their gradient, and the updated weights on their way back
    (stage_1_and_2.py:565 pin_memory, stage_1_and_2.py:940 pin_memory, stage_1_and_2.py:572 temp_pinned); in
    fp32 also what accumulates (stage_1_and_2.py:1825 pin_memory). ZeRO 3: the gradient as it accumulates
    (stage3.py:795 pin_memory) and as the optimizer reads it (stage3.py:1340 pin_memory); weights that are
    kept there, those that are trained whatever pin_memory says (stage3.py:906 pin_memory).
    """
    ranks, zero, weight = layout.data_parallel, spec.parallel.zero_stage, weight_bytes(spec)
    own = census.stage(stage, cut)
    share = -(-sum(p.numel for p in own if p.trained) // ranks)
    total = 0
    if spec.parallel.offload_optimizer.device == "cpu":
        accumulated = FP32 if zero < 3 and weight == FP32 else 0
        total += share * (2 * FP32 + (weight if zero < 3 else 0) + accumulated)
    if spec.parallel.offload_parameters.device == "cpu":
        total += sum(-(-p.numel // ranks) for p in own) * weight
    return total


def allocator(spec: Spec, environ: Mapping[str, str], torch_version: str) -> dict[str, str]:
    """What to add to the environment of a rank before torch is imported, unless the user has set it or torch
    is a build for another device than CUDA's.

    expandable_segments: the memory of a GPU is taken in pages that grow with a segment, so that micro-batches
    of other lengths reuse what earlier ones have freed (docs/performance.md). pinned_max_round_threshold_mb,
    where a run offloads: large tensors are page-locked as they are. Else torch locks the next power of two of
    bytes, up to twice as many (torch, ATen/core/CachingHostAllocator.h); from 2.13 on it can be told not to.
    """
    version, _, build = torch_version.partition("+")
    if {ALLOCATOR, OLDER} & environ.keys() or build.startswith(("cpu", "rocm", "xpu")):
        return {}
    options, parallel = ["expandable_segments:True"], spec.parallel
    offloads = {parallel.offload_optimizer.device, parallel.offload_parameters.device} != {"none"}
    major, minor = (int(part) for part in version.split(".")[:2])
    if offloads and (major, minor) >= (2, 13):
        options.append("pinned_max_round_threshold_mb:64")
    return {ALLOCATOR: ",".join(options)}


def has_room(ranks: Sequence[tuple[str, int, int]]) -> tuple[bool, str]:
    """Whether all hosts have room to lock what their ranks would, and the words for it. ranks: of each its
    host, the bytes that it would lock, and the host's memory."""
    locked: dict[str, int] = {}
    memory: dict[str, int] = {}
    for host, mine, whole in ranks:
        locked[host] = locked.get(host, 0) + mine
        memory[host] = min(whole, memory.get(host, whole))
    fullest = max(locked, key=lambda host: locked[host] / memory[host])
    found = f"{locked[fullest] / GIB:.1f} GiB of {fullest}'s {memory[fullest] / GIB:.1f} GiB"
    if locked[fullest] <= memory[fullest] * SHARE:
        return True, f"which locks {found}"
    return False, f"since {found} would be locked, more than half; pin_memory: true in the spec locks them"


def with_pinning(config: Mapping[str, Any], pinned: Mapping[str, bool]) -> dict[str, Any]:
    """`config` with this value of pin_memory in these of its SECTIONS."""
    zero = config["zero_optimization"]
    sections = {key: zero[key] | {"pin_memory": value} for key, value in pinned.items()}
    return {**config, "zero_optimization": {**zero, **sections}}
