"""Count the tensors that one rank has in memory in each phase of a run that can have the peak memory.

The contents of each phase follow DeepSpeed's sources, cited by file, line and symbol (scripts/citations);
benchmarks/memory.py compares the result with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsft.plan.ds_config import PERSIST_BELOW
from dsft.plan.memory.gathering import gathered
from dsft.plan.memory.offload import SUB_GROUP
from dsft.plan.memory.tensors import NONE, Phase, Tensors, each, held, merged, one
from dsft.plan.storage import FP32, MOMENT_BLOCK, MOMENT_LEAST, Stored

ROUNDED = 64 << 20  # torch rounds pinned tensors up to this many bytes to a power of two
REDUCED_AT_ONCE = 500_000_000
"""Elements that ZeRO 0 and BF16_Optimizer reduce in one piece (engine.py:3073 allreduce_gradients)."""


@dataclass(frozen=True)
class RankSetup:
    """The part of a model that one rank trains, and how.

    trained                number of elements of each trained parameter of the rank's stage
    frozen                 the tensors that hold its other parameters
    zero                   ZeRO stage
    ranks                  data-parallel ranks
    weight                 bytes per element of trained weights
    reduced                bytes per element in the reduction over ranks
    moment                 bytes per element of the optimizer states in 32 bits
    in_8_bits              whether they have 8 bits (optim.name: adamw_8bit)
    with_one               trained elements that have one moment of fp32 (optim.name: muon)
    gradient               bytes per element of the gradients that ZeRO 3 keeps
    bucket, gathered       elements of the reduction bucket and of the gathering bucket
    module, matrix         elements of the layers' largest module, whose parameters ZeRO 3 gathers together,
                           and of their largest parameter, as they are stored
    outside                of the largest parameter outside the layers
    reads_whole            whether ZeRO 3 shards parameters that have been read whole (model/lora.py)
    optimizer, parameters  devices of offload_optimizer and offload_parameters
    groups                 parameter groups of the optimizer
    accumulates            whether steps have several micro-batches
    pinned                 whether offloaded tensors are pinned
    locked                 bytes of the pinned buffers through which the rank swaps
    forward, backward      activations and head at the peak of each
    """

    trained: tuple[int, ...]
    frozen: tuple[Stored, ...]
    zero: int
    ranks: int
    weight: int
    reduced: int
    moment: int
    in_8_bits: bool
    with_one: int
    bucket: int
    gathered: int
    module: int
    matrix: int
    outside: int
    reads_whole: bool
    optimizer: str
    parameters: str
    groups: int
    accumulates: bool
    pipeline: bool
    on_cpu: bool
    is_bf16: bool
    pinned: bool
    locked: int
    forward: Phase
    backward: Phase
    gradient: int

    @property
    def elements(self) -> int:
        return sum(self.trained)

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The tensors that hold the parameters of the stage."""
        return (*(Stored(numel, self.weight) for numel in self.trained), *self.frozen)

    @property
    def frozen_shards(self) -> Tensors:
        """This rank's shares of the parameters that are not trained, at ZeRO 3."""
        return held(tensor.shard(self.ranks) for tensor in self.frozen)

    @property
    def resident(self) -> Tensors:
        """The small parameters that ZeRO 3 keeps whole."""
        return held(tensor for tensor in self.stored if tensor.numel <= PERSIST_BELOW)

    @property
    def share(self) -> int:
        """Number of trained elements per rank; at ZeRO 3 each parameter is sharded separately."""
        if self.zero == 3:
            return sum(self.shares(self.trained))
        return -(-self.elements // self.ranks)

    @property
    def moments(self) -> Tensors:
        """The optimizer states of this rank, on its device."""
        own = self.shares(self.trained) if self.zero else self.trained
        if self.with_one:
            return one(self.share * self.moment - self.with_one // (self.ranks if self.zero else 1) * FP32)
        if not self.in_8_bits:
            return one(self.share * self.moment) if self.zero else each(own, self.moment)
        found = NONE
        for numel, part in zip(self.trained, own, strict=True):
            blocks = -(-part // MOMENT_BLOCK)
            found += each((2 * part, 2 * blocks * FP32), 1) if numel >= MOMENT_LEAST else one(2 * part * FP32)
        return found

    @property
    def largest(self) -> int:
        return max(self.trained, default=0)

    @property
    def last(self) -> int:
        """Elements that ZeRO 3 gathers while the last layer is computed: under adapters a bucket with the
        head's weight behind it, as the stand-in GPU shows; else, as rehearsals show, the next module."""
        return self.gathered + self.outside if self.frozen else max(self.gathered, self.module)

    @property
    def is_offloaded(self) -> bool:
        return self.optimizer != "none"

    @property
    def adds_in_place(self) -> bool:
        """Whether gradients are added up without buckets, as on one rank (engine/reduction.py)."""
        return self.ranks == 1 and not self.pipeline and not self.is_offloaded

    def shares(self, elements: Iterable[int]) -> list[int]:
        return [-(-numel // self.ranks) for numel in elements]

    def in_host(self, elements: int, width: int) -> Tensors:
        """Return a tensor in host memory. torch rounds pinned tensors up to a power of two of bytes
        (torch, CachingHostAllocator.h) unless configured otherwise (`dsft.plan.memory.offload.allocator`)."""
        size = elements * width
        is_rounded = self.pinned and 0 < size <= ROUNDED
        return one(1 << (size - 1).bit_length() if is_rounded else size)

    def gathering(self, size: int) -> Tensors:
        """Return gloo's own copy of the bytes that it gathers (ProcessGroupGloo, all_gather_into_tensor);
        nothing on a GPU."""
        return one(size) if self.on_cpu and self.ranks > 1 else NONE


def phases(rank: RankSetup) -> dict[str, Phase]:
    """Return the phases by name: between (steps), load, flattening (part of loading), forward, backward and
    the phases of the update. Without trained parameters: between, load, and at ZeRO 3 forward."""
    if not rank.trained:
        steady: Phase = {"parameters": weights(rank)}
        return {"between": steady, "load": steady} | (
            {"forward": merged(steady, {"buffers": gathered(rank, rank.last)})} if rank.zero == 3 else {}
        )
    if rank.zero == 0:
        return _whole(rank)
    if rank.zero == 3:
        return _sharded(rank)
    if rank.zero == 1 and rank.is_bf16 and not rank.is_offloaded:
        return _bf16(rank)
    return _partitioned(rank)


def weights(rank: RankSetup) -> Tensors:
    """Return the weights as they are stored between their uses."""
    if rank.zero < 3:
        flat = each(rank.trained, rank.weight) if rank.zero == 0 else one(rank.elements * rank.weight)
        return flat + held(rank.frozen)
    shards = one(rank.share * rank.weight)  # trained shards are one tensor (stage3.py:972 defragment)
    return shards + rank.frozen_shards + rank.resident


def _whole(rank: RankSetup) -> dict[str, Phase]:
    """Return the phases of ZeRO 0. In fp32 the plain optimizer updates the module's parameters; otherwise
    FP16_UnfusedOptimizer does, which runs one step with zero gradients when it is created
    (unfused_optimizer.py:412 initialize_optimizer_states)."""
    low = rank.weight < FP32
    gradients = each(rank.trained, rank.weight)
    copies = each(rank.trained, FP32) if low else NONE
    steady: Phase = {
        "parameters": weights(rank),
        "master": copies,
        "moments": rank.moments,
    }
    left = gradients if rank.accumulates else NONE  # else gradients appear as activations are freed
    flat = min(rank.elements, REDUCED_AT_ONCE)  # engine.py:3796 flatten; a second copy in another reduce type
    travels = one(flat * rank.weight) + (one(flat * rank.reduced) if rank.reduced != rank.weight else NONE)
    if rank.adds_in_place:
        travels = NONE
    load: Phase = merged(steady, {"gradients": gradients + copies}) if low else {"parameters": weights(rank)}
    return {
        "between": steady,
        "load": load,
        "forward": merged(steady, {"gradients": left}, rank.forward),
        "backward": merged(steady, {"gradients": left}, rank.backward),
        "reduction": merged(steady, {"gradients": gradients, "buffers": travels}),
        "update": merged(steady, {"gradients": gradients + copies}),
    }


def _bf16(rank: RankSetup) -> dict[str, Phase]:
    """Return the phases of ZeRO 1 in bf16: BF16_Optimizer, whose fp32 gradients are whole on every rank
    (bf16_optimizer.py:191 fp32_flat_buffer). The bf16 gradients stay allocated, set to zero
    (clear_lp_grads)."""
    whole = one(rank.elements * FP32)
    loaded: Phase = {"parameters": weights(rank), "master": one(rank.share * FP32), "gradients": whole}
    low: Phase = {"gradients": each(rank.trained, rank.weight)}
    between = merged(loaded, {"moments": rank.moments})
    steady = merged(between, low)
    left = steady if rank.accumulates else between  # else gradients appear as activations are freed
    # several groups are copied into one tensor, a single one is reduced in place (engine.py:3796 flatten)
    is_copied = rank.groups > 1 and rank.elements <= REDUCED_AT_ONCE
    return {
        "between": between,
        "load": loaded,
        "flattening": _copied(rank),
        "forward": merged(left, rank.forward),
        "backward": merged(left, rank.backward),
        "widening": merged(steady, {"buffers": one(rank.largest * FP32)}),  # bf16_optimizer.py:523 hp_grad
        "reduction": merged(steady, {"buffers": whole if is_copied else NONE}),
        "update": merged(steady, {"buffers": rank.gathering(rank.elements * rank.weight)}),
    }


def _partitioned(rank: RankSetup) -> dict[str, Phase]:
    """Return the phases of DeepSpeedZeroOptimizer: ZeRO 2, and ZeRO 1 in fp32, fp16 or with offload.

    If weights are narrower than fp32 or there is one rank, gradients accumulate in one fp32 tensor for the
    rank's share (stage_1_and_2.py:1259 _use_compact_grad_partition_buffer). Otherwise they accumulate in
    separate tensors, and those of the next micro-batch are allocated before they are added.
    """
    low = rank.weight < FP32 or rank.adds_in_place
    share = one(rank.share * FP32)
    width = FP32 if rank.zero == 1 else rank.weight  # stage_1_and_2.py:1253 _gradient_reduction_buffer_dtype
    states: Phase = {"master": share, "moments": rank.moments}
    steady: Phase = merged({"parameters": weights(rank)}, states)
    loaded: Phase = {"parameters": weights(rank), "master": share}
    if rank.is_offloaded:
        steady = {"parameters": weights(rank), "offloaded": _in_host(rank)}
        loaded = steady
    whole = each(rank.trained, width) if rank.zero == 1 and rank.accumulates else NONE
    added = share if low else NONE if rank.is_offloaded else share
    again = share if not low and rank.zero == 2 and rank.accumulates and not rank.is_offloaded else NONE
    backward: Phase = {
        "gradients": whole + added + again + _arriving(rank),
        "buffers": _buckets(rank, width),
    }
    update: Phase = {"gradients": added + (NONE if low or rank.is_offloaded else share)}
    # zeros (stage_1_and_2.py:937 single_grad_partition)
    first: Phase = {} if rank.is_offloaded else {"gradients": share}
    return {
        "between": steady,
        "load": merged(loaded, first),
        "flattening": _copied(rank),
        "forward": merged(steady, {"gradients": whole + added if rank.accumulates else NONE}, rank.forward),
        "backward": merged(steady, backward, rank.backward),
        "update": merged(steady, update),
        "gathering": merged(steady, {"buffers": rank.gathering(rank.elements * rank.weight)}),
    }


def _copied(rank: RankSetup) -> Phase:
    """Return the weights and their flat copy, which exist before anything else is allocated
    (stage_1_and_2.py:505 flatten_dense_tensors_aligned, bf16_optimizer.py:167
    _flatten_dense_tensors_aligned)."""
    return {"parameters": weights(rank) + each(rank.trained, rank.weight)}


def _arriving(rank: RankSetup) -> Tensors:
    """Return the gradient of one parameter before it is in a bucket. With offload below ZeRO 3, a gradient
    larger than the bucket is copied (stage_1_and_2.py:1446 grad_reduc)."""
    arriving = one(rank.largest * rank.weight)
    return arriving + arriving if rank.is_offloaded and rank.zero < 3 else arriving


def _in_host(rank: RankSetup) -> Tensors:
    """Return the tensors in host memory at ZeRO 1 and 2: fp32 weights, moments and gradients, the updated
    weights on their way to the GPU, one gradient on its way from it, and in fp32 the accumulated gradients,
    one tensor per parameter (stage_1_and_2.py:560 weights_partition, stage_1_and_2.py:567 temp_buffer_bit16,
    stage_1_and_2.py:653 temp_grad_buffer_for_cpu_offload, stage_1_and_2.py:1809
    async_accumulate_grad_in_cpu_via_gpu)."""
    share, adding = rank.share, rank.accumulates and rank.weight == FP32
    flat = rank.in_host(share, FP32) + rank.in_host(share, FP32) + rank.in_host(share, rank.weight)
    pieces = [rank.in_host(numel, FP32) for numel in rank.shares(rank.trained)] if adding else []
    return sum(pieces, flat + one(share * rank.moment) + rank.in_host(rank.largest, rank.weight))


def _buckets(rank: RankSetup, width: int) -> Tensors:
    """Return the reduction buckets: two if reduction overlaps the backward, and three on several GPUs
    (engine/reduction.py). The reduced gradients are flattened, and copied again if the reduction has another
    type (stage_1_and_2.py:2359 allreduce_bucket); a parameter larger than the bucket is reduced separately,
    without a buffer, but takes the place of one. With offload, gradients pass through a buffer of the size of
    the largest one."""
    if rank.adds_in_place:
        return NONE
    bucket = min(rank.bucket, rank.elements)
    flat = max(bucket, rank.largest)
    several = rank.ranks > 1 and not rank.on_cpu
    found = each([bucket] * (1 if rank.pipeline else 3 if several else 2), width) + one(flat * width)
    if several and not rank.pipeline and rank.matrix > bucket:
        found += each([rank.matrix] * 2, width)  # two of a layer's gradients are in reduction
    if rank.reduced != width:
        found += one(flat * rank.reduced)
    return found + (one(rank.largest * rank.weight) if rank.is_offloaded else NONE)


def _sharded(rank: RankSetup) -> dict[str, Phase]:
    """Return the phases of ZeRO 3. Master weights exist in fp32, too (stage3.py:1163 device is compared with
    a string and never equals it). One bucket (stage3.py:782 reduce_bucket_size) and the gradients' buffer
    (stage3.py:791 grad_partitions_flat_buffer) are allocated for the whole run."""
    share, sub_group = rank.share, min(rank.share, SUB_GROUP)
    states: Phase = {
        "master": one(share * FP32),
        "moments": rank.moments,
        "gradients": one(share * rank.gradient),
    }
    if rank.is_offloaded:
        states = {"offloaded": _sharded_in_host(rank)}
    bucket = NONE if rank.adds_in_place else one(rank.bucket * rank.reduced)
    steady = merged({"parameters": weights(rank), "buffers": bucket, "offloaded": one(rank.locked)}, states)
    if rank.parameters != "none":
        flat = rank.in_host(rank.share, rank.weight)
        on_host = flat + rank.frozen_shards if rank.parameters == "cpu" else NONE
        steady = merged(steady, {"offloaded": on_host}) | {"parameters": rank.resident}
    reduced = max(min(rank.bucket, rank.elements), rank.largest)
    reducing = one(reduced * rank.reduced)  # copied into rank order (coalesced_collectives.py:122 cat)
    if rank.adds_in_place:
        reducing = NONE
    elif rank.on_cpu:
        reducing += reducing  # gloo's reduce_scatter works on a copy
    widened = FP32 if rank.gradient == FP32 else FP32 + rank.gradient  # bf16 ones are flattened first
    step = NONE if rank.is_offloaded else one(sub_group * widened)  # stage3.py:2686 flatten
    load: Phase = {row: tensors for row, tensors in steady.items() if row != "moments"}
    if rank.on_cpu:
        load = merged(load, {"parameters": each(rank.shares(rank.trained), rank.weight)})
    return {
        "between": steady,
        # stage3.py:1306 gradient_buffer, stage3.py:1172 clone
        "load": merged(load, {"buffers": one(sub_group * FP32)}),
        "flattening": _flattening(rank, steady),
        "forward": merged(steady, {"buffers": gathered(rank, rank.gathered)}, rank.forward),
        "gathering": merged(steady, {"buffers": gathered(rank, rank.last)}, {**rank.forward, "head": NONE}),
        "backward": merged(
            steady,
            {
                "buffers": gathered(rank, max(rank.gathered, rank.module), kept=False) + reducing,
                "gradients": _arriving(rank),
            },
            rank.backward,
        ),
        "update": merged(steady, {"gradients": step}),
    }


def _flattening(rank: RankSetup, steady: Phase) -> Phase:
    """Return the phase in which ZeRO 3 flattens the shards of a GPU's rank; empty on a CPU. Shards that stay
    on the GPU become one tensor by way of host memory (zero/utils.py:221 cpu_buffer); those that stay in host
    memory are copied within it (stage3.py:906 pin_memory)."""
    if rank.on_cpu:
        return {}
    shares = each(rank.shares(rank.trained), rank.weight)
    if rank.parameters == "none":
        last = max((tensor.bytes for tensor in rank.stored), default=0) if rank.reads_whole else 0
        return {"parameters": weights(rank) + one(last), "offloaded": one(shares.total)}
    return {
        "parameters": steady["parameters"],
        "offloaded": (shares + shares) if rank.parameters == "cpu" else NONE,
    }


def _sharded_in_host(rank: RankSetup) -> Tensors:
    """Return the tensors in host memory at ZeRO 3: fp32 weights, moments, and gradients twice, accumulated
    and as read by the update (stage3.py:791 grad_partitions_flat_buffer, stage3.py:1338
    subgroup_gradient_buffer). If the optimizer is on NVMe, only the accumulated gradients."""
    gradients = rank.in_host(rank.share, FP32)
    if rank.optimizer == "nvme":
        return gradients
    return gradients + gradients + one(rank.share * FP32) + one(rank.share * rank.moment)
