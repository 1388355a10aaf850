"""Compare values of a spec with what is usual for them, and with what the named GPU can compute.

docs/spec.md names the recipes that the ranges of learning rates are taken from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsft.spec.document import quote
from dsft.spec.findings import Finding, value_finding
from dsft.spec.schema import Spec
from dsft.spec.sources import kind_of

FAR = 5
"""A learning rate is warned about if it is outside the usual range by more than this factor."""

RATES: dict[str, tuple[float, float]] = {
    "SGD": (1e-4, 1.0),
    "AdamW on newly initialized weights": (6e-5, 3e-3),
    "preference training with LoRA": (1e-6, 1e-4),
    "preference training of all weights": (1e-7, 1e-5),
    "LoRA": (2e-5, 5e-4),
    "continued pretraining": (5e-6, 5e-4),
    "full fine-tuning": (1e-6, 5e-5),
}
"""What is trained -> the lowest and the highest usual learning rate."""

WITHOUT_BF16 = re.compile(
    r"\b(T4|V100S?|P100|P40|P4|K80|M40|M60|GTX|TITAN|Quadro RTX|(GeForce )?RTX ?20[5-8]0)\b", re.IGNORECASE
)
"""GPUs before NVIDIA's Ampere (compute capability below 8.0), by their names."""

NEEDS_AMPERE = "cannot be computed on {}: it needs compute capability 8.0 (Ampere, such as A100 or RTX 3090)"


def bf16_findings(spec: Spec) -> Iterator[Finding]:
    """Refuse bf16 where cluster.accelerator names a GPU that does not have it."""
    device = spec.accelerator
    if spec.train.precision == "bf16" and device is not None and WITHOUT_BF16.search(device.name):
        message = f"{NEEDS_AMPERE.format(device.name)}; use fp16 or fp32"
        yield value_finding(spec, "train.precision", message, "cluster.accelerator.name")


def rate_warnings(spec: Spec) -> Iterator[str]:
    """Warn about a learning rate that is far outside the usual range."""
    rate, kind = spec.optim.learning_rate, _kind(spec)
    low, high = RATES[kind]
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
    if spec.optim.name == "sgd":
        return "SGD"
    if spec.model.from_config is not None:
        return "AdamW on newly initialized weights"
    if spec.task_kind.kind == "preference training":
        return f"preference training {'of all weights' if spec.model.lora is None else 'with LoRA'}"
    if spec.model.lora is not None:
        return "LoRA"
    return "full fine-tuning" if spec.task_kind.kind == "fine-tuning" else "continued pretraining"
