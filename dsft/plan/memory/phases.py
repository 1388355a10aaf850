"""Which tensors a rank keeps at once, in each phase of a run that can have the peak of memory. Takes a rank's
part of the model and how it is trained, gives bytes; pure arithmetic.

What is there in which phase is read off DeepSpeed's sources, file, line and symbol beside it
(scripts/citations), and compared with measured peaks by benchmarks/memory.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dsft.plan.ds_config import LIVE, PERSIST_BELOW
from dsft.plan.memory.offload import SUB_GROUP
from dsft.plan.memory.sizes import FP32

MALLOC_KEEPS = 32 << 20
"""Bytes. glibc takes larger blocks from the kernel and gives them back at once; smaller ones come from its
heap and stay with the process when they are freed (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX)."""

ROUNDED = 64 << 20  # bytes of a page-locked tensor, up to which torch rounds them
REDUCED_AT_ONCE = 500_000_000
"""Elements that ZeRO 0 and BF16_Optimizer reduce in one piece (engine.py:3073 allreduce_gradients)."""


@dataclass(frozen=True)
class Tensors:
    """Bytes in blocks of at most MALLOC_KEEPS, and in larger ones."""

    small: int = 0
    large: int = 0

    def __add__(self, other: Tensors) -> Tensors:
        return Tensors(self.small + other.small, self.large + other.large)

    @property
    def total(self) -> int:
        return self.small + self.large


NONE = Tensors()


def one(size: int) -> Tensors:
    """One tensor of so many bytes."""
    return Tensors(size, 0) if size <= MALLOC_KEEPS else Tensors(0, size)


def each(elements: Iterable[int], width: int) -> Tensors:
    """A tensor for each number of elements, of `width` bytes each."""
    return sum((one(numel * width) for numel in elements), NONE)


Row = Literal["parameters", "gradients", "master", "moments", "buffers", "activations", "head", "offloaded"]
Phase = Mapping[Row, Tensors]
"""What is on the device, and in `offloaded` what is in the memory of its host."""


def merged(*phases: Phase) -> dict[Row, Tensors]:
    """All of them at once."""
    found: dict[Row, Tensors] = {}
    for phase in phases:
        for row, tensors in phase.items():
            found[row] = found.get(row, NONE) + tensors
    return found


def total(phase: Phase) -> int:
    return sum(tensors.total for tensors in phase.values())


@dataclass(frozen=True)
class Part:
    """trained, frozen: elements of each parameter of this rank's stage; ranks: data-parallel ones;
    weight, reduced, moment, gradient: bytes of an element of the weights, of what is summed over the
    ranks, of the optimizer's states, and of the gradients that ZeRO 3 keeps; bucket, gathered: elements
    of the reduction's and the gathering's buckets; optimizer, parameters: where they are kept; groups: of
    the optimizer; accumulates: steps have several micro-batches; pinned: what is offloaded is page-
    locked; locked: bytes of the buffers through which a rank swaps; forward,
    backward: activations and head at the peak of each."""

    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    zero: int
    ranks: int
    weight: int
    reduced: int
    moment: int
    bucket: int
    gathered: int
    optimizer: str
    parameters: str
    groups: int
    accumulates: bool
    pipeline: bool
    on_cpu: bool
    is_bf16: bool
    pinned: bool
    locked: int
    forward: Phase = field(default_factory=dict)
    backward: Phase = field(default_factory=dict)
    gradient: int = FP32

    @property
    def elements(self) -> int:
        return sum(self.trained)

    @property
    def share(self) -> int:
        """Of what is trained; at ZeRO 3 each parameter is cut by itself."""
        if self.zero == 3:
            return sum(self.shares(self.trained))
        return -(-self.elements // self.ranks)

    @property
    def largest(self) -> int:
        return max(self.trained, default=0)

    @property
    def is_offloaded(self) -> bool:
        return self.optimizer != "none"

    def shares(self, elements: Iterable[int]) -> list[int]:
        return [-(-numel // self.ranks) for numel in elements]

    def in_host(self, elements: int, width: int) -> Tensors:
        """Page-locked memory comes in powers of two (torch, CachingHostAllocator.h), where a run does not
        tell torch otherwise (`dsft.plan.memory.offload.allocator`)."""
        size = elements * width
        is_rounded = self.pinned and 0 < size <= ROUNDED
        return one(1 << (size - 1).bit_length() if is_rounded else size)

    def gathering(self, elements: int) -> Tensors:
        """gloo collects what it gathers in a copy of its own (ProcessGroupGloo, all_gather_into_tensor)."""
        return one(elements * self.weight) if self.on_cpu and self.ranks > 1 else NONE


def phases(part: Part) -> dict[str, Phase]:
    """By name: between (steps), load and its flattening, backward and what follows it. Without anything to
    train, between, load, and ZeRO 3's forward."""
    if not part.trained:
        kept: Phase = {"parameters": weights(part)}
        return {"between": kept, "load": kept} | (
            {"forward": merged(kept, {"buffers": gathered(part)})} if part.zero == 3 else {}
        )
    if part.zero == 0:
        return _whole(part)
    if part.zero == 3:
        return _sharded(part)
    if part.zero == 1 and part.is_bf16 and not part.is_offloaded:
        return _bf16(part)
    return _partitioned(part)


def weights(part: Part) -> Tensors:
    """As they are kept between their uses."""
    if part.zero < 3:
        flat = each(part.trained, part.weight) if part.zero == 0 else one(part.elements * part.weight)
        return flat + each(part.frozen, part.weight)
    small = [numel for numel in part.trained + part.frozen if numel <= PERSIST_BELOW]
    return _shares(part) + each(small, part.weight)


def _shares(part: Part) -> Tensors:
    """At ZeRO 3; those of what is trained in one piece (stage3.py:972 defragment)."""
    return one(part.share * part.weight) + each(part.shares(part.frozen), part.weight)


def _whole(part: Part) -> dict[str, Phase]:
    """ZeRO 0. In fp32 the plain optimizer over the module's own parameters; else FP16_UnfusedOptimizer, which
    steps once, with gradients of zeros, while it is made (unfused_optimizer.py:412
    initialize_optimizer_states)."""
    low = part.weight < FP32
    gradients = each(part.trained, part.weight)
    copies = each(part.trained, FP32) if low else NONE
    kept: Phase = {
        "parameters": weights(part),
        "master": copies,
        "moments": each(part.trained, part.moment),
    }
    left = gradients if part.accumulates else NONE  # else each comes as activations go
    flat = min(part.elements, REDUCED_AT_ONCE)  # engine.py:3796 flatten; and again as it travels
    travels = one(flat * part.weight) + (one(flat * part.reduced) if part.reduced != part.weight else NONE)
    load: Phase = merged(kept, {"gradients": gradients + copies}) if low else {"parameters": weights(part)}
    return {
        "between": kept,
        "load": load,
        "forward": merged(kept, {"gradients": left}, part.forward),
        "backward": merged(kept, {"gradients": left}, part.backward),
        "reduction": merged(kept, {"gradients": gradients, "buffers": travels}),
        "update": merged(kept, {"gradients": gradients + copies}),
    }


def _bf16(part: Part) -> dict[str, Phase]:
    """ZeRO 1 in bf16: BF16_Optimizer, whose fp32 gradients are whole on every rank (bf16_optimizer.py:191
    fp32_flat_buffer);
    those of the weights' own type stay beside them, as zeros (clear_lp_grads)."""
    whole = one(part.elements * FP32)
    made: Phase = {"parameters": weights(part), "master": one(part.share * FP32), "gradients": whole}
    low: Phase = {"gradients": each(part.trained, part.weight)}
    between = merged(made, {"moments": one(part.share * part.moment)})
    kept = merged(between, low)
    left = kept if part.accumulates else between  # else each comes as activations go
    # several groups are flattened together, one is reduced where it is (engine.py:3796 flatten)
    joined = part.groups > 1 and part.elements <= REDUCED_AT_ONCE
    return {
        "between": between,
        "load": made,
        "flattening": _copied(part),
        "forward": merged(left, part.forward),
        "backward": merged(left, part.backward),
        "widening": merged(kept, {"buffers": one(part.largest * FP32)}),  # bf16_optimizer.py:523 hp_grad
        "reduction": merged(kept, {"buffers": whole if joined else NONE}),
        "update": merged(kept, {"buffers": part.gathering(part.elements)}),
    }


def _partitioned(part: Part) -> dict[str, Phase]:
    """DeepSpeedZeroOptimizer: ZeRO 2, and ZeRO 1 in fp32, fp16 or with offload. Where weights are narrower
    than fp32, gradients add up in one fp32 piece of the rank's share (stage_1_and_2.py:1259
    _use_compact_grad_partition_buffer); else in pieces,
    of which the next micro-batch makes others before they are added."""
    low = part.weight < FP32
    share = one(part.share * FP32)
    width = FP32 if part.zero == 1 else part.weight  # stage_1_and_2.py:1253 _gradient_reduction_buffer_dtype
    states: Phase = {"master": share, "moments": one(part.share * part.moment)}
    kept: Phase = merged({"parameters": weights(part)}, states)
    made: Phase = {"parameters": weights(part), "master": share}
    if part.is_offloaded:
        kept = {"parameters": weights(part), "offloaded": _in_host(part)}
        made = kept
    whole = each(part.trained, width) if part.zero == 1 and part.accumulates else NONE
    added = share if low else NONE if part.is_offloaded else share
    again = share if not low and part.zero == 2 and part.accumulates and not part.is_offloaded else NONE
    backward: Phase = {
        "gradients": whole + added + again + _arriving(part),
        "buffers": _buckets(part, width),
    }
    update: Phase = {"gradients": added + (NONE if low or part.is_offloaded else share)}
    # zeros (stage_1_and_2.py:937 single_grad_partition)
    first: Phase = {} if part.is_offloaded else {"gradients": share}
    return {
        "between": kept,
        "load": merged(made, first),
        "flattening": _copied(part),
        "forward": merged(kept, {"gradients": whole + added if part.accumulates else NONE}, part.forward),
        "backward": merged(kept, backward, part.backward),
        "update": merged(kept, update),
        "gathering": merged(kept, {"buffers": part.gathering(part.elements)}),
    }


def _copied(part: Part) -> Phase:
    """The weights and their flat copy, before anything else is made (stage_1_and_2.py:505
    flatten_dense_tensors_aligned, bf16_optimizer.py:167 _flatten_dense_tensors_aligned)."""
    return {"parameters": weights(part) + each(part.trained, part.weight)}


def _arriving(part: Part) -> Tensors:
    """The gradient of one parameter, before it is in a bucket; with offload one that is larger than the
    bucket is copied (stage_1_and_2.py:1446 grad_reduc)."""
    arriving = one(part.largest * part.weight)
    return arriving + arriving if part.is_offloaded and part.zero < 3 else arriving


def _in_host(part: Part) -> Tensors:
    """At ZeRO 1 and 2: fp32 weights, moments and gradients, the updated weights on their way back, one
    gradient on its way, and in fp32 those that add up, by parameter (stage_1_and_2.py:560
    weights_partition, stage_1_and_2.py:567 temp_buffer_bit16, stage_1_and_2.py:653
    temp_grad_buffer_for_cpu_offload, stage_1_and_2.py:1809 async_accumulate_grad_in_cpu_via_gpu)."""
    share, adding = part.share, part.accumulates and part.weight == FP32
    flat = part.in_host(share, FP32) + part.in_host(share, FP32) + part.in_host(share, part.weight)
    pieces = [part.in_host(numel, FP32) for numel in part.shares(part.trained)] if adding else []
    return sum(pieces, flat + one(share * part.moment) + part.in_host(part.largest, part.weight))


def _buckets(part: Part, width: int) -> Tensors:
    """Two, where reduction runs beside the backward; what is reduced is flattened, and once more in the type
    that travels (stage_1_and_2.py:2359 allreduce_bucket); a larger parameter is reduced by itself. With
    offload a gradient passes through a buffer of the largest one's size."""
    bucket = min(part.bucket, part.elements)
    flat = max(bucket, part.largest)
    found = one(bucket * width) + (NONE if part.pipeline else one(bucket * width)) + one(flat * width)
    if part.reduced != width:
        found += one(flat * part.reduced)
    return found + (one(part.largest * part.weight) if part.is_offloaded else NONE)


def _sharded(part: Part) -> dict[str, Phase]:
    """ZeRO 3. In fp32 there are masters too (stage3.py:1163 device is compared with its name, which are
    never equal); one bucket (stage3.py:782 reduce_bucket_size) and the gradients' buffer (stage3.py:791
    grad_partitions_flat_buffer) stay."""
    share, sub_group = part.share, min(part.share, SUB_GROUP)
    states: Phase = {
        "master": one(share * FP32),
        "moments": one(share * part.moment),
        "gradients": one(share * part.gradient),
    }
    if part.is_offloaded:
        states = {"offloaded": _sharded_in_host(part)}
    bucket = one(part.bucket * part.reduced)
    kept = merged({"parameters": weights(part), "buffers": bucket, "offloaded": one(part.locked)}, states)
    if part.parameters != "none":
        flat = part.in_host(part.share, part.weight)
        on_host = flat + each(part.shares(part.frozen), part.weight) if part.parameters == "cpu" else NONE
        resident = [numel for numel in part.trained + part.frozen if numel <= PERSIST_BELOW]
        kept = merged(kept, {"offloaded": on_host}) | {"parameters": each(resident, part.weight)}
    reduced = max(min(part.bucket, part.elements), part.largest)
    reducing = one(reduced * part.reduced)  # in the order of the ranks (coalesced_collectives.py:122 cat)
    if part.on_cpu:
        reducing += reducing  # gloo's reduce_scatter works in a copy
    widened = FP32 if part.gradient == FP32 else FP32 + part.gradient  # flattened first
    step = NONE if part.is_offloaded else one(sub_group * widened)  # stage3.py:2686 flatten
    load: Phase = {row: tensors for row, tensors in kept.items() if row != "moments"}
    if part.on_cpu:
        load = merged(load, {"parameters": each(part.shares(part.trained), part.weight)})
    return {
        "between": kept,
        # stage3.py:1306 gradient_buffer, stage3.py:1172 clone
        "load": merged(load, {"buffers": one(sub_group * FP32)}),
        "flattening": _flattening(part, kept),
        "forward": merged(kept, {"buffers": gathered(part)}, part.forward),
        "backward": merged(
            kept, {"buffers": gathered(part) + reducing, "gradients": _arriving(part)}, part.backward
        ),
        "update": merged(kept, {"gradients": step}),
    }


def _flattening(part: Part, kept: Phase) -> Phase:
    """Beside a GPU: shares that stay on it become one tensor by way of its host's memory (zero/utils.py:221
    cpu_buffer),
    those that stay in the host's memory are copied there from where they were read to (stage3.py:906
    pin_memory)."""
    if part.on_cpu:
        return {}
    shares = each(part.shares(part.trained), part.weight)
    if part.parameters == "none":
        return {"parameters": weights(part), "offloaded": one(shares.total)}
    return {
        "parameters": kept["parameters"],
        "offloaded": (shares + shares) if part.parameters == "cpu" else NONE,
    }


def gathered(part: Part) -> Tensors:
    """At ZeRO 3: what stays whole from its forward to its backward, and the bucket it comes in, of which gloo
    has a copy, beside the shares that go out (partition_parameters.py:1343 flat_tensor). One rank's share is
    the whole, and is used as it is (_no_gather_coalesced)."""
    if part.ranks == 1:
        return NONE
    whole = [numel for numel in part.trained + part.frozen if numel > PERSIST_BELOW]
    ahead = min(part.gathered, sum(whole))
    fits = sum(whole) <= LIVE
    live = each(whole, part.weight) if fits else Tensors(0, LIVE * part.weight)
    return (
        live + one(ahead * part.weight) + part.gathering(ahead) + one(-(-ahead // part.ranks) * part.weight)
    )


def _sharded_in_host(part: Part) -> Tensors:
    """At ZeRO 3: fp32 weights, moments, and gradients twice, as they add up and as the update reads them
    (stage3.py:791 grad_partitions_flat_buffer, stage3.py:1338 subgroup_gradient_buffer). What is swapped to a
    disk leaves the adding gradients."""
    gradients = part.in_host(part.share, FP32)
    if part.optimizer == "nvme":
        return gradients
    return gradients + gradients + one(part.share * FP32) + one(part.share * part.moment)
