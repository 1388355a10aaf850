"""Convert the arguments of ms-swift: its YAML or JSON config, or the args.json that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import exists
from pathlib import Path
from typing import Any

from dsft.convert import arguments
from dsft.convert.draft import Draft, names_in, number, whole
from dsft.convert.llamafactory import reference
from dsft.convert.parallel import parallel
from dsft.convert.tool import Tool, refuse
from dsft.spec.document import quote

_METHODS = {"dpo": "sigmoid", "simpo": "simpo", "orpo": "orpo", "cpo": "simpo"}
_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_TRAIN_ON = {"last_round": "last", "all": "all", "default": "assistant"}
_THINKING = ("enable_thinking", "preserve_thinking", "add_non_thinking_prefix", "disable_ignore_empty_think")
_TOO_LONG = {"delete": "drop", "right": "truncate", "left": "truncate", "split": "split"}


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    method = draft.get("rlhf_type")
    if task is None and method is not None and method not in _METHODS:
        raise refuse("rlhf_type", str(method))
    if draft.get("task_type") not in (None, "causal_lm"):
        raise refuse("task_type", str(draft.get("task_type")))
    task = task or ("dpo" if method else "pretrain" if draft.get("use_chat_template") is False else "sft")
    draft.put("task", task, "rlhf_type" if method else "choose another one with --task sft, pretrain or dpo")
    draft.carry("model.name_or_path", "model", note="a name of ModelScope may differ on the Hugging Face hub")
    draft.carry("model.add_tokens", "new_special_tokens", to=lambda value: names_in(value) or None)
    arguments.attention(draft)
    arguments.checkpointing(draft, by_default=True)
    arguments.quantization(draft)
    kind = draft.get("tuner_type", "train_type", "sft_type")
    if kind == "lora":
        arguments.lora(draft, "tuner_type")
    elif kind != "full":
        for name in ("tuner_type", "train_type", "sft_type"):
            draft.leave(name, f"{quote(kind)} is not offered; dsft has model.lora and full training")
    draft.defaults = {**draft.defaults, "learning_rate": 1e-4 if kind == "lora" else 1e-5}
    _data(draft, task)
    if task == "dpo":
        _preferences(draft, method)
    parallel(draft)
    given = draft.get("torch_dtype", "dtype")
    arguments.precision(draft, _PRECISION.get(str(given), "bf16"))
    draft.comments["train.precision"] = "torch_dtype" if given else "the model's own type there"
    if not draft.is_given("gradient_accumulation_steps"):
        together = draft.spec.get("parallel", {}).get("sequence_parallel", 1)
        note = f" / sequence_parallel_size {together}" if together > 1 else ""
        note = f"default of gradient_accumulation_steps: 16{note} over all GPUs"
        draft.put("train.global_batch_size", max(16 // together, 1), note)
    arguments.training(draft)


def _data(draft: Draft, task: str) -> None:
    for name, ours in (("dataset", "train"), ("val_dataset", "eval")):
        value = draft.get(name)
        entries = [_source(entry) for entry in (value if isinstance(value, list) else names_in(value or []))]
        if entries:
            draft.put(f"data.{ours}", entries, name)
    weights = draft.get("interleave_prob")
    if weights:
        for source, weight in zip(draft.spec["data"]["train"], weights, strict=False):
            source["weight"] = number(weight)
    columns = draft.get("columns")
    if isinstance(columns, Mapping):
        draft.leave("columns", "write it the other way round, {name in dsft: name in the file}, per source")
    draft.carry("data.eval_fraction", "split_dataset_ratio", to=lambda value: number(value) or None)
    _rows(draft, task)


def _rows(draft: Draft, task: str) -> None:
    """Convert what happens to rows: length, packing, targets, template."""
    if draft.carry("data.max_length", "max_length", to=whole) is None:
        draft.put("data.max_length", 2048, "not in the config, which then takes the model's own maximum")
    strategy = str(draft.get("truncation_strategy"))
    if task != "pretrain":
        ours = _TOO_LONG.get(strategy, "drop")
        draft.put("data.on_too_long", "truncate" if ours == "split" else ours, "truncation_strategy")
    if draft.is_on("packing"):
        draft.put("data.packing", True, f"packing; {arguments.PACKED}" if task != "pretrain" else "packing")
    elif draft.is_on("padding_free"):
        draft.put("data.packing", True, "padding_free: rows without padding, the same examples a step")
    last = _targets(draft, task)
    draft.leave("template", "dsft takes the tokenizer's own chat template (data.chat_template for another)")
    for name in ("system", "agent_template", "response_prefix"):
        draft.leave(name, "the chat template decides it; a system turn can be in the rows")
    if task != "pretrain":
        _thinking(draft, last=last)


def _targets(draft: Draft, task: str) -> bool:
    """Convert loss_scale, such as last_round+ignore_empty_think, and return whether only the last answer is
    trained on there."""
    parts = [part for part in str(draft.get("loss_scale") or "").split("+") if part not in ("", "default")]
    base = next((part for part in parts if part in _TRAIN_ON), "last_round" if task == "dpo" else "default")
    if base in parts:
        draft.put("data.train_on", _TRAIN_ON[base], "loss_scale")
    others = [part for part in parts if part not in (*_TRAIN_ON, "ignore_empty_think")]
    if others:
        draft.leave("loss_scale", f"{quote('+'.join(others))}: no weights for parts of an answer here")
    return base == "last_round"


def _thinking(draft: Draft, *, last: bool) -> None:
    """Set data.thinking where a key is about thoughts. There enable_thinking: false gives prompts an empty
    thought; add_non_thinking_prefix adds one, which is not trained on, to answers without; thoughts of
    earlier turns stay unless only the last answer is trained on."""
    given = [name for name in _THINKING if draft.is_given(name)]
    keep = draft.is_on("preserve_thinking") if draft.is_given("preserve_thinking") else not last
    if draft.is_given("enable_thinking") and not draft.is_on("enable_thinking"):
        note = "prompts with an empty thought, as there; thoughts in the rows are removed, there they stay"
        draft.put("data.thinking", "strip", f"enable_thinking; {note}")
    elif draft.is_given("add_non_thinking_prefix") and not draft.is_on("add_non_thinking_prefix"):
        draft.put("data.thinking", "as_in_template", "add_non_thinking_prefix")
    elif given or "ignore_empty_think" in str(draft.get("loss_scale")):
        named = ", ".join(given) or "loss_scale"
        draft.put(
            "data.thinking", "keep" if keep else "empty", f"{named}; thoughts of earlier turns as there"
        )
    draft.read.update(_THINKING)


def _source(entry: Any) -> dict[str, Any]:
    """Return the source of `PATH` or `ID[:SUBSET][#ROWS]`."""
    name, _, rows = str(entry).partition("#")
    source: dict[str, Any] = {"path": name.removeprefix("HF::").removeprefix("MS::")}
    if ":" in source["path"] and not exists(source["path"]):
        source["path"] += ":train"
    if rows:
        source["max_rows"] = whole(rows)
    return source


def _preferences(draft: Draft, method: str | None) -> None:
    losses = draft.get("loss_type") or []
    losses = losses if isinstance(losses, list) else [losses]
    loss = str(losses[0]) if losses else _METHODS[method or "dpo"]
    if len(losses) > 1 or loss not in ("sigmoid", "robust", "ipo", "hinge", "apo_zero", "simpo", "orpo"):
        raise refuse("loss_type", ", ".join(map(str, losses)))
    draft.put("dpo.loss_type", loss, "loss_type" if losses else "rlhf_type")
    draft.defaults = {**draft.defaults, "beta": 2.0 if method == "simpo" else 0.1}
    draft.carry("dpo.beta", "beta", to=number)
    draft.carry("dpo.label_smoothing", "label_smoothing", to=lambda value: number(value) or None)
    draft.carry("dpo.sft_weight", "rpo_alpha", to=number)
    if method == "simpo":
        draft.carry("dpo.simpo_gamma", "simpo_gamma", to=number)
    reference(draft, "ref_model", adapter="lora" in draft.spec["model"])


TOOL = Tool(
    title="ms-swift",
    marks=("tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "torch_dtype", "model", "dataset"),
    defaults={
        "tuner_type": "lora", "per_device_train_batch_size": 1, "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine", "optim": "adamw_torch_fused", "weight_decay": 0.1, "adam_beta2": 0.95,
        "logging_steps": 5, "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05,
        "target_modules": ["all-linear"], "simpo_gamma": 1.0,
    },
    convert=convert,
)  # fmt: skip
