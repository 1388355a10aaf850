"""Count the tensors that one rank has in memory in each phase of a run that can have the peak memory.

The contents of each phase follow DeepSpeed's sources, cited by file, line and symbol (scripts/citations);
benchmarks/memory.py compares the result with measured peaks.
"""

from __future__ import annotations

from dsft.plan.memory.setup import RankSetup
from dsft.plan.memory.tensors import NONE, Phase, Tensors, each, held, merged, one
from dsft.plan.storage import FP32

REDUCED_AT_ONCE = 500_000_000
"""Elements that ZeRO 0 and BF16_Optimizer reduce in one piece (engine.py:3073 allreduce_gradients)."""


def phases(rank: RankSetup) -> dict[str, Phase]:
    """Return the phases by name: between (steps), load, flattening (part of loading), forward, backward and
    the phases of the update. Without trained parameters: between, load and forward."""
    if not rank.trained:
        load: Phase = {"parameters": weights(rank)}
        steady = merged(load, {"copies": rank.copies})
        used = merged(steady, {"buffers": rank.gathered.most})
        return {"between": steady, "load": load, "forward": used}
    in_bf16 = rank.zero == 1 and rank.is_bf16 and not rank.is_offloaded
    found = {0: _whole, 3: _sharded}.get(rank.zero, _bf16 if in_bf16 else _partitioned)(rank)
    return found | {"update": merged(found["update"], {"buffers": one(rank.orthogonal)})}


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
    steady: Phase = {"parameters": weights(rank), "master": copies, "moments": rank.moments}
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
        # gradients pass through a buffer (stage_1_and_2.py:659 temp_grad_buffer_for_gpu_offload)
        passed = one(rank.largest * rank.weight)
        loaded = steady = {"parameters": weights(rank), "buffers": passed, "offloaded": _in_host(rank)}
    whole = each(rank.trained, width) if rank.zero == 1 and rank.accumulates else NONE
    added = share if low else NONE if rank.is_offloaded else share
    again = share if not low and rank.zero == 2 and rank.accumulates and not rank.is_offloaded else NONE
    left, so_far = whole + added if rank.accumulates else NONE, whole + added + again
    reduced = {
        name: merged(steady, {"gradients": gradients, "buffers": _buckets(rank, width)}, phase)
        for name, gradients, phase in (
            ("backward", so_far, merged(_arriving(rank, rank.beside), rank.backward)),
            ("reduction", so_far, merged(rank.reducing, _reduced(rank, rank.inside, width))),
            ("output", left, merged(_ahead(rank), _reduced(rank, rank.outside, width))),
            ("embedding", so_far, _reduced(rank, rank.outside, width)),
        )
    }
    update: Phase = {"gradients": added + (NONE if low or rank.is_offloaded else share)}
    # zeros (stage_1_and_2.py:937 single_grad_partition)
    first: Phase = {} if rank.is_offloaded else {"gradients": share}
    return {
        "between": steady,
        "load": merged(loaded, first),
        "flattening": _copied(rank),
        "forward": merged(steady, {"gradients": left}, rank.forward),
        **reduced,
        "update": merged(steady, update),
        "gathering": merged(steady, {"buffers": rank.gathering(rank.elements * rank.weight)}),
    }


def _copied(rank: RankSetup) -> Phase:
    """Return the weights and their flat copy, which exist before anything else is allocated
    (stage_1_and_2.py:505 flatten_dense_tensors_aligned, bf16_optimizer.py:167
    _flatten_dense_tensors_aligned)."""
    return {"parameters": weights(rank) + each(rank.trained, rank.weight)}


def _ahead(rank: RankSetup) -> Phase:
    """Return the stored activations, beside which a part of the gradients is reduced."""
    return {row: tensors for row, tensors in rank.forward.items() if row in ("activations", "offloaded")}


def _arriving(rank: RankSetup, numel: int) -> Phase:
    """Return the gradient of one parameter before it is in a bucket. With offload below ZeRO 3, a gradient
    larger than the bucket is copied (stage_1_and_2.py:1446 grad_reduc)."""
    arriving = one(numel * rank.weight)
    return {"gradients": arriving + arriving if rank.is_offloaded and rank.zero < 3 else arriving}


def _reduced(rank: RankSetup, numel: int, width: int, together: int = 0) -> Phase:
    """Return the gradient of a parameter of `numel` elements, or of `together` that appear with it, and what
    the reduction allocates. At ZeRO 1 and 2 the gradients of a bucket are flattened, and copied if the
    reduction has another type (stage_1_and_2.py:2359 allreduce_bucket); a parameter larger than the bucket is
    reduced separately. At ZeRO 3 they are copied into rank order (coalesced_collectives.py:122 cat); on a CPU
    gloo's reduce_scatter works on a copy."""
    if rank.adds_in_place:
        return _arriving(rank, max(numel, together))
    flat = max(min(rank.bucket, rank.elements), numel)
    if rank.zero == 3:
        copied = one(flat * rank.reduced) + (one(flat * rank.reduced) if rank.on_cpu else NONE)
    else:
        copied = one(flat * width) + (one(flat * rank.reduced) if rank.reduced != width else NONE)
    return merged(_arriving(rank, max(numel, together)), {"buffers": copied})


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
    (engine/reduction.py), where two gradients of a layer that are larger than a bucket are in reduction."""
    if rank.adds_in_place:
        return NONE
    bucket = min(rank.bucket, rank.elements)
    several = rank.ranks > 1 and not rank.on_cpu
    found = each([bucket] * (1 if rank.pipeline else 3 if several else 2), width)
    if several and not rank.pipeline and rank.inside > bucket:
        found += each([rank.inside] * 2, width)
    return found


def _sharded(rank: RankSetup) -> dict[str, Phase]:
    """Return the phases of ZeRO 3. Master weights exist in fp32, too (stage3.py:1163 device is compared with
    a string and never equals it). One bucket (stage3.py:782 reduce_bucket_size) and the gradients' buffer
    (stage3.py:791 grad_partitions_flat_buffer) are allocated for the whole run."""
    share = rank.share
    states: Phase = {
        "master": one(share * FP32),
        "moments": rank.moments,
        "gradients": one(share * rank.gradient),
    }
    if rank.is_offloaded:
        states = {"offloaded": _sharded_in_host(rank)}
    bucket = NONE if rank.adds_in_place else one(rank.bucket * rank.reduced)
    steady = merged({"parameters": weights(rank), "buffers": bucket, "offloaded": one(rank.locked)}, states)
    # Made at the start already (stage3.py:1531 partition), and after each step by the next forward pass.
    steady["copies"] = rank.copies
    if rank.parameters != "none":
        flat = rank.in_host(rank.share, rank.weight)
        on_host = flat + rank.frozen_shards if rank.parameters == "cpu" else NONE
        steady = merged(steady, {"offloaded": on_host}) | {"parameters": rank.resident}
    widened = FP32 if rank.gradient == FP32 else FP32 + rank.gradient  # bf16 ones are flattened first
    step = NONE if rank.is_offloaded else one(rank.sub_group * widened)  # stage3.py:2686 flatten
    load: Phase = {row: tensors for row, tensors in steady.items() if row != "moments"}
    if rank.on_cpu:
        load = merged(load, {"parameters": each(rank.shares(rank.trained), rank.weight)})
    whole = rank.gathered
    arriving, in_layers, at_head, behind = (
        merged(steady, {"buffers": at_once})
        for at_once in (whole.arriving, whole.layers, whole.head, whole.backward)
    )
    return {
        "between": steady,
        # each trained parameter is whole once (stage3.py:1504 all_gather)
        "load": merged(load, {"buffers": one(rank.largest * rank.weight)}),
        "flattening": _flattening(rank, steady),
        "gathering": merged(arriving, _ahead(rank)),
        "forward": merged(in_layers, {**rank.forward, "head": NONE}),
        "head": merged(at_head, rank.forward),
        "backward": merged(behind, _arriving(rank, rank.beside), rank.backward),
        "reduction": merged(behind, rank.reducing, _reduced(rank, rank.inside, rank.weight, rank.together)),
        "output": merged(at_head, _ahead(rank), _reduced(rank, rank.outside, rank.weight)),
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
