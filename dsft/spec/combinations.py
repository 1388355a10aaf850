"""Find values of a spec that are valid one by one but not together; `files` checks the files that it
names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from dsft.spec.architecture import MODEL, cut_findings, split_findings
from dsft.spec.document import quote
from dsft.spec.findings import Finding, finding, value_at, value_finding
from dsft.spec.formats import format_findings
from dsft.spec.held_out import evaluates, name_findings
from dsft.spec.hosts import environment_findings, host_findings
from dsft.spec.preferences import preference_findings
from dsft.spec.schema import Optim, Schedule, Spec
from dsft.spec.usual import bf16_findings

WITHOUT_WARMUP: tuple[Schedule, ...] = ("constant",)


def combinations(spec: Spec) -> Iterator[Finding]:
    """Yield all findings that follow from the spec alone."""
    for check in _CHECKS:
        yield from check(spec)


def _model(spec: Spec) -> Iterator[Finding]:
    name, config = spec.model.name_or_path, spec.model.from_config
    if value_at(spec, "model.trust_remote_code"):
        message = "is not offered, since code that comes with a model is never run; use a model whose class "
        yield value_finding(spec, "model.trust_remote_code", f"{message}is in transformers")
    if name is None and config is None:
        message = "no model is given; give name_or_path, or from_config for a newly initialized model"
        yield Finding(("model",), message, MODEL)
    if name is not None and config is not None:
        yield Finding(("model",), "both name_or_path and from_config are given; keep one of them", MODEL)
    if config is not None and not isinstance(config.get("model_type"), str):
        message = "model_type is missing, and every transformers config needs it; add it, such as "
        yield finding("model.from_config", f"{message}model_type: llama")
    if not _is_finite(config):
        message = "it contains a number that is too large for a float; write a finite number"
        yield finding("model.from_config", message)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_per_segment(spec: Spec) -> bool:
    """Return whether packed rows are attended segment by segment, as far as the spec decides it."""
    if spec.model.attention == "auto":
        return spec.train.precision == "fp32" or spec.is_on_cpu
    return not spec.model.attention.startswith("flash")


def _compiled(spec: Spec) -> Iterator[Finding]:
    """Refuse model.compile where layers would be recompiled again and again, or where it is untested."""
    if not spec.model.compile:
        return
    if spec.parallel.zero_stage == 3:
        message = "does not work with ZeRO 3, whose hooks that gather parameters break the compiled graph; "
        message += "set parallel.zero_stage: 2 or model.compile: false"
        yield value_finding(spec, "model.compile", message, "parallel.zero_stage")
    if spec.parallel.pipeline_stages > 1:
        message = "is not supported yet in a pipeline; set pipeline_stages: 1 or model.compile: false"
        yield value_finding(spec, "model.compile", message, "parallel.pipeline_stages")
    if spec.data.packing and _is_per_segment(spec):
        message = "does not work with attention per segment, which would be recompiled for each packed row; "
        message += "use model.attention: auto in bf16 on GPUs, or set data.packing or model.compile to false"
        yield value_finding(spec, "model.compile", message, "model.attention", "data.packing")
    if spec.model.lora is not None and spec.model.lora.use_dora:
        message = "does not work with DoRA, which breaks the graph, so that torch.compile recompiles until "
        message += "it gives up; set model.lora.use_dora or model.compile to false"
        yield value_finding(spec, "model.compile", message, "model.lora.use_dora")


def _kernels(spec: Spec) -> Iterator[Finding]:
    """Check that fused kernels and TF32 are possible and have an effect."""
    device = "cluster.accelerator.name"
    if spec.model.kernels == "liger":
        if spec.is_on_cpu:
            message = "needs a GPU, since its kernels are written in Triton; set it to torch"
            yield value_finding(spec, "model.kernels", message, device)
        if spec.model.compile:
            message = "cannot be combined with model.compile, which fuses kernels itself; keep one of them"
            yield value_finding(spec, "model.kernels", message, "model.compile")
    if spec.train.tf32 and (spec.is_on_cpu or spec.train.precision != "fp32"):
        where = "on a CPU" if spec.is_on_cpu else f"with precision {spec.train.precision}"
        message = f"has no effect {where}, only with precision fp32 on GPUs; leave it out"
        yield value_finding(spec, "train.tf32", message, "train.precision", device)


def _activations(spec: Spec) -> Iterator[Finding]:
    """Check the keys that change how checkpointed layers are computed."""
    checkpointing, chunks = "model.gradient_checkpointing", "model.mlp_chunks"
    is_chunked = (spec.model.mlp_chunks or 1) > 1
    for key, is_set in (("model.activation_offload", spec.model.activation_offload), (chunks, is_chunked)):
        if is_set and not spec.model.gradient_checkpointing:
            message = "has no effect without gradient checkpointing, since it is for checkpointed layers; "
            yield value_finding(spec, key, f"{message}set {checkpointing}: true", checkpointing)
    if is_chunked and spec.model.compile:
        message = "is not supported with model.compile; leave it out, or set model.compile to false"
        yield value_finding(spec, chunks, message, "model.compile")


def _trained(spec: Spec) -> Iterator[Finding]:
    lora, trainable = spec.model.lora, spec.model.trainable
    if lora is not None and trainable is not None:
        message = "it cannot be combined with model.lora, which freezes all parameters but its adapters; "
        message += "keep one of them (model.lora.modules_to_save trains whole modules beside the adapters)"
        yield finding("model.trainable", message, "model.lora")
    if trainable == ():
        message = "the list is empty, so nothing would be trained; add a pattern, such as 'model.layers.3.*'"
        yield finding("model.trainable", message)
    key = "model.lora.target_modules"
    if lora is not None and isinstance(lora.target_modules, str) and lora.target_modules != "all-linear":
        names = f"[{quote(lora.target_modules)}]"
        message = f"is not a list; write a list of names, such as {names}, or all-linear"
        yield value_finding(spec, key, message)
    if lora is not None and not lora.target_modules:
        yield finding(
            key, "the list is empty, so no module would get an adapter; add names, or write all-linear"
        )


def _experts(spec: Spec) -> Iterator[Finding]:
    balance, weight = "model.experts.balance", "model.experts.balance_weight"
    has_balance, has_weight = value_at(spec, balance) != "none", value_at(spec, weight) is not None
    if has_balance and not has_weight:
        message = "needs balance_weight; add it, such as 0.0001 with sequence or 0.001 with global_batch"
        yield value_finding(spec, balance, message, weight)
    if has_weight and not has_balance:
        message = "has no effect with balance none; set that to sequence or global_batch, or leave this out"
        yield value_finding(spec, weight, message, balance)
    if has_balance and spec.model.compile:
        message = "is not supported with model.compile; set it to none, or model.compile to false"
        yield value_finding(spec, balance, message, "model.compile")
    if spec.model.experts.freeze_router and spec.model.lora is not None:
        message = "has no effect with model.lora, which trains no router; leave it out"
        yield value_finding(spec, "model.experts.freeze_router", message, "model.lora")


def _groups(spec: Spec) -> Iterator[Finding]:
    for index, group in enumerate(spec.optim.groups):
        if group.learning_rate is None and group.weight_decay is None:
            message = f"the group {quote(group.parameters)} sets neither learning_rate nor weight_decay; set "
            yield finding(f"optim.groups.{index}", f"{message}one, or remove the group")


_BATCH = ("global_batch_size", "micro_batch_size", "accumulation_steps")


def _batch(spec: Spec) -> Iterator[Finding]:
    sizes = {key: getattr(spec.train, key) for key in _BATCH}
    given = [f"{key} {size}" for key, size in sizes.items() if size is not None]
    reads = tuple(f"train.{key}" for key in sizes)
    if len(given) < 2:
        values = f"only {given[0]} is given" if given else "no batch size is given"
        missing = " or ".join(key for key, size in sizes.items() if size is None)
        way_out = f"add {missing}" if given else "add micro_batch_size and accumulation_steps"
        rule = "two of global_batch_size, micro_batch_size and accumulation_steps are needed"
        yield Finding(("train",), f"{values}, but {rule} (the third follows from them); {way_out}", reads)
    total, factors = spec.train.global_batch_size, given[1:]
    unit = (spec.train.micro_batch_size or 1) * (spec.train.accumulation_steps or 1)
    if spec.cluster is None and total is not None and total % unit:
        # with a cluster, dsft.plan knows the ranks and checks the whole equation
        below = total // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        message = f"is not a multiple of {' × '.join(factors)}, so no number of ranks fits; use {nearest}"
        yield value_finding(spec, "train.global_batch_size", message, *reads)


def _schedule(spec: Spec) -> Iterator[Finding]:
    """Check the keys of warm-up, lowest learning rate and decay against the kind of schedule."""
    optim, kind = spec.optim, "optim.lr_scheduler_type"
    schedule, no_effect = optim.lr_scheduler_type, f"has no effect with {kind} {optim.lr_scheduler_type}; use"
    if optim.warmup_steps is not None and optim.warmup_ratio is not None:
        message = f"is given together with warmup_steps {optim.warmup_steps}; keep one of them"
        yield value_finding(spec, "optim.warmup_ratio", message, "optim.warmup_steps")
    for key in ("optim.warmup_steps", "optim.warmup_ratio"):
        if value_at(spec, key) and schedule in WITHOUT_WARMUP:
            yield value_finding(spec, key, f"{no_effect} constant_with_warmup, or leave it out", kind)
    if schedule == "cosine_with_min_lr" and optim.min_lr_ratio is None:
        yield value_finding(spec, kind, "needs min_lr_ratio; add it, such as 0.1", "optim.min_lr_ratio")
    if schedule not in ("cosine_with_min_lr", "wsd") and optim.min_lr_ratio is not None:
        message = f"{no_effect} cosine_with_min_lr or wsd, or leave it out"
        yield value_finding(spec, "optim.min_lr_ratio", message, kind)
    for key in ("optim.decay_steps", "optim.decay_ratio", "optim.decay_type"):
        if schedule != "wsd" and value_at(spec, key) is not None:
            yield value_finding(spec, key, f"{no_effect} wsd, or leave it out", kind)
    if schedule == "wsd":
        yield from _decay(spec)


def _decay(spec: Spec) -> Iterator[Finding]:
    """Check the length of wsd's decay, and that warm-up and decay together fit into the run, as far as the
    spec gives its length."""
    optim, steps = spec.optim, spec.train.max_steps
    ratio, decay_steps = optim.decay_ratio, optim.decay_steps
    if decay_steps is None and ratio is None:
        message = "needs the length of its decay; add decay_steps, or decay_ratio such as 0.1"
        yield value_finding(
            spec, "optim.lr_scheduler_type", message, "optim.decay_steps", "optim.decay_ratio"
        )
    if decay_steps is not None and ratio is not None:
        message = f"is given together with decay_steps {decay_steps}; keep one of them"
        yield value_finding(
            spec, "optim.decay_ratio", message, "optim.lr_scheduler_type", "optim.decay_steps"
        )
    key, decay = "optim.decay_ratio", ratio
    if decay_steps is not None and steps is not None:
        key, decay = "optim.decay_steps", decay_steps / steps
    warmup = optim.warmup_ratio or 0.0
    if optim.warmup_steps is not None and steps is not None:
        warmup = optim.warmup_steps / steps
    if decay is not None and warmup + decay > 1 + 1e-9:  # 0.9 + 0.1 is not always 1
        after = (
            f" that is left after a warm-up of {warmup:.0%}; shorten one of them"
            if warmup
            else "; shorten it"
        )
        reads = ("optim.decay_steps", "optim.decay_ratio", "optim.warmup_steps", "optim.warmup_ratio")
        part = "the part of the run" if warmup else "the run"
        yield value_finding(spec, key, f"is longer than {part}{after}", *reads, "train.max_steps")


def _batch_scale(spec: Spec) -> Iterator[Finding]:
    scale, base = "optim.scale_with_batch", "optim.base_batch_size"
    is_scaled, has_base = value_at(spec, scale) != "none", value_at(spec, base) is not None
    if is_scaled and not has_base:
        message = "needs base_batch_size; add the global batch size for which learning_rate was tuned"
        yield value_finding(spec, scale, message, base)
    if has_base and not is_scaled:
        message = "has no effect with scale_with_batch none; set that to linear or sqrt, or leave this out"
        yield value_finding(spec, base, message, scale)


def _fp16(spec: Spec) -> Iterator[Finding]:
    """Check that fp16 is not combined with what it does not support."""
    if spec.train.precision != "fp16":
        return
    if spec.is_on_cpu:
        yield value_finding(spec, "train.precision", "is not offered on a CPU; use bf16")
    supported: dict[str, tuple[object, ...]] = {
        "parallel.zero_stage": (1, 2, 3),
        "parallel.offload_optimizer.device": ("none", "cpu"),
        "parallel.offload_parameters.device": ("none", "cpu"),
        "train.reduce_dtype": (None, "fp32"),
    }
    for key, values in supported.items():
        if value_at(spec, key) not in values:
            message = f"is not supported yet with {key} {quote(value_at(spec, key))}; use bf16"
            yield value_finding(spec, "train.precision", message, key)


def _optimizer(spec: Spec) -> Iterator[Finding]:
    if spec.optim.name == "adamw" and spec.optim.momentum:
        message = "has no effect with adamw, whose momentum is betas[0]; leave it out"
        yield value_finding(spec, "optim.momentum", message, "optim.name")
    for key in ("betas", "eps"):
        if spec.optim.name == "sgd" and getattr(spec.optim, key) != Optim.model_fields[key].default:
            message = "has no effect with sgd, which has no second moment; leave it out"
            yield value_finding(spec, f"optim.{key}", message, "optim.name")


def _data(spec: Spec) -> Iterator[Finding]:
    data = spec.data
    if data.on_too_long == "split" and spec.task_kind.answers:
        message = f"is for pretraining, since a row of task {spec.task} cannot be divided; use error, drop "
        yield value_finding(spec, "data.on_too_long", f"{message}or truncate", "task")
    if data.eval_fraction is not None and data.eval_count is not None:
        message = f"is given together with eval_fraction {data.eval_fraction}, and both set how many rows "
        yield value_finding(
            spec, "data.eval_count", f"{message}are held out; keep one of them", "data.eval_fraction"
        )
    for key in ("train.eval_every", "train.eval_on_start", "checkpoint.keep_best"):
        if value_at(spec, key) and not evaluates(data):
            message = "needs rows to evaluate; give data.eval, data.eval_fraction or data.eval_count, or "
            message += "leave it out"
            yield value_finding(spec, key, message, "data.eval")
    if spec.checkpoint.keep_best is not None and spec.checkpoint.every is None:
        message = "has no effect with checkpoint.every null, which writes a single checkpoint; set "
        message += "checkpoint.every, or leave it out"
        yield value_finding(spec, "checkpoint.keep_best", message, "checkpoint.every")


def _weights(spec: Spec) -> Iterator[Finding]:
    """Check source weights: they are shares of a whole, so all sources have one or none has."""
    has_weight = [source.weight is not None for source in spec.data.train]
    if any(has_weight) and not all(has_weight):
        with_one, without = has_weight.index(True), has_weight.index(False)
        message = f"this source has no weight, but data.train.{with_one} has one; give a weight to all "
        yield finding(f"data.train.{without}", f"{message}sources, or to none", "data.train.weight")
    for index, source in enumerate(spec.data.eval):
        if source.weight is not None:
            message = "has no effect, since every held-out row is evaluated; leave it out"
            yield value_finding(spec, f"data.eval.{index}.weight", message)


def _packing(spec: Spec) -> Iterator[Finding]:
    data, key = spec.data, "data.max_tokens_per_micro_batch"
    budget, longest = data.max_tokens_per_micro_batch, spec.longest_example
    if budget is not None and not data.packing:
        message = "has no effect without packing; set data.packing: true, or leave it out"
        yield value_finding(spec, key, message, "data.packing")
    elif budget is not None and budget < longest:
        times = {1: "", 2: "twice "}.get(spec.task_kind.rows, f"{spec.task_kind.rows} times ")
        limit = f"{times}data.max_length {data.max_length}"
        message = f"is less than {limit}, so the longest {spec.task_kind.unit} would not fit; "
        message += f"set it to {longest} or more"
        yield value_finding(spec, key, message, "data.packing", "data.max_length")
    if data.packing and not spec.task_kind.answers and data.on_too_long in ("drop", "truncate"):
        message = "has no effect on packed pretraining: documents continue in the next row; leave it out"
        yield value_finding(spec, "data.on_too_long", message, "data.packing", "task")


def _attention(spec: Spec) -> Iterator[Finding]:
    if spec.model.attention.startswith("flash") and spec.train.precision == "fp32":
        message = "does not support fp32; use auto, or train.precision: bf16"
        yield value_finding(spec, "model.attention", message, "train.precision")


def _offload(spec: Spec) -> Iterator[Finding]:
    for section in ("parallel.offload_optimizer", "parallel.offload_parameters"):
        offload, device, path = value_at(spec, section), f"{section}.device", f"{section}.nvme_path"
        if offload.device == "nvme" and offload.nvme_path is None:
            message = "needs nvme_path; add a folder on a local disk of each host"
            yield value_finding(spec, device, message, path)
        keeps_start = spec.reference is not None and spec.reference.reference == "adapter"
        if section == "parallel.offload_parameters" and offload.device == "nvme" and keeps_start:
            key = spec.own_key("reference")
            message = f"does not work with {key} adapter, which exchanges the adapter's values with the "
            message += f"initial ones in memory; set {key} to live or precomputed, or the device to cpu"
            yield value_finding(spec, device, message, key)
        if offload.device != "nvme" and offload.nvme_path is not None:
            message = f"has no effect with device {offload.device}; leave it out"
            yield value_finding(spec, path, message, device)
        if offload.device == "none" and offload.pin_memory is not None:
            message = "has no effect with device none; leave it out"
            yield value_finding(spec, f"{section}.pin_memory", message, device)


def _paths(spec: Spec) -> Iterator[Finding]:
    for key in ("output_dir", "checkpoint.resume"):
        if not value_at(spec, key).isprintable():
            yield value_finding(spec, key, "contains control characters; remove them")


_CHECKS: tuple[Callable[[Spec], Iterator[Finding]], ...] = (
    _model,
    _trained,
    _experts,
    split_findings,
    _batch,
    _schedule,
    _batch_scale,
    _fp16,
    bf16_findings,
    _optimizer,
    _groups,
    _data,
    _weights,
    _packing,
    name_findings,
    format_findings,
    preference_findings,
    _attention,
    _compiled,
    _kernels,
    cut_findings,
    _activations,
    _offload,
    host_findings,
    environment_findings,
    _paths,
)
