"""Find values of a spec that are valid one by one but not together; `files` checks the files that it
names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from dsft.spec.architecture import MODEL, cut_findings
from dsft.spec.document import quote
from dsft.spec.findings import (
    ANSWERS,
    TEXTS,
    Finding,
    Row,
    above_1,
    finding,
    given,
    is_cpu,
    is_flash,
    missing,
    off,
    other_than,
    row_findings,
    value_finding,
)
from dsft.spec.formats import format_findings
from dsft.spec.held_out import name_findings
from dsft.spec.hosts import environment_findings, host_findings
from dsft.spec.optimizers import OPTIMIZERS
from dsft.spec.preferences import preference_findings
from dsft.spec.rules import NEEDS_AMPERE, WITHOUT_BF16
from dsft.spec.schema import SECTIONS, Optim, Reference, Schedule, Spec

WITHOUT_WARMUP: tuple[Schedule, ...] = ("constant",)
COMPILE, BALANCE, WEIGHT = "model.compile", "model.experts.balance", "model.experts.balance_weight"
CHECKPOINTING, CHUNKS, ATTENTION = "model.gradient_checkpointing", "model.mlp_chunks", "model.attention"
SPLIT, SCHEDULE, PRECISION = "parallel.sequence_parallel", "optim.lr_scheduler_type", "train.precision"
DEVICE, PACKING, BUDGET = "cluster.accelerator.name", "data.packing", "data.max_tokens_per_micro_batch"
QUANTIZE, COPIED = "model.quantize", "parallel.zero_hpz_partition_size"
OPTIMIZER, PARAMETERS = "parallel.offload_optimizer", "parallel.offload_parameters"
_OF_KIND = f"has no effect with {SCHEDULE} {{{SCHEDULE}}}; use"
_PER_SEGMENT = "does not work with attention per segment, which would be recompiled for each packed row; use "
_PER_SEGMENT += "model.attention: auto in bf16 on GPUs, or set data.packing or model.compile to false"
_CHECKPOINTED = "has no effect without gradient checkpointing, since it is for checkpointed layers; set "
_CHECKPOINTED += f"{CHECKPOINTING}: true"
_EVALUATION = "needs rows to evaluate; give data.eval, data.eval_fraction or data.eval_count, or leave it out"
_NOT_EVALUATED = {"data.eval": off, "data.eval_fraction": missing, "data.eval_count": missing}

ROWS: tuple[Row, ...] = (
    ("model.trust_remote_code", bool, {},
     "is not offered, since code that comes with a model is never run; use a model whose class is in "
     "transformers"),
    # experts
    (BALANCE, other_than("none"), {WEIGHT: missing},
     "needs balance_weight; add it, such as 0.0001 with sequence or 0.001 with global_batch"),
    (WEIGHT, given, {BALANCE: ("none",)},
     "has no effect with balance none; set that to sequence or global_batch, or leave this out"),
    (BALANCE, other_than("none"), {COMPILE: bool},
     "is not supported with model.compile; set it to none, or model.compile to false"),
    ("model.experts.freeze_router", bool, {"model.lora": given},
     "has no effect with model.lora, which trains no router; leave it out"),
    # weights in 4 bits
    (QUANTIZE, given, {"model.lora": missing},
     "is for the frozen weights under adapters; add model.lora, or leave it out"),
    (QUANTIZE, given, {"model.from_config": given},
     "is for pretrained weights; give name_or_path in place of from_config, or leave it out"),
    (f"{QUANTIZE}_skip", bool, {QUANTIZE: missing},
     f"has no effect without {QUANTIZE}; add {QUANTIZE}: nf4, or leave it out"),
    (QUANTIZE, given, {COMPILE: bool},
     f"is not supported with {COMPILE}; set that to false, or leave this out"),
    (QUANTIZE, given, {"model.lora.use_dora": bool, "model.lora.dropout": bool},
     "is not supported with the dropout of DoRA, which keeps all weights dequantized for the backward; set "
     "model.lora.dropout to 0, or leave this out"),
    *((QUANTIZE, given, {key: other_than(*values)},
       f"is not supported with {key} {{{key}!r}}; set that to {values[0]}, or leave this out")
      for key, values in (
          (PRECISION, ("bf16", "fp32")), (f"{PARAMETERS}.device", ("none", "cpu")),
      )),
    *((f"{section}.reference_quantize", given, {PRECISION: other_than("bf16", "fp32")},
       f"is not supported with {PRECISION} {{{PRECISION}!r}}; set that to bf16, or leave this out")
      for section, kind in SECTIONS.items() if issubclass(kind, Reference)),
    # sequence parallelism
    (f"{SPLIT}_across_hosts", bool, {SPLIT: (1,)},
     f"has no effect without {SPLIT}; set that to the number of ranks of a group, or leave this out"),
    (SPLIT, above_1, {ATTENTION: other_than("auto", "sdpa")},
     "does not work with model.attention {model.attention}; set that to auto"),
    (SPLIT, above_1, {COMPILE: bool},
     "is not supported with model.compile; set it to 1, or model.compile to false"),
    # second copies of the parameters
    (COPIED, above_1, {"parallel.zero_stage": other_than(3)},
     "is for ZeRO 3, which shards the parameters; set parallel.zero_stage: 3, or this to 1"),
    (COPIED, above_1, {f"{PARAMETERS}.device": other_than("none")},
     f"is not supported with {PARAMETERS}.device {{{PARAMETERS}.device!r}}, where DeepSpeed would keep the "
     "copy too; set one of them to its default"),
    # schedule
    ("optim.warmup_ratio", given, {"optim.warmup_steps": given},
     "is given together with warmup_steps {optim.warmup_steps}; keep one of them"),
    *((key, bool, {SCHEDULE: WITHOUT_WARMUP}, f"{_OF_KIND} constant_with_warmup, or leave it out")
      for key in ("optim.warmup_steps", "optim.warmup_ratio")),
    (SCHEDULE, ("cosine_with_min_lr",), {"optim.min_lr_ratio": missing},
     "needs min_lr_ratio; add it, such as 0.1"),
    ("optim.min_lr_ratio", given, {SCHEDULE: other_than("cosine_with_min_lr", "wsd")},
     f"{_OF_KIND} cosine_with_min_lr or wsd, or leave it out"),
    *((key, given, {SCHEDULE: other_than("wsd")}, f"{_OF_KIND} wsd, or leave it out")
      for key in ("optim.decay_steps", "optim.decay_ratio", "optim.decay_type")),
    (SCHEDULE, ("wsd",), {"optim.decay_steps": missing, "optim.decay_ratio": missing},
     "needs the length of its decay; add decay_steps, or decay_ratio such as 0.1"),
    ("optim.decay_ratio", given, {SCHEDULE: ("wsd",), "optim.decay_steps": given},
     "is given together with decay_steps {optim.decay_steps}; keep one of them"),
    ("optim.scale_with_batch", other_than("none"), {"optim.base_batch_size": missing},
     "needs base_batch_size; add the global batch size for which learning_rate was tuned"),
    ("optim.base_batch_size", given, {"optim.scale_with_batch": ("none",)},
     "has no effect with scale_with_batch none; set that to linear or sqrt, or leave this out"),
    # precision and optimizer
    (PRECISION, ("fp16",), {DEVICE: is_cpu}, "is not offered on a CPU; use bf16"),
    (PRECISION, ("bf16",), {DEVICE: lambda name: WITHOUT_BF16.search(name or "")},
     NEEDS_AMPERE.format("{cluster.accelerator.name}") + "; use fp16 or fp32"),
    *((PRECISION, ("fp16",), {key: other_than(*values)},
       f"is not supported yet with {key} {{{key}!r}}; use bf16")
      for key, values in (
          ("parallel.zero_stage", (1, 2, 3)), (f"{OPTIMIZER}.device", ("none", "cpu")),
          (f"{PARAMETERS}.device", ("none", "cpu")), ("train.reduce_dtype", (None, "fp32")),
      )),
    ("train.tf32", bool, {DEVICE: is_cpu},
     "has no effect on a CPU, only with precision fp32 on GPUs; leave it out"),
    ("train.tf32", bool, {PRECISION: other_than("fp32"), DEVICE: lambda name: not is_cpu(name)},
     "has no effect with precision {train.precision}, only with precision fp32 on GPUs; leave it out"),
    ("optim.name", lambda name: not OPTIMIZERS[name].offloads, {f"{OPTIMIZER}.device": other_than("none")},
     f"is not supported with {OPTIMIZER}.device {{{OPTIMIZER}.device!r}}; use adamw, or set that to none"),
    ("optim.name", lambda name: OPTIMIZERS[name].matrices is not None, {"model.lora": given},
     "is for whole matrices, not for the factors of adapters; use adamw, or leave model.lora out"),
    # data and evaluation
    ("data.on_too_long", ("split",), {"task": ANSWERS},
     "is for pretraining, since a row of task {task} cannot be divided; use error, drop or truncate"),
    ("data.eval_count", given, {"data.eval_fraction": given},
     "is given together with eval_fraction {data.eval_fraction}, and both set how many rows are held out; "
     "keep one of them"),
    *((key, bool, _NOT_EVALUATED, _EVALUATION)
      for key in ("train.eval_every", "train.eval_on_start", "checkpoint.keep_best")),
    ("checkpoint.keep_best", given, {"checkpoint.every": missing},
     "has no effect with checkpoint.every null, which writes a single checkpoint; set checkpoint.every, "
     "or leave it out"),
    # packing, attention, compiled layers, kernels
    (BUDGET, given, {PACKING: off}, "has no effect without packing; set data.packing: true, or leave it out"),
    ("data.on_too_long", ("drop", "truncate"), {PACKING: bool, "task": TEXTS},
     "has no effect on packed pretraining: documents continue in the next row; leave it out"),
    (ATTENTION, is_flash, {PRECISION: ("fp32",)},
     "does not support fp32; use auto, or train.precision: bf16"),
    (COMPILE, bool, {"parallel.zero_stage": (3,)},
     "does not work with ZeRO 3, whose hooks that gather parameters break the compiled graph; set "
     "parallel.zero_stage: 2 or model.compile: false"),
    (COMPILE, bool, {"parallel.pipeline_stages": above_1},
     "is not supported yet in a pipeline; set pipeline_stages: 1 or model.compile: false"),
    (COMPILE, bool, {ATTENTION: lambda name: name != "auto" and not is_flash(name), PACKING: bool},
     _PER_SEGMENT),
    (COMPILE, bool, {ATTENTION: ("auto",), PRECISION: ("fp32",), PACKING: bool}, _PER_SEGMENT),
    (COMPILE, bool, {ATTENTION: ("auto",), PRECISION: other_than("fp32"), DEVICE: is_cpu, PACKING: bool},
     _PER_SEGMENT),
    (COMPILE, bool, {"model.lora.use_dora": bool},
     "does not work with DoRA, which breaks the graph, so that torch.compile recompiles until it gives up; "
     "set model.lora.use_dora or model.compile to false"),
    ("model.kernels", ("liger",), {DEVICE: is_cpu},
     "needs a GPU, since its kernels are written in Triton; set it to torch"),
    ("model.kernels", ("liger",), {COMPILE: bool},
     "cannot be combined with model.compile, which fuses kernels itself; keep one of them"),
    ("model.activation_offload", bool, {CHECKPOINTING: off}, _CHECKPOINTED),
    (CHUNKS, above_1, {CHECKPOINTING: off}, _CHECKPOINTED),
    (CHUNKS, above_1, {COMPILE: bool},
     "is not supported with model.compile; leave it out, or set model.compile to false"),
    # offload
    *(row for section in (OPTIMIZER, PARAMETERS) for row in (
        (f"{section}.device", ("nvme",), {f"{section}.nvme_path": missing},
         "needs nvme_path; add a folder on a local disk of each host"),
        (f"{section}.nvme_path", given, {f"{section}.device": other_than("nvme")},
         f"has no effect with device {{{section}.device}}; leave it out"),
        (f"{section}.pin_memory", given, {f"{section}.device": ("none",)},
         "has no effect with device none; leave it out"),
    )),
    *((key, lambda text: not text.isprintable(), {}, "contains control characters; remove them")
      for key in ("output_dir", "checkpoint.resume")),
)  # fmt: skip


def combinations(spec: Spec) -> Iterator[Finding]:
    """Yield all findings that follow from the spec alone."""
    yield from row_findings(spec, ROWS)
    for check in _CHECKS:
        yield from check(spec)


def _model(spec: Spec) -> Iterator[Finding]:
    name, config = spec.model.name_or_path, spec.model.from_config
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


def _groups(spec: Spec) -> Iterator[Finding]:
    for index, group in enumerate(spec.optim.groups):
        if group.learning_rate is None and group.weight_decay is None:
            message = f"the group {quote(group.parameters)} sets neither learning_rate nor weight_decay; set "
            yield finding(f"optim.groups.{index}", f"{message}one, or remove the group")


def _optimizer(spec: Spec) -> Iterator[Finding]:
    """Refuse keys of optim that its optimizer does not have."""
    name, own = spec.optim.name, spec.optim.facts
    for key in dict.fromkeys(key for facts in OPTIMIZERS.values() for key in facts.keys):
        if key not in own.keys and getattr(spec.optim, key) != Optim.model_fields[key].default:
            others = " or ".join(other for other, facts in OPTIMIZERS.items() if key in facts.keys)
            end = own.instead.get(key, f"; set name to {others}, or leave it out")
            yield value_finding(spec, f"optim.{key}", f"has no effect with {name}{end}", "optim.name")


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


def _decay(spec: Spec) -> Iterator[Finding]:
    """Check that warm-up and wsd's decay together fit into the run, as far as the spec gives its length."""
    optim, steps = spec.optim, spec.train.max_steps
    ratio, decay_steps = optim.decay_ratio, optim.decay_steps
    if optim.lr_scheduler_type != "wsd":
        return
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


def _lengths(spec: Spec) -> Iterator[Finding]:
    """Compare data.max_length with the keys that must not be smaller, or larger."""
    longest, most = spec.data.max_length, spec.data.max_tokens_per_micro_batch
    if spec.parallel.sequence_parallel > longest:
        message = f"is more than data.max_length {longest}, so some ranks would never have a token of a row; "
        yield value_finding(spec, SPLIT, f"{message}set {longest} or less", "data.max_length")
    if most is not None and spec.data.packing and most < spec.longest_example:
        times = {1: "", 2: "twice "}.get(spec.task_kind.rows, f"{spec.task_kind.rows} times ")
        limit = f"{times}data.max_length {longest}"
        message = f"is less than {limit}, so the longest {spec.task_kind.unit} would not fit; "
        message += f"set it to {spec.longest_example} or more"
        yield value_finding(spec, BUDGET, message, PACKING, "data.max_length")


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


_CHECKS: tuple[Callable[[Spec], Iterator[Finding]], ...] = (
    _model, _trained, _batch, _decay, _lengths, _groups, _optimizer, _weights, name_findings,
    format_findings, preference_findings, cut_findings, host_findings, environment_findings,
)  # fmt: skip
