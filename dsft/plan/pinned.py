"""Page-locked memory of a run that keeps states in its hosts' memory: takes a census, a spec and a layout,
gives bytes; pure. File and line of what DeepSpeed does are those of version 0.19.8.

A GPU copies from and to locked pages without a stop in between, but they can never leave the memory, and the
host has them no more for anything else, so a run may lock at most half of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsft.plan.census import Census
from dsft.plan.cut import Cut
from dsft.plan.layout import Layout
from dsft.plan.memory import weight_bytes
from dsft.plan.units import FP32, GIB
from dsft.spec.schema import Spec

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
    (stage_1_and_2.py:563-573, 940); in fp32 also what accumulates (1825). ZeRO 3: the gradient as it
    accumulates and as the optimizer reads it (stage3.py:795, 1340); weights that are kept there, those that
    are trained whatever pin_memory says (906).
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
    bytes, up to twice as many (ATen/core/CachingHostAllocator.h:303); from 2.13 on it can be told not to.
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
