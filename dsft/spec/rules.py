"""List what DeepSpeed 0.19.8 refuses or silently gets wrong, in one table, and check specs against it.

The verdict of a row is `refused` (validation fails), `fixed` (dsft corrects it itself) or `warned`
(validation passes with a warning). `source` is a file, line and symbol of DeepSpeed, or "ran" if it was tried
on its CPU backend. docs/limits.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dsft.spec.document import Finding, quote
from dsft.spec.schema import Spec

Verdict = Literal["refused", "fixed", "warned"]


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    keys       keys of the spec that the row is about; it is reported at the first
    applies    whether the row applies to a spec; None if it does not depend on the spec
    behavior  what DeepSpeed does
    answer     what to write instead, or what dsft does
    """

    title: str
    verdict: Verdict
    keys: tuple[str, ...]
    applies: Callable[[Spec], bool] | None
    behavior: str
    answer: str
    source: str

    def message(self, spec: Spec) -> str:
        """Return the message: the values, the rule, and what to do."""
        first, *others = (value_at(spec, key) for key in self.keys)
        together = [f"{key} {quote(value)}" for key, value in zip(self.keys[1:], others, strict=True)]
        values = f"{quote(first)}{' with ' if together else ''}{' and '.join(together)}"
        return f"{values}: {self.behavior}; {self.answer}"


def value_at(spec: Spec, key: str) -> Any:
    """Return the value at a dotted key; None if a section on the way is null."""
    value: Any = spec
    for part in key.split("."):
        value = getattr(value, part) if value is not None else None
    return value


def _pipeline(spec: Spec) -> bool:
    return spec.parallel.pipeline_stages > 1


def _bf16(spec: Spec) -> bool:
    return spec.train.precision == "bf16"


STAGES, ZERO = "parallel.pipeline_stages", "parallel.zero_stage"
OFFLOAD, OFFLOAD_PARAMETERS = "parallel.offload_optimizer.device", "parallel.offload_parameters.device"
PRECISION, CLIP, REDUCE = "train.precision", "train.max_grad_norm", "train.reduce_dtype"

RULES: tuple[Rule, ...] = (
    Rule(
        "pipeline with ZeRO 2 or 3",
        "refused",
        (STAGES, ZERO),
        lambda s: _pipeline(s) and s.parallel.zero_stage >= 2,
        "DeepSpeed's pipeline refuses sharded gradients and parameters, after everything is loaded",
        "set parallel.zero_stage to 0 or 1, or parallel.pipeline_stages to 1",
        "pipe/engine.py:77 gradients, ran",
    ),
    Rule(
        "pipeline with tied embeddings, ZeRO 1 and gradients kept in another type than the weights",
        "fixed",
        (STAGES, "model"),
        None,
        "the sum over the two copies is skipped in silence, and they drift apart",
        "dsft gives DeepSpeed the gradients of both copies wherever it keeps them",
        "pipe/engine.py:269 _exec_reduce_tied_grads, ran",
    ),
    Rule(
        "optimizer on NVMe below ZeRO 3",
        "refused",
        (OFFLOAD, ZERO),
        lambda s: (
            s.parallel.offload_optimizer.device == "nvme" and s.parallel.zero_stage < 3 and not _pipeline(s)
        ),
        "DeepSpeed keeps it in host memory instead, in silence",
        "set parallel.zero_stage to 3, or the device to cpu",
        "zero/stage_1_and_2.py:221 cpu_offload, ran",
    ),
    Rule(
        "optimizer on NVMe in a pipeline",
        "refused",
        (OFFLOAD, STAGES),
        lambda s: s.parallel.offload_optimizer.device == "nvme" and _pipeline(s),
        "only ZeRO 3 keeps it there, which a pipeline excludes; DeepSpeed keeps it in memory, in silence",
        "set the device to cpu, or parallel.pipeline_stages to 1 and parallel.zero_stage to 3",
        "zero/stage_1_and_2.py:221 cpu_offload, ran",
    ),
    Rule(
        "optimizer offload at ZeRO 0",
        "refused",
        (OFFLOAD, ZERO),
        lambda s: s.parallel.offload_optimizer.device != "none" and s.parallel.zero_stage == 0,
        "offload is a part of ZeRO, DeepSpeed ignores it at stage 0 in silence",
        "set parallel.zero_stage to 1 (without a pipeline also 2 or 3), or the device to none",
        "zero/config.py:95 stage",
    ),
    Rule(
        "parameter offload below ZeRO 3",
        "refused",
        (OFFLOAD_PARAMETERS, ZERO),
        lambda s: (
            s.parallel.offload_parameters.device != "none" and s.parallel.zero_stage < 3 and not _pipeline(s)
        ),
        "parameters are whole on every GPU there, DeepSpeed ignores the key in silence",
        "set parallel.zero_stage to 3, or the device to none",
        "ran at stages 1 and 2",
    ),
    Rule(
        "parameter offload in a pipeline",
        "refused",
        (OFFLOAD_PARAMETERS, STAGES),
        lambda s: s.parallel.offload_parameters.device != "none" and _pipeline(s),
        "only ZeRO 3 moves parameters in and out, which a pipeline excludes",
        "set the device to none, or parallel.pipeline_stages to 1 and parallel.zero_stage to 3",
        "pipe/engine.py:77 gradients, ran",
    ),
    Rule(
        "offloaded parameters that are not to be page-locked",
        "warned",
        ("parallel.offload_parameters.pin_memory", OFFLOAD_PARAMETERS),
        lambda s: (
            s.parallel.offload_parameters.device == "cpu"
            and s.parallel.offload_parameters.pin_memory is False
        ),
        "DeepSpeed locks those that are trained all the same",
        "only frozen ones are left as they are",
        "zero/stage3.py:906 pin_memory",
    ),
    Rule(
        "host memory that is page-locked",
        "fixed",
        ("parallel.offload_optimizer.pin_memory", OFFLOAD),
        None,
        "DeepSpeed locks what pin_memory says, however little the host has",
        "a run locks at most half of a host's memory, unless the spec says pin_memory",
        "zero/stage_1_and_2.py:565 pin_memory",
    ),
    Rule(
        "how much memory torch page-locks",
        "fixed",
        ("parallel.offload_optimizer.pin_memory", OFFLOAD),
        None,
        "each tensor takes the next power of two of bytes, up to twice its own",
        "from torch 2.13 on dsft has large ones locked as they are",
        "torch/include/ATen/core/CachingHostAllocator.h:303",
    ),
    Rule(
        "threads of the optimizer in host memory",
        "fixed",
        (OFFLOAD,),
        None,
        "one a rank under torchrun; under deepspeed each rank starts one for every core of the host",
        "dsft gives each rank of a host cores of its own, and a thread for each",
        "torch/distributed/run.py:872",
    ),
    Rule(
        "bf16 at ZeRO 0",
        "warned",
        (PRECISION, ZERO),
        lambda s: _bf16(s) and s.parallel.zero_stage == 0,
        "DeepSpeed adds up micro-batches in bf16 there, about 3 digits",
        "parallel.zero_stage 1 adds them up in fp32",
        "engine.py:2323 grad_accum_dtype",
    ),
    Rule(
        "fp32 gradients reduced in bf16",
        "warned",
        (REDUCE, PRECISION),
        lambda s: s.train.reduce_dtype == "bf16" and not _bf16(s),
        "gradients lose all but 3 digits on their way between ranks (1e-3 measured)",
        "leave train.reduce_dtype out for fp32",
        "engine.py:1719 communication_data_type, ran",
    ),
    Rule(
        "clipping at ZeRO 0 in fp32",
        "fixed",
        (CLIP, ZERO, PRECISION, STAGES),
        lambda s: s.parallel.zero_stage == 0 and not _bf16(s) and s.train.max_grad_norm > 0,
        "in a pipeline DeepSpeed takes the norm of the first stage alone (weights off by 1.4e-2)",
        "dsft clips by itself, by the norm over all stages, and writes gradient_clipping 0.0",
        "utils.py:394 is_model_parallel_parameter, engine.py:3511 clip_fp32_gradients, ran",
    ),
    Rule(
        "gradient norm at ZeRO 0 in fp32",
        "fixed",
        (ZERO, PRECISION),
        lambda s: s.parallel.zero_stage == 0 and not _bf16(s),
        "get_global_grad_norm always gives None",
        "dsft computes the norm from the reduced gradients",
        "ran",
    ),
    Rule(
        "clipping left out of the JSON",
        "fixed",
        (CLIP,),
        None,
        "DeepSpeed then clips to 1.0",
        "dsft always writes the key, 0.0 for off",
        "runtime/constants.py:203 GRADIENT_CLIPPING_DEFAULT, ran",
    ),
    Rule(
        "unknown keys in the JSON",
        "fixed",
        (),
        None,
        "DeepSpeed accepts them in silence at the top level and in eight sections",
        "dsft writes from a closed list, and refuses a --deepspeed_config file with other keys",
        "ran",
    ),
    Rule(
        'values "auto" in the JSON',
        "fixed",
        (),
        None,
        "dropped in sections; at the top level they fail at the first step",
        "dsft writes numbers, and fills a file's from the spec",
        "runtime/config_utils.py:55 strict, ran",
    ),
    Rule(
        "a hostfile that does not exist",
        "fixed",
        ("cluster.hosts",),
        None,
        "the launcher warns and trains on one machine",
        "dsft/train.py compares the world with the spec and with its launcher's hostfile, and stops",
        "launcher/runner.py:212 fetch_hostfile, ran",
    ),
    Rule(
        "micro-batches that vary in number from step to step",
        "fixed",
        ("train.accumulation_steps",),
        None,
        "set_train_batch_size moves the ZeRO engines' step to a wrong micro-batch",
        "dsft states each step's last micro-batch itself; only the pipeline uses set_train_batch_size",
        "engine.py:3463 micro_steps, ran",
    ),
    Rule(
        "a loss averaged over tokens",
        "fixed",
        ("train.accumulation_steps",),
        None,
        "DeepSpeed divides by micro-batches and ranks, which is wrong where their token counts differ",
        "dsft divides by the step's global count and undoes DeepSpeed's division in one place per engine",
        "engine.py:3413 gradient_accumulation_steps, ran",
    ),
    Rule(
        "scaling gradients before their sum",
        "fixed",
        (ZERO,),
        None,
        "prescale_gradients fails at ZeRO 2 and 3, gradient_predivide_factor can be wrong at 3",
        "dsft writes false and 1.0, and the mean as the reduction",
        "zero/stage3.py:1872 gradient_predivide_factor, ran",
    ),
    Rule(
        "gradient checkpointing in a pipeline",
        "fixed",
        ("model.gradient_checkpointing", STAGES),
        lambda s: _pipeline(s) and s.model.gradient_checkpointing,
        "DeepSpeed's own fails on the first stage, and the others wait until a timeout",
        "dsft uses transformers' own, not reentrant, inside each stage",
        "pipe/module.py, ran",
    ),
    Rule(
        "rows of varying length in a pipeline",
        "fixed",
        (STAGES, "data.max_length"),
        lambda s: _pipeline(s),
        "with fixed shapes a rank dies or hangs at the first other length",
        "dsft switches dynamic shapes on",
        "ran",
    ),
    Rule(
        "learning rate schedules",
        "fixed",
        ("optim.lr_scheduler_type",),
        None,
        "WarmupLR warms up by the logarithm, and WarmupDecayLR replaces the learning rate by 0.001",
        "dsft sets the learning rate as a function of the applied step, equal to transformers' schedules",
        "runtime/lr_schedules.py:52 WARMUP_LOG_RATE",
    ),
    Rule(
        "optimizers other than DeepSpeed's",
        "fixed",
        ("optim.name", ZERO, OFFLOAD),
        None,
        "ZeRO and offload refuse them by default",
        "dsft writes zero_allow_untested_optimizer and, with offload, zero_force_ds_cpu_optimizer",
        "engine.py:2342 zero_use_cpu_optimizer",
    ),
    Rule(
        "gradients that are infinite or not a number",
        "fixed",
        ("train.max_consecutive_nonfinite",),
        None,
        "in bf16 the step is skipped in silence, in fp32 it is applied",
        "dsft applies none of them, counts them, and stops after train.max_consecutive_nonfinite in a row",
        "engine.py:2639 check_grad_overflow",
    ),
    Rule(
        "gradient norms of large tensors on a CPU",
        "fixed",
        ("train.max_grad_norm", ZERO),
        None,
        "at ZeRO 0 and 1 in bf16 squares are added up in float32: 0.3 % too small at 4e7 elements, "
        "1.9 % at 1.5e8",
        "dsft takes norms of rows of 1,024 elements, which are exact to float32's rounding",
        "runtime/utils.py:578 norm, runtime/utils.py:950 norm, ran",
    ),
    Rule(
        "the loss scale of fp16 in a step in which it grows",
        "fixed",
        (PRECISION,),
        None,
        "the scale doubles before the gradient is divided by it, which comes out at half its size",
        "dsft's own scaler changes after the step, and a scale at its lowest value stops no step by itself",
        "stage_1_and_2.py:3047 _update_scale, stage_1_and_2.py:3198 combined_scale, "
        "stage3.py:2826 _update_scale, stage3.py:2981 combined_scale",
    ),
    Rule(
        "a skipped step under bf16 and offload at ZeRO 1 or 2",
        "fixed",
        (OFFLOAD, ZERO, "train.precision"),
        None,
        "its infinite gradient stays on the host, so no later step is finite either",
        "dsft clears it",
        "stage_1_and_2.py:3057 reset_cpu_buffers, ran",
    ),
    Rule(
        "checkpoints",
        "fixed",
        ("checkpoint.every",),
        None,
        "DeepSpeed's are pickles tied to the number of ranks and the ZeRO stage",
        "dsft writes its own, without pickle and without layout",
        "engine.py:4869 save_checkpoint, ran",
    ),
)


def rule_findings(spec: Spec) -> Iterator[Finding]:
    """Yield a finding for each row that refuses this spec."""
    for rule in _applying(spec, "refused"):
        yield Finding(tuple(rule.keys[0].split(".")), rule.message(spec), rule.keys)


def warnings(spec: Spec) -> tuple[str, ...]:
    """Return the warnings for this spec, one sentence each."""
    return tuple(f"{rule.keys[0]}: {rule.message(spec)}" for rule in _applying(spec, "warned"))


def _applying(spec: Spec, verdict: Verdict) -> Iterator[Rule]:
    return (
        rule for rule in RULES if rule.verdict == verdict and rule.applies is not None and rule.applies(spec)
    )
