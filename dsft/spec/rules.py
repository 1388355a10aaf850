"""List the settings that DeepSpeed 0.19.8 refuses or silently gets wrong, and check specs against this table.

The verdict of a row is `refused` (validation fails) or `warned` (validation passes with a warning). `source`
is a file, line and symbol of DeepSpeed, or "ran" if it was tried on its CPU backend. docs/limits.md has the
table, and another one of what dsft corrects itself. docs/spec.md names the recipes that the ranges of usual
learning rates are taken from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dsft.spec.architecture import text_part, unused_loss
from dsft.spec.document import quote
from dsft.spec.files import model_config
from dsft.spec.findings import Finding, finding, value_at
from dsft.spec.schema import Spec
from dsft.spec.sources import kind_of

Verdict = Literal["refused", "warned"]


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    keys      keys of the spec that the row is about; it is reported at the first
    applies   whether the row applies to a spec
    behavior  what DeepSpeed does
    answer    what to write instead
    """

    title: str
    verdict: Verdict
    keys: tuple[str, ...]
    applies: Callable[[Spec], bool]
    behavior: str
    answer: str
    source: str

    def message(self, spec: Spec) -> str:
        """Return the message: the values, the rule, and what to do."""
        first, *others = self.keys
        values = " and ".join(f"{key} {quote(value_at(spec, key))}" for key in others)
        return f"{quote(value_at(spec, first))} with {values}: {self.behavior}; {self.answer}"


def _has_pipeline(spec: Spec) -> bool:
    return spec.parallel.pipeline_stages > 1


STAGES, ZERO = "parallel.pipeline_stages", "parallel.zero_stage"
OFFLOAD, OFFLOAD_PARAMETERS = "parallel.offload_optimizer.device", "parallel.offload_parameters.device"

RULES: tuple[Rule, ...] = (
    Rule(
        "pipeline with ZeRO 2 or 3",
        "refused",
        (STAGES, ZERO),
        lambda s: _has_pipeline(s) and s.parallel.zero_stage >= 2,
        "DeepSpeed's pipeline refuses sharded gradients and parameters, but only after everything is loaded",
        "set parallel.zero_stage to 0 or 1, or parallel.pipeline_stages to 1",
        "pipe/engine.py:77 gradients, ran",
    ),
    Rule(
        "optimizer on NVMe below ZeRO 3",
        "refused",
        (OFFLOAD, ZERO),
        lambda s: (
            s.parallel.offload_optimizer.device == "nvme"
            and s.parallel.zero_stage < 3
            and not _has_pipeline(s)
        ),
        "DeepSpeed silently keeps the optimizer states in host memory instead",
        "set parallel.zero_stage to 3, or the device to cpu",
        "zero/stage_1_and_2.py:221 cpu_offload, ran",
    ),
    Rule(
        "optimizer on NVMe in a pipeline",
        "refused",
        (OFFLOAD, STAGES),
        lambda s: s.parallel.offload_optimizer.device == "nvme" and _has_pipeline(s),
        "only ZeRO 3, which excludes a pipeline, keeps them there; DeepSpeed silently uses host memory",
        "set the device to cpu, or parallel.pipeline_stages to 1 and parallel.zero_stage to 3",
        "zero/stage_1_and_2.py:221 cpu_offload, ran",
    ),
    Rule(
        "optimizer offload at ZeRO 0",
        "refused",
        (OFFLOAD, ZERO),
        lambda s: s.parallel.offload_optimizer.device != "none" and s.parallel.zero_stage == 0,
        "offload is a part of ZeRO, and DeepSpeed silently ignores it at stage 0",
        "set parallel.zero_stage to 1 (without a pipeline also 2 or 3), or the device to none",
        "zero/config.py:95 stage",
    ),
    Rule(
        "parameter offload below ZeRO 3",
        "refused",
        (OFFLOAD_PARAMETERS, ZERO),
        lambda s: (
            s.parallel.offload_parameters.device != "none"
            and s.parallel.zero_stage < 3
            and not _has_pipeline(s)
        ),
        "every GPU holds all parameters at this stage, and DeepSpeed silently ignores the key",
        "set parallel.zero_stage to 3, or the device to none",
        "ran at stages 1 and 2",
    ),
    Rule(
        "parameter offload in a pipeline",
        "refused",
        (OFFLOAD_PARAMETERS, STAGES),
        lambda s: s.parallel.offload_parameters.device != "none" and _has_pipeline(s),
        "only ZeRO 3, which excludes a pipeline, moves parameters in and out",
        "set the device to none, or parallel.pipeline_stages to 1 and parallel.zero_stage to 3",
        "pipe/engine.py:77 gradients, ran",
    ),
    Rule(
        "offloaded parameters that are not to be pinned",
        "warned",
        ("parallel.offload_parameters.pin_memory", OFFLOAD_PARAMETERS),
        lambda s: (
            s.parallel.offload_parameters.device == "cpu"
            and s.parallel.offload_parameters.pin_memory is False
        ),
        "DeepSpeed pins trained parameters all the same",
        "only frozen ones stay unpinned",
        "zero/stage3.py:906 pin_memory",
    ),
    Rule(
        "second copies of the parameters on one host",
        "warned",
        ("parallel.zero_hpz_partition_size", "cluster.hosts"),
        lambda s: s.parallel.zero_hpz_partition_size > 1 and len(s.cluster.hosts if s.cluster else ()) == 1,
        "the copies take memory, and there is no traffic between hosts that they could save",
        "set it to 1",
        "zero/partition_parameters.py:1573 zero_param_process_group",
    ),
    Rule(
        "bf16 at ZeRO 0",
        "warned",
        ("train.precision", ZERO),
        lambda s: s.train.precision == "bf16" and s.parallel.zero_stage == 0,
        "DeepSpeed then accumulates the gradients of micro-batches in bf16, with about 3 digits",
        "parallel.zero_stage 1 accumulates them in fp32",
        "engine.py:2323 grad_accum_dtype",
    ),
    Rule(
        "fp32 gradients reduced in bf16",
        "warned",
        ("train.reduce_dtype", "train.precision"),
        lambda s: s.train.reduce_dtype == "bf16" and s.train.precision != "bf16",
        "the reduction over ranks leaves gradients only 3 digits (1e-3 measured)",
        "leave train.reduce_dtype out to reduce in fp32",
        "engine.py:1719 communication_data_type, ran",
    ),
)


def rule_findings(spec: Spec) -> Iterator[Finding]:
    """Yield a finding for each row that refuses this spec."""
    for rule in RULES:
        if rule.verdict == "refused" and rule.applies(spec):
            yield finding(rule.keys[0], rule.message(spec), *rule.keys[1:])


def warnings(spec: Spec, *, check_files: bool = True) -> tuple[str, ...]:
    """Return the warnings for this spec and for the config.json of its model, one sentence each."""
    warned = (rule for rule in RULES if rule.verdict == "warned" and rule.applies(spec))
    config, _ = model_config(spec, check_files=check_files)
    of_model = unused_loss(text_part(config)) if config is not None else ()
    of_rules = (f"{rule.keys[0]}: {rule.message(spec)}" for rule in warned)
    return (*of_rules, *rate_warnings(spec), *text_warnings(spec), *of_model)


# --- usual values -----------------------------------------------------------------------------------------

FAR = 5
"""A learning rate is warned about if it is outside the usual range by more than this factor."""

RATES: dict[str, tuple[float, float]] = {
    "AdamW on newly initialized weights": (6e-5, 3e-3),
    "preference training with LoRA": (1e-6, 1e-4),
    "preference training of all weights": (1e-7, 1e-5),
    "LoRA": (2e-5, 5e-4),
    "continued pretraining": (5e-6, 5e-4),
    "full fine-tuning": (1e-6, 5e-5),
}
"""What is trained -> the lowest and the highest usual learning rate of AdamW."""

WITHOUT_BF16 = re.compile(
    r"\b(T4|V100S?|P100|P40|P4|K80|M40|M60|GTX|TITAN|Quadro RTX|(GeForce )?RTX ?20[5-8]0)\b", re.IGNORECASE
)
"""GPUs before NVIDIA's Ampere (compute capability below 8.0), by their names."""

NEEDS_AMPERE = "cannot be computed on {}: it needs compute capability 8.0 (Ampere, such as A100 or RTX 3090)"


def rate_warnings(spec: Spec) -> Iterator[str]:
    """Warn about a learning rate that is far outside the usual range."""
    rate, kind = spec.optim.learning_rate, _kind(spec)
    kind, low, high = spec.optim.facts.rates or (kind, *RATES[kind])
    if not low / FAR <= rate <= high * FAR:
        yield (
            f"optim.learning_rate: {quote(rate)} is far {'above' if rate > high else 'below'} the usual "
            f"range for {kind}, {low:g} to {high:g}; check it"
        )


def text_warnings(spec: Spec) -> Iterator[str]:
    """Warn about files of plain text in SFT, whose lines are rows without prompts."""
    for number, source in enumerate(spec.data.train):
        if spec.task == "sft" and kind_of(source.path) == "text":
            yield (
                f"data.train.{number}.path: {quote(source.path)} is plain text, so all tokens are trained "
                "on; for pretraining set task: pretrain, for prompts with answers give JSON (docs/formats.md)"
            )


def _kind(spec: Spec) -> str:
    """Return the key of RATES for what the spec trains."""
    if spec.model.from_config is not None:
        return "AdamW on newly initialized weights"
    if spec.task_kind.training == "preference training":
        return f"preference training {'of all weights' if spec.model.lora is None else 'with LoRA'}"
    if spec.model.lora is not None:
        return "LoRA"
    return "full fine-tuning" if spec.task_kind.training == "fine-tuning" else "continued pretraining"
