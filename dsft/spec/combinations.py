"""Find values of a spec that are valid one by one but not together; `files` checks the files that it
names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from dsft.spec.architecture import MODEL, cut_findings
from dsft.spec.document import Finding, quote
from dsft.spec.formats import format_findings
from dsft.spec.held_out import evaluates, name_findings
from dsft.spec.hosts import environment_findings, host_findings
from dsft.spec.preferences import preference_findings
from dsft.spec.rules import value_at
from dsft.spec.schema import Optim, Schedule, Spec

WITHOUT_WARMUP: tuple[Schedule, ...] = ("constant",)


def combinations(spec: Spec) -> Iterator[Finding]:
    """Yield all findings that follow from the spec alone."""
    for check in _CHECKS:
        yield from check(spec)


def _model(spec: Spec) -> Iterator[Finding]:
    name, config = spec.model.name_or_path, spec.model.from_config
    if value_at(spec, "model.trust_remote_code"):
        message = "true, but a model's own code is never run; use a model whose class is in transformers"
        yield Finding(("model", "trust_remote_code"), message)
    if name is None and config is None:
        message = "there is no model; give name_or_path, or from_config for fresh weights"
        yield Finding(("model",), message, MODEL)
    if name is not None and config is not None:
        yield Finding(("model",), "both name_or_path and from_config are given; keep one of the two", MODEL)
    if config is not None and not isinstance(config.get("model_type"), str):
        message = "model_type is missing, a transformers config needs it; write it, such as model_type: llama"
        yield Finding(("model", "from_config"), message)
    if not _is_finite(config):
        message = "a number in it is too large for a float; write one that is finite"
        yield Finding(("model", "from_config"), message)


def _is_per_segment(spec: Spec) -> bool:
    """Return whether packed rows are attended segment by segment, as far as the spec decides it."""
    if spec.model.attention == "auto":
        on_cpu = spec.accelerator is not None and spec.accelerator.name.lower() == "cpu"
        return spec.train.precision == "fp32" or on_cpu
    return not spec.model.attention.startswith("flash")


def _compiled(spec: Spec) -> Iterator[Finding]:
    """Refuse model.compile where layers would be recompiled again and again, or where it is untested."""
    parallel, data = spec.parallel, spec.data
    refusals = (
        (
            parallel.zero_stage == 3,
            "parallel.zero_stage",
            "ZeRO 3 gathers parameters in hooks at which torch.compile stops; use zero_stage 2 or",
        ),
        (
            parallel.pipeline_stages > 1,
            "parallel.pipeline_stages",
            "a pipeline's stages are not compiled yet; set pipeline_stages 1 or",
        ),
        (
            data.packing and _is_per_segment(spec),
            "data.packing",
            "attention per segment would be compiled anew for each row; use attention auto in bf16 on GPUs, "
            "packing false or",
        ),
        (
            spec.model.lora is not None and spec.model.lora.use_dora,
            "model.lora.use_dora",
            "torch.compile stops inside DoRA, and compiles its pieces anew until it gives up; "
            "use use_dora false or",
        ),
    )
    for wrong, key, reason in refusals:
        if spec.model.compile and wrong:
            reads = ("model.compile", "model.attention", key)
            yield Finding(("model", "compile"), f"true, but {reason} compile false", reads)


def _kernels(spec: Spec) -> Iterator[Finding]:
    """Check that fused kernels and TF32 are possible and have an effect."""
    on_cpu = spec.accelerator is not None and spec.accelerator.name.lower() == "cpu"
    if spec.model.kernels == "liger":
        path = ("model", "kernels")
        if on_cpu:
            message = "'liger' is not for a CPU: its kernels are Triton's, which need a GPU; set it to torch"
            yield Finding(path, message, ("model.kernels", "cluster.accelerator.name"))
        if spec.model.compile:
            message = "'liger' with model.compile, which makes such kernels itself; keep one of the two"
            yield Finding(path, message, ("model.kernels", "model.compile"))
    if spec.train.tf32 and (on_cpu or spec.train.precision != "fp32"):
        where = "on a CPU" if on_cpu else f"with precision {spec.train.precision}"
        message = f"true has no effect {where}; leave it out: it is for fp32 on GPUs"
        reads = ("train.tf32", "train.precision", "cluster.accelerator.name")
        yield Finding(("train", "tf32"), message, reads)


def _activations(spec: Spec) -> Iterator[Finding]:
    if spec.model.activation_offload and not spec.model.gradient_checkpointing:
        message = (
            "true keeps what checkpointed layers save in host memory, and none is checkpointed; set "
            "model.gradient_checkpointing: true"
        )
        reads = ("model.activation_offload", "model.gradient_checkpointing")
        yield Finding(("model", "activation_offload"), message, reads)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _trained(spec: Spec) -> Iterator[Finding]:
    lora, trainable = spec.model.lora, spec.model.trainable
    if lora is not None and trainable is not None:
        message = "patterns stand beside model.lora, which freezes all but its adapters; keep one of the two"
        way_out = f"{message}: model.lora.modules_to_save trains whole modules beside adapters"
        yield Finding(("model", "trainable"), way_out, ("model.trainable", "model.lora"))
    if trainable == ():
        message = "no pattern is given, so nothing would be trained; write some, such as 'model.layers.3.*'"
        yield Finding(("model", "trainable"), message)
    path = ("model", "lora", "target_modules")
    if lora is not None and isinstance(lora.target_modules, str) and lora.target_modules != "all-linear":
        name = quote(lora.target_modules)
        yield Finding(path, f"{name} is no list; write a list of names, such as [{name}], or all-linear")
    if lora is not None and not lora.target_modules:
        yield Finding(path, "no module is named, so there would be no adapter; name some, or all-linear")


def _groups(spec: Spec) -> Iterator[Finding]:
    for index, group in enumerate(spec.optim.groups):
        if group.learning_rate is None and group.weight_decay is None:
            message = "has neither a learning_rate nor a weight_decay of its own; give one, or take it out"
            yield Finding(("optim", "groups", index), f"{quote(group.parameters)} {message}")


def _batch(spec: Spec) -> Iterator[Finding]:
    train = spec.train
    sizes = {
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "accumulation_steps": train.accumulation_steps,
    }
    given = {key: size for key, size in sizes.items() if size is not None}
    reads = tuple(f"train.{key}" for key in sizes)
    if len(given) < 2:
        values = "".join(f"only {key} {size}" for key, size in given.items()) or "none of the batch sizes"
        rule = (
            "two of global_batch_size, micro_batch_size and accumulation_steps are needed, the third follows"
        )
        missing = " or ".join(key for key in sizes if key not in given)
        way_out = "give micro_batch_size and accumulation_steps" if not given else f"add {missing}"
        yield Finding(("train",), f"{values} is given; {rule}: {way_out}", reads)

    if spec.cluster is None:  # with one, dsft.plan knows the ranks and checks the whole equation
        yield from _batch_for_no_world(spec)


def _batch_for_no_world(spec: Spec) -> Iterator[Finding]:
    """Check that some number of ranks can make the global batch."""
    train = spec.train
    unit = (train.micro_batch_size or 1) * (train.accumulation_steps or 1)
    total = train.global_batch_size
    if total is None or total % unit == 0:
        return
    below = total // unit * unit
    nearest = f"{below} and {below + unit} do" if below else f"{unit} does"
    micro, steps = (size or "?" for size in (train.micro_batch_size, train.accumulation_steps))
    equation = f"{total} = micro_batch_size {micro} × accumulation_steps {steps} × data-parallel ranks"
    message = f"{equation} holds for no number of ranks; {nearest}"
    reads = ("train.global_batch_size", "train.micro_batch_size", "train.accumulation_steps")
    yield Finding(("train", "global_batch_size"), message, reads)


def _warmup(spec: Spec) -> Iterator[Finding]:
    optim = spec.optim
    if optim.warmup_steps is not None and optim.warmup_ratio is not None:
        message = f"{optim.warmup_ratio} stands beside warmup_steps {optim.warmup_steps}; keep one of the two"
        yield Finding(("optim", "warmup_ratio"), message, ("optim.warmup_steps", "optim.warmup_ratio"))
    for key, value in (("warmup_steps", optim.warmup_steps), ("warmup_ratio", optim.warmup_ratio)):
        if value and optim.lr_scheduler_type in WITHOUT_WARMUP:
            message = f"{value} has no effect with lr_scheduler_type constant; use constant_with_warmup"
            yield Finding(("optim", key), message, (f"optim.{key}", "optim.lr_scheduler_type"))


def _schedule(spec: Spec) -> Iterator[Finding]:
    optim, kind = spec.optim, spec.optim.lr_scheduler_type
    reads = ("optim.min_lr_ratio", "optim.lr_scheduler_type")
    if kind == "cosine_with_min_lr" and optim.min_lr_ratio is None:
        yield Finding(
            ("optim", "lr_scheduler_type"),
            "'cosine_with_min_lr' needs min_lr_ratio; give it, such as 0.1",
            reads,
        )
    if kind not in ("cosine_with_min_lr", "wsd") and optim.min_lr_ratio is not None:
        message = f"{optim.min_lr_ratio} has no effect with lr_scheduler_type {kind}"
        way_out = "use cosine_with_min_lr or wsd, or leave it out"
        yield Finding(("optim", "min_lr_ratio"), f"{message}; {way_out}", reads)
    yield from _decay(optim)


def _decay(optim: Optim) -> Iterator[Finding]:
    """Check the keys of wsd's decay."""
    given = {key: getattr(optim, key) for key in ("decay_steps", "decay_ratio", "decay_type")}
    if optim.lr_scheduler_type != "wsd":
        for key, value in given.items():
            if value is not None:
                message = f"{quote(value)} has no effect with lr_scheduler_type {optim.lr_scheduler_type}"
                at = (f"optim.{key}", "optim.lr_scheduler_type")
                yield Finding(("optim", key), f"{message}; use wsd or leave it out", at)
        return
    reads = ("optim.lr_scheduler_type", "optim.decay_steps", "optim.decay_ratio")
    if optim.decay_steps is None and optim.decay_ratio is None:
        message = "'wsd' needs the length of its decay; give decay_steps, or decay_ratio such as 0.1"
        yield Finding(("optim", "lr_scheduler_type"), message, reads)
    if optim.decay_steps is not None and optim.decay_ratio is not None:
        message = f"{optim.decay_ratio} stands beside decay_steps {optim.decay_steps}; keep one of the two"
        yield Finding(("optim", "decay_ratio"), message, reads)


def _phases(spec: Spec) -> Iterator[Finding]:
    """Check that wsd's warm-up and decay together fit into the run, as far as the spec gives its length."""
    optim, steps = spec.optim, spec.train.max_steps
    if optim.lr_scheduler_type != "wsd":
        return
    if optim.decay_steps is not None and steps is not None:
        key, decay = "decay_steps", optim.decay_steps / steps
    elif optim.decay_ratio is not None:
        key, decay = "decay_ratio", optim.decay_ratio
    else:
        return
    warmup = optim.warmup_ratio or 0.0
    if optim.warmup_steps is not None and steps is not None:
        warmup = optim.warmup_steps / steps
    if warmup + decay > 1 + 1e-9:  # 0.9 + 0.1 is not always 1
        beside = f" after a warm-up of {warmup:.0%} of the run" if warmup else ""
        message = f"{getattr(optim, key)}{beside} is longer than what is left of the run; shorten one of them"
        reads = ("optim.decay_steps", "optim.decay_ratio", "optim.warmup_steps", "optim.warmup_ratio")
        yield Finding(("optim", key), message, (*reads, "train.max_steps"))


def _batch_scale(spec: Spec) -> Iterator[Finding]:
    scale, base = spec.optim.scale_with_batch, spec.optim.base_batch_size
    reads = ("optim.scale_with_batch", "optim.base_batch_size")
    if scale != "none" and base is None:
        message = (
            f"{quote(scale)} needs base_batch_size; give the global batch that learning_rate was found for"
        )
        yield Finding(("optim", "scale_with_batch"), message, reads)
    if scale == "none" and base is not None:
        message = f"{base} has no effect with scale_with_batch none; use linear or sqrt, or leave it out"
        yield Finding(("optim", "base_batch_size"), message, reads)


def _fp16(spec: Spec) -> Iterator[Finding]:
    """Check that fp16 is not combined with what it does not support."""
    if spec.train.precision != "fp16":
        return
    path, way_out = ("train", "precision"), "use bf16"
    accelerator = spec.accelerator
    if accelerator is not None and accelerator.name.lower() == "cpu":
        yield Finding(path, f"'fp16' is not offered on a CPU; {way_out}", ("train.precision",))
    for key, value, built in (
        ("parallel.zero_stage", spec.parallel.zero_stage, (1, 2, 3)),
        ("parallel.offload_optimizer.device", spec.parallel.offload_optimizer.device, ("none", "cpu")),
        ("parallel.offload_parameters.device", spec.parallel.offload_parameters.device, ("none", "cpu")),
        ("train.reduce_dtype", spec.train.reduce_dtype, (None, "fp32")),
    ):
        if value not in built:
            message = f"'fp16' with {key} {quote(value)} is not built yet; {way_out}"
            yield Finding(path, message, ("train.precision", key))


def _optimizer(spec: Spec) -> Iterator[Finding]:
    if spec.optim.name == "adamw" and spec.optim.momentum:
        message = (
            f"{spec.optim.momentum} has no effect with adamw, whose first moment is betas[0]; leave it out"
        )
        yield Finding(("optim", "momentum"), message, ("optim.momentum", "optim.name"))
    if spec.optim.name == "sgd":
        for key in ("betas", "eps"):
            value = getattr(spec.optim, key)
            if value != Optim.model_fields[key].default:
                message = f"{quote(value)} has no effect with sgd, which has no moments; leave it out"
                yield Finding(("optim", key), message, (f"optim.{key}", "optim.name"))


def _data(spec: Spec) -> Iterator[Finding]:
    if spec.data.on_too_long == "split" and spec.task_kind.answers:
        message = f"'split' is for pretraining, no row of {spec.task} can be cut; use error, drop or truncate"
        yield Finding(("data", "on_too_long"), message, ("data.on_too_long", "task"))
    yield from _packing(spec)
    yield from _sources(spec)
    if spec.data.eval_fraction is not None and spec.data.eval_count is not None:
        message = f"{spec.data.eval_count} and eval_fraction {spec.data.eval_fraction} both say how many rows"
        reads = ("data.eval_count", "data.eval_fraction")
        yield Finding(("data", "eval_count"), f"{message} are held out; give one of them", reads)
    for key in ("eval_every", "eval_on_start"):
        if getattr(spec.train, key) and not evaluates(spec.data):
            message = (
                f"{quote(getattr(spec.train, key))} needs rows to evaluate; give data.eval or "
                "data.eval_fraction, or leave it out"
            )
            yield Finding(("train", key), message, (f"train.{key}", "data.eval"))


def _sources(spec: Spec) -> Iterator[Finding]:
    """Check source weights: they are shares of a whole, so all sources have one or none has."""
    data, weighed = spec.data, [source.weight is not None for source in spec.data.train]
    if any(weighed) and not all(weighed):
        message = (
            f"has no weight, and data.train.{weighed.index(True)} has one; give all sources one, or none"
        )
        yield Finding(("data", "train", weighed.index(False)), message, ("data.train.weight",))
    for index, source in enumerate(data.eval):
        if source.weight is not None:
            message = f"{source.weight} has no effect, since every held-out row is evaluated; leave it out"
            yield Finding(("data", "eval", index, "weight"), message, ("data.eval.weight",))


def _best(spec: Spec) -> Iterator[Finding]:
    best, path = spec.checkpoint.keep_best, ("checkpoint", "keep_best")
    if best is not None and not evaluates(spec.data):
        message = f"{best} needs rows to evaluate; give data.eval or data.eval_fraction, or leave it out"
        yield Finding(path, message, ("checkpoint.keep_best", "data.eval"))
    if best is not None and spec.checkpoint.every is None:
        message = (
            f"{best} has no effect with every null, which writes one checkpoint; set every or leave it out"
        )
        yield Finding(path, message, ("checkpoint.keep_best", "checkpoint.every"))


def _packing(spec: Spec) -> Iterator[Finding]:
    data, key = spec.data, ("data", "max_tokens_per_micro_batch")
    budget, reads = data.max_tokens_per_micro_batch, ("data.max_tokens_per_micro_batch", "data.packing")
    if budget is not None and not data.packing:
        yield Finding(key, f"{budget} has no effect without data.packing; set it or leave this out", reads)
    elif budget is not None and budget < (longest := spec.longest_example):
        twice = "twice " if spec.task_kind.rows == 2 else ""
        message = f"{budget} is less than {twice}data.max_length {data.max_length}, so the longest "
        message += f"{spec.task_kind.unit} has no place; set it to {longest} or more"
        yield Finding(key, message, (*reads, "data.max_length"))
    if data.packing and not spec.task_kind.answers and data.on_too_long in ("drop", "truncate"):
        message = f"{quote(data.on_too_long)} has no effect on packed pretraining, where a document goes on"
        keys = ("data.on_too_long", "data.packing", "task")
        yield Finding(("data", "on_too_long"), f"{message} in the next row; leave it out", keys)


def _attention(spec: Spec) -> Iterator[Finding]:
    if spec.model.attention.startswith("flash") and spec.train.precision == "fp32":
        message = f"{quote(spec.model.attention)} cannot compute in fp32; use auto, or train.precision bf16"
        yield Finding(("model", "attention"), message, ("model.attention", "train.precision"))


def _keeps_a_start(spec: Spec) -> bool:
    return spec.task_kind.preference and spec.dpo is not None and spec.dpo.reference == "adapter"


def _offload(spec: Spec) -> Iterator[Finding]:
    for key in ("offload_optimizer", "offload_parameters"):
        offload = getattr(spec.parallel, key)
        reads = (f"parallel.{key}.device", f"parallel.{key}.nvme_path")
        if offload.device == "nvme" and offload.nvme_path is None:
            message = "'nvme' needs nvme_path; give a folder on a local disk of each host"
            yield Finding(("parallel", key, "device"), message, reads)
        if key == "offload_parameters" and offload.device == "nvme" and _keeps_a_start(spec):
            message = (
                "'nvme' with dpo.reference adapter: the adapter's start is exchanged in memory; set the "
                "reference to live or precomputed, or the device to cpu"
            )
            yield Finding(("parallel", key, "device"), message, (*reads[:1], "dpo.reference"))
        if offload.device != "nvme" and offload.nvme_path is not None:
            message = f"{quote(offload.nvme_path)} has no effect with device {offload.device}; leave it out"
            yield Finding(("parallel", key, "nvme_path"), message, reads)
        if offload.device == "none" and offload.pin_memory is not None:
            message = f"{quote(offload.pin_memory)} has no effect with device none; leave it out"
            keys = (f"parallel.{key}.pin_memory", f"parallel.{key}.device")
            yield Finding(("parallel", key, "pin_memory"), message, keys)


def _paths(spec: Spec) -> Iterator[Finding]:
    for key, value in (("output_dir", spec.output_dir), ("checkpoint.resume", spec.checkpoint.resume)):
        if not value.isprintable():
            message = f"{quote(value)} holds control characters; take them out"
            yield Finding(tuple(key.split(".")), message, (key,))


_CHECKS: tuple[Callable[[Spec], Iterator[Finding]], ...] = (
    _model,
    _trained,
    _batch,
    _warmup,
    _schedule,
    _phases,
    _batch_scale,
    _fp16,
    _optimizer,
    _groups,
    _data,
    _best,
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
