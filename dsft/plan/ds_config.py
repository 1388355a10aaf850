"""Derive the DeepSpeed JSON from a spec: every key, its value and the reason for the value.

A run has in addition `HostFacts`, what it has found on its hosts, and may have a `UserConfig`, the user's own
JSON. No value is "auto", none depends on the machine without such facts, and none that matters is left to
DeepSpeed's default. There is no optimizer and no scheduler section: the engine builds the optimizer, and the
learning rate is a function of the step. Citations of DeepSpeed give file and line of version 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsft.plan.census import Elements
from dsft.plan.ds_entries import ABSENT, ConfigEntry, HostFacts, UserConfig, nested
from dsft.plan.memory.offload import SUB_GROUP, aio_rows, optimizer_rows, parameter_rows
from dsft.spec.batch import BatchSizes, adds_in_place, deepspeed_stage, gradients_stay_bf16
from dsft.spec.schema import Offload, Spec

NEVER = 1_000_000_000
"""Steps between DeepSpeed's own progress lines: more than any run has. `null` would be divided by."""

LARGEST_BUCKET = 50_000_000
"""Maximum elements per reduction, gather and prefetch: 200 MB in fp32, so that latency is negligible."""

SMALLEST_BUCKET = 1_000_000
"""Minimum elements per bucket, 4 MB in fp32; a model with fewer elements fits into one bucket."""

PERSIST_BELOW = 10_000
"""ZeRO 3 keeps parameters with fewer elements whole on each rank: norms and biases, no large matrix."""

LIVE = 1_000_000_000
"""Maximum elements gathered at once, and the distance within which gathered ones stay for their next
use."""


Row = tuple[str, Any, str]
"""An entry's key, value and reason."""


def bucket_size(elements: int | None) -> int:
    """Return the bucket size for a model with this number of communicated elements; None: not known.

    A quarter of the model, within bounds, so that most of the communication overlaps the backward. Even,
    since DeepSpeed requires that. Small buckets for a small model saved 40 % of ZeRO 2's overhead (8 million
    parameters, 2e6 elements against DeepSpeed's 5e8).
    """
    if elements is None:
        return LARGEST_BUCKET
    size = min(LARGEST_BUCKET, max(elements // 4, min(elements, SMALLEST_BUCKET)))
    return size + size % 2


def bucket_sizes(elements: Elements | None) -> Iterator[tuple[str, int]]:
    """Yield each bucket's key and size. Trained parameters are reduced and updated, all are prefetched."""
    yield "reduce_bucket_size", bucket_size(elements and elements.trained)
    yield "allgather_bucket_size", bucket_size(elements and elements.trained)
    yield "stage3_prefetch_bucket_size", bucket_size(elements and elements.whole)


def entries(
    spec: Spec, batch: BatchSizes | None, facts: HostFacts | None = None, file: UserConfig | None = None
) -> tuple[ConfigEntry, ...]:
    """Return all keys in the order of the file. batch: None for a spec without a cluster, whose world size is
    known only at the start; facts: None before a run; file: the user's JSON, with which `spec` is merged."""
    facts = facts or HostFacts()
    rows = (
        *_batch(spec, batch),
        *_clipping(spec),
        *_precision(spec, batch),
        *_reduction(spec),
        *_zero(spec, batch, facts),
        *aio_rows(spec),
        *_optimizer(spec, facts),
        *_pipeline(spec),
        *silence(),
    )
    found = tuple(ConfigEntry(*row) for row in rows)
    return file.over(found) if file else found


def deepspeed_config(
    spec: Spec, batch: BatchSizes | None, facts: HostFacts | None = None, file: UserConfig | None = None
) -> dict[str, Any]:
    """Return the nested mapping for `deepspeed.initialize`; arguments as in `entries`."""
    return nested(entries(spec, batch, facts, file))


def _batch(spec: Spec, batch: BatchSizes | None) -> Iterator[Row]:
    train = spec.train
    pipeline = spec.parallel.pipeline_stages > 1
    micro_batches = "micro-batches per step" + (", which fill the pipeline" if pipeline else "")
    if spec.data.packing:
        micro_batches += "; a packed step has fewer, and dsft tells DeepSpeed how many"
    if batch is not None:
        together, reason = spec.parallel.sequence_parallel, batch.equation()
        if together > 1:
            reason += f"; times {together}, since each example is on the {together} ranks of a group"
        yield "train_batch_size", batch.global_batch_size * together, reason
        yield "train_micro_batch_size_per_gpu", batch.micro_batch_size, "train.micro_batch_size, in examples"
        yield "gradient_accumulation_steps", batch.accumulation_steps, micro_batches
        return
    found = "not written: computed from the other two at the start, when the world size is known"
    for key, value, reason in (
        ("train_batch_size", train.global_batch_size, "train.global_batch_size, in examples"),
        ("train_micro_batch_size_per_gpu", train.micro_batch_size, "train.micro_batch_size, in examples"),
        ("gradient_accumulation_steps", train.accumulation_steps, micro_batches),
    ):
        yield key, ABSENT if value is None else value, found if value is None else reason


def _clipping(spec: Spec) -> Iterator[Row]:
    if spec.parallel.zero_stage == 0 and spec.train.precision == "fp32":
        reason = "dsft clips at ZeRO 0 in fp32, since DeepSpeed's norm leaves out other pipeline stages"
        yield "gradient_clipping", 0.0, reason
    elif spec.train.max_grad_norm == 0:
        yield "gradient_clipping", 0.0, "train.max_grad_norm is 0: no clipping (DeepSpeed's default is 1.0)"
    else:
        yield "gradient_clipping", spec.train.max_grad_norm, "train.max_grad_norm, of the norm over all ranks"


def _precision(spec: Spec, batch: BatchSizes | None) -> Iterator[Row]:
    bf16 = spec.train.precision == "bf16"
    yield "bf16.enabled", bf16, f"train.precision is {spec.train.precision}"
    if bf16:
        yield "bf16.check_grad_overflow", True, "a step with an infinite or NaN gradient is not applied"
        yield "bf16.immediate_grad_update", False, "gradients are added once, after a micro-batch's backward"
        yield "bf16.bf16_master_weights_and_grads", False, "master weights stay fp32"
        yield "bf16.bf16_optimizer_states", False, "the optimizer's moments stay fp32"
    yield from _fp16(spec)
    yield "torch_autocast.enabled", False, "weights already have the type of train.precision"
    if not bf16:
        yield "data_types.grad_accum_dtype", "fp32", "gradients are added up in the type of the weights"
    elif spec.parallel.zero_stage == 0:
        reason = (
            "ZeRO 0 cannot accumulate bf16 gradients in fp32 (engine.py:2323 grad_accum_dtype); "
            "use zero_stage 1 for that"
        )
        yield "data_types.grad_accum_dtype", "bf16", reason
    elif batch is not None and gradients_stay_bf16(spec, batch):
        reason = "one micro-batch per step and no fp32 sum over ranks: the same values in half the memory"
        yield "data_types.grad_accum_dtype", "bf16", reason
    else:
        yield "data_types.grad_accum_dtype", "fp32", "micro-batches add up in fp32 (the default is bf16)"


def _fp16(spec: Spec) -> Iterator[Row]:
    fp16 = spec.train.precision == "fp16"
    yield "fp16.enabled", fp16, f"train.precision is {spec.train.precision}"
    if fp16:
        yield "fp16.auto_cast", False, "the model's inputs are token ids"
        yield "fp16.loss_scale", 0, "dynamic; dsft's own scaler changes it"
        yield "fp16.initial_scale_power", 16, "the first loss scale is 2^16, as dsft's"
        yield "fp16.loss_scale_window", 1000, "steps without an overflow before it doubles, as dsft's"
        yield "fp16.hysteresis", 1, "every overflow halves it, as dsft's"
        yield "fp16.consecutive_hysteresis", False, "no effect at hysteresis 1"
        yield "fp16.min_loss_scale", 1, "the lowest loss scale, as dsft's"
        yield "fp16.fp16_master_weights_and_grads", False, "master weights stay fp32"


def _reduction(spec: Spec) -> Iterator[Row]:
    chosen = spec.train.reduce_dtype
    if chosen is not None:
        reason = "train.reduce_dtype"
    elif spec.train.precision == "bf16":
        reason = "the sum over ranks keeps all digits; train.reduce_dtype: bf16 halves the traffic"
    else:
        reason = "the type of the gradients"
    yield "communication_data_type", chosen or "fp32", reason
    yield "seq_parallel_communication_data_type", "fp32", "no effect: dsft splits rows without DeepSpeed"
    yield "gradient_allreduce_op", "mean", "dsft undoes DeepSpeed's mean; ZeRO 3 refuses a sum"
    yield "prescale_gradients", False, "dividing before the sum loses bits and is refused at ZeRO 2 and 3"
    yield "gradient_predivide_factor", 1.0, "no division before the sum, which ZeRO 3 gets wrong"
    reason = "the engine marks the end of each step itself, so the number of micro-batches may vary"
    if spec.parallel.pipeline_stages > 1:
        reason = "DeepSpeed's pipeline accepts no other value"
    yield "managed_gradient_accumulation", True, reason


def _zero(spec: Spec, batch: BatchSizes | None, facts: HostFacts) -> Iterator[Row]:
    stage = deepspeed_stage(spec, batch)
    what = ("nothing", "optimizer states", "states and gradients", "states, gradients and parameters")
    over = "data-parallel ranks" if spec.parallel.sequence_parallel == 1 else "all ranks of all groups"
    reason = f"parallel.zero_stage: {what[stage]} sharded over {over}"
    if stage != spec.parallel.zero_stage:
        reason = "parallel.zero_stage: 1, which on one rank is the same, and DeepSpeed's code for 2 is faster"
    elif "zero_stage" not in spec.parallel.model_fields_set and stage == 2:
        reason += "; the default in bf16, since ZeRO 1 would keep all gradients in fp32 and reduce them last"
    yield "zero_optimization.stage", stage, reason
    if stage == 0:
        return
    elements = facts.elements
    rest = _zero_3(spec, elements) if stage == 3 else _zero_12(stage, elements)
    for key, value, reason in (*_zero_common(spec, batch, elements), *rest):
        yield f"zero_optimization.{key}", value, reason
    if spec.parallel.offload_optimizer.device != "none":
        for key, value, reason in _offload_optimizer(spec, facts):
            yield f"zero_optimization.offload_optimizer.{key}", value, reason
    if spec.parallel.offload_parameters.device != "none":
        for key, value, reason in _offload_parameters(spec, facts):
            yield f"zero_optimization.offload_param.{key}", value, reason


def _zero_common(spec: Spec, batch: BatchSizes | None, elements: Elements | None) -> Iterator[Row]:
    in_place = adds_in_place(spec, batch)
    reason = "gradients are added up in place" if in_place else "copied into one buffer: no fragmentation"
    yield "contiguous_gradients", not in_place, reason
    yield "reduce_scatter", True, "each rank receives the part that it owns, not the whole sum"
    size = dict(bucket_sizes(elements))["reduce_bucket_size"]
    yield "reduce_bucket_size", size, f"elements per reduction: {_sizing(elements)}"
    if spec.parallel.pipeline_stages > 1:
        yield "overlap_comm", False, "DeepSpeed's pipeline switches it off (engine.py:2666 overlap_comm)"
    elif in_place and spec.parallel.zero_stage == 3:
        reason = (
            "one rank sends nothing; false would wait for the backward (partition_parameters.py:109 wait)"
        )
        yield "overlap_comm", True, reason
    elif in_place:
        yield "overlap_comm", False, "one rank sends nothing, and would wait at the end of each backward"
    elif spec.parallel.zero_stage == 1:
        reason = "gradients are reduced during the step's last backward, except by BF16_Optimizer"
        yield "overlap_comm", True, reason
    else:
        yield "overlap_comm", True, "reduced during the backward; costs a second bucket, and a third on GPUs"


def _sizing(elements: Elements | None) -> str:
    bounds = f"at least {SMALLEST_BUCKET:,} (4 MB in fp32) or all of them, at most {LARGEST_BUCKET:,}"
    if elements is None:
        return "the largest; a run computes it from the model"
    return f"a quarter of the {elements.trained:,} trained ones; {bounds}"


def _zero_12(stage: int, elements: Elements | None) -> Iterator[Row]:
    yield "allgather_partitions", True, "one gather of updated parameters, not one broadcast per rank"
    size = dict(bucket_sizes(elements))["allgather_bucket_size"]
    yield "allgather_bucket_size", size, "elements per gather; DeepSpeed requires an even number"
    reason = "each rank's part of a bucket is sent to it alone: half the bytes of an all-reduce"
    yield "use_multi_rank_bucket_allreduce", False, reason
    yield "compute_grad_norm", True, "train/grad_norm is reported, also without clipping"
    yield "round_robin_gradients", False, "gradients stay in the order of the parameters"
    yield "parameter_alignment", False, "no padding between parameters"
    if stage == 2:
        yield "ignore_unused_parameters", True, "a parameter without a gradient counts as zero"


def _zero_3(spec: Spec, elements: Elements | None) -> Iterator[Row]:
    yield "sub_group_size", SUB_GROUP, "elements updated at a time: at most 400 MB of fp32 gradients"
    if spec.parallel.offload_parameters.device == "nvme":
        for key, value, reason in gathering(elements):
            yield key, *NO_PREFETCH.get(key, (value, reason))
    else:
        yield from gathering(elements, spec.parallel.zero_hpz_partition_size)
    yield "zero_quantized_gradients", False, "gradients are sent unchanged"


NO_PREFETCH = {
    "stage3_prefetch_bucket_size": (
        0,
        "no prefetch, which would occupy buffers that others wait for",
    ),
    "stage3_max_reuse_distance": (0, "a buffer is released after each use"),
}
"""Values and reasons of the gathering keys for parameters on a disk: key -> (value, reason)."""


def gathering(elements: Elements | None, copied: int = 1) -> Iterator[Row]:
    """Yield the keys that control how ZeRO 3 gathers parameters, without the section's name. copied:
    parallel.zero_hpz_partition_size."""
    size = dict(bucket_sizes(elements))["stage3_prefetch_bucket_size"]
    yield "stage3_prefetch_bucket_size", size, "elements gathered ahead of their use"
    yield "stage3_param_persistence_threshold", PERSIST_BELOW, "norms and biases are not sharded"
    yield "stage3_max_live_parameters", LIVE, "elements gathered at once"
    yield "stage3_max_reuse_distance", LIVE, "elements until the next use of a parameter that stays gathered"
    yield "stage3_module_granularity_threshold", 0, "each module is gathered by itself"
    yield "stage3_allgather_sequential", False, "gathers are bucketed"
    yield "stage3_gather_16bit_weights_on_model_save", False, "dsft exports from its own checkpoints"
    reason = f"each {copied} ranks have a second copy of the parameters, from which they gather them"
    yield "zero_hpz_partition_size", copied, reason if copied > 1 else "no second copy of the parameters"
    yield "zero_quantized_weights", False, "parameters are sent unchanged"


def _offload_optimizer(spec: Spec, facts: HostFacts) -> Iterator[Row]:
    offload = spec.parallel.offload_optimizer
    reason = "fp32 weights and moments are stored and updated there"
    yield from _offloaded("offload_optimizer", offload, reason, facts)
    if spec.parallel.zero_stage == 3:
        yield "ratio", 1.0, "all of it"
    if offload.device == "nvme":
        yield from optimizer_rows()
    yield "fast_init", False, "states are created in place"
    yield "super_offload", False, "for Grace-Hopper machines only"


def _offload_parameters(spec: Spec, facts: HostFacts) -> Iterator[Row]:
    offload = spec.parallel.offload_parameters
    reason = "each rank's shard of the weights is stored there between its uses"
    yield from _offloaded("offload_parameters", offload, reason, facts)
    if offload.device == "nvme":
        yield from parameter_rows(facts.largest_part)


def _offloaded(key: str, offload: Offload, reason: str, facts: HostFacts) -> Iterator[Row]:
    """Yield the keys of one offload section."""
    yield "device", offload.device, reason
    if key in facts.swap:
        yield "nvme_path", facts.swap[key], f"this run's own folder in parallel.{key}.nvme_path"
    elif offload.nvme_path is not None:
        yield "nvme_path", offload.nvme_path, f"parallel.{key}.nvme_path"
    if offload.pin_memory is not None:
        yield "pin_memory", offload.pin_memory, f"parallel.{key}.pin_memory"
    elif facts.pin is not None and offload.device == "cpu":
        yield "pin_memory", *facts.pin
    elif offload.device == "nvme":
        yield "pin_memory", True, "faster copies"
    else:
        yield "pin_memory", True, "faster copies; a run sets it to false on hosts with too little memory"


def _optimizer(spec: Spec, facts: HostFacts) -> Iterator[Row]:
    reason = "the engine passes its own optimizer, whose class is not on DeepSpeed's list of tested ones"
    yield "zero_allow_untested_optimizer", True, reason
    forced = False
    if spec.parallel.offload_optimizer.device == "none":
        reason = "nothing is offloaded"
    elif not spec.optim.facts.on_host:
        reason = f"DeepSpeed has no CPU version of {spec.optim.name}"
    elif facts.cpu_adam is not None:
        forced = facts.cpu_adam
        reason = "DeepSpeed's CPU Adam is there"
        if not forced:
            reason = "DeepSpeed's CPU Adam cannot be compiled: torch's steps (parallel.allow_torch_adam)"
    elif spec.parallel.allow_torch_adam:
        reason = "parallel.allow_torch_adam; a run uses DeepSpeed's CPU Adam where it can be compiled"
    else:
        forced = True
        reason = "the run stops if DeepSpeed's CPU Adam cannot be compiled (parallel.allow_torch_adam)"
    yield "zero_force_ds_cpu_optimizer", forced, reason


def _pipeline(spec: Spec) -> Iterator[Row]:
    if spec.parallel.pipeline_stages == 1:
        return
    reason = "gradient checkpointing is that of transformers, inside the stage"
    yield "pipeline.activation_checkpoint_interval", 0, reason
    yield "pipeline.use_reentrant", False, "reentrant checkpointing fails on the first stage"


def silence() -> Iterator[Row]:
    """Yield the keys that switch off DeepSpeed's own reports."""
    yield "steps_per_print", NEVER, "no step reaches it: dsft prints the progress, and null is refused"
    yield "log_level", "warning", "DeepSpeed's warnings are shown, its progress is not"
    yield "wall_clock_breakdown", False, "its timers synchronize the device"
    yield "timers.throughput.enabled", False, "it synchronizes the device at every step"
    yield "memory_breakdown", False, "dsft reports memory/* once per logged step"
    yield "dump_state", False, "no dump at start"
    yield "disable_python_gc", False, "Python's garbage collector stays as it is"
    yield "checkpoint.tag_validation", "Fail", "ranks must agree; dsft writes no DeepSpeed checkpoints"
