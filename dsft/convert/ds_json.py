"""Convert a DeepSpeed JSON, which names no model and no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsft.convert import trl
from dsft.convert.arguments import Tool, training
from dsft.convert.draft import Draft
from dsft.convert.parallel import deepspeed

_ZERO = ("stage", "offload_optimizer", "offload_param", "zero_hpz_partition_size")
_JSON = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps", "train_batch_size": "batch_size",
    "gradient_clipping": "max_grad_norm", "bf16.enabled": "bf16", "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate", "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon", "optimizer.params.betas": "adam_beta1 adam_beta2",
    "scheduler.type": "lr_scheduler_type", "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps", "scheduler.params.cos_min_ratio": "min_lr_rate",
}  # fmt: skip
"""Key of a DeepSpeed JSON -> key of TrainingArguments, or keys of the parts of its list."""


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    """Fill in a draft. Batch sizes, optimizer and precision are those of TrainingArguments, as transformers
    fills in "auto"."""
    given = draft.given
    keys: dict[str, Any] = {}
    for key, ours in _JSON.items():
        value: Any = given
        for part in key.split("."):
            value = (value or {}).get(part)
        parts = value if isinstance(value, list) else [value]
        keys |= {
            name: part for name, part in zip(ours.split(), parts, strict=False) if part not in (None, "auto")
        }
    draft.given = keys
    draft.put("task", task or "sft", "--task sets another one")
    draft.put("data.max_length", 2048, "not in the JSON: choose it")
    deepspeed(draft, given, draft.path.name)
    training(draft, "bf16")
    if draft.comments["train.precision"] not in keys:
        draft.comments["train.precision"] = "neither bf16 nor fp16 is true in the JSON: choose it"
    if "warmup_steps" in keys and given["scheduler"]["params"].get("warmup_type") != "linear":
        draft.left["scheduler.params.warmup_type"] = "the rate rises logarithmically there, linearly here"
    known = {key.partition(".")[0] for key in _JSON} | {"zero_optimization", "sequence_parallel_size"}
    others = [key for key in given if key not in known]
    others += [f"zero_optimization.{key}" for key in given.get("zero_optimization") or {} if key not in _ZERO]
    reason = "dsft writes DeepSpeed's JSON itself (dsft plan SPEC --explain shows every key and why)"
    draft.left |= dict.fromkeys(others, reason)


TOOL = Tool(
    title="DeepSpeed",
    marks=("zero_optimization", "train_micro_batch_size_per_gpu"),
    defaults=trl.TOOL.defaults,
    keys={},
    convert=convert,
)
