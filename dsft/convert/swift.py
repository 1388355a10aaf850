"""Convert the arguments of ms-swift: its YAML or JSON config, or the args.json that it writes."""

from __future__ import annotations

from os.path import exists
from pathlib import Path
from typing import Any

from dsft.convert import arguments, sections
from dsft.convert.draft import Draft, refuse
from dsft.convert.values import names_in, whole
from dsft.spec.aliases import VALUES
from dsft.spec.document import quote
from dsft.spec.task import TASKS, task_names

_TASKS = {"kto": "kto", "rm": "reward", "gkd": "distill"}
_TRAIN_ON = {"last_round": "last", "all": "all", "default": "assistant"}
_THINKING = ("enable_thinking", "preserve_thinking", "add_non_thinking_prefix", "disable_ignore_empty_think")


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    method = draft.get("rlhf_type") or ("dpo" if draft.command == "rlhf" else None)
    if task is None and method not in (None, *_TASKS, *sections.METHODS):
        raise refuse("rlhf_type", str(method))
    if draft.get("task_type") not in (None, "causal_lm", *(["seq_cls"] if method in ("rm", None) else [])):
        raise refuse("task_type", str(draft.get("task_type")))
    other = "pretrain" if draft.get("use_chat_template") is False else "sft"
    is_classifier = method is None and draft.get("task_type") == "seq_cls"
    other = "classify" if is_classifier else other
    task = task or _TASKS.get(str(method), "dpo" if method else other)
    note = draft.source("rlhf_type") if method else "task_type" if is_classifier else ""
    draft.put("task", task, note or f"choose another one with --task {task_names()}")
    kind = arguments.model(draft, TOOL, "tuner_type train_type sft_type")
    draft.comments["model.name_or_path"] = "model; a name of ModelScope may differ on the Hugging Face hub"
    draft.defaults |= {"learning_rate": 1e-4 if kind == "lora" else 1e-5}
    draft.defaults |= {"beta": 2.0 if method == "simpo" else 0.1, "simpo_gamma": 1.0}
    _data(draft, task)
    pairs = {"key": "loss_type", "method": method or "dpo", "named": draft.source("rlhf_type")}
    sections.section(
        draft, dpo=pairs, kto={"key": "loss_type"}, reward={}, classify={}, distill={"cools": True}
    )
    dtype = draft.get("torch_dtype dtype")
    arguments.training(draft, VALUES["train.precision"].get(str(dtype), "bf16"))
    note = draft.comments["train.precision"]
    own = "torch_dtype" if dtype else "the model's own type there"
    draft.comments["train.precision"] = note.replace(arguments.UNSET, own)
    if not draft.is_given("gradient_accumulation_steps") and "train.global_batch_size" not in draft.values:
        together = draft.values.get("parallel.sequence_parallel", 1)
        note = f" / sequence_parallel_size {together}" if together > 1 else ""
        note = f"default of gradient_accumulation_steps: 16{note} over all GPUs"
        draft.put("train.global_batch_size", max(16 // together, 1), note)


def _data(draft: Draft, task: str) -> None:
    for name, ours in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        value = draft.get(name)
        entries = [_source(entry) for entry in (value if isinstance(value, list) else names_in(value or []))]
        if entries:
            draft.put(ours, entries, name)
    draft.put("data.max_length", 2048, "not in the config, which then takes the model's own maximum")
    cut = draft.get("truncation_strategy") in ("right", "left", "split")
    arguments.rows(draft, "truncate" if cut else "drop", "truncation_strategy")
    arguments.packing(draft)
    last = _targets(draft, task)
    if task != "pretrain":
        _thinking(draft, last=last)


def _targets(draft: Draft, task: str) -> bool:
    """Convert loss_scale, such as last_round+ignore_empty_think, and return whether only the last answer is
    trained on there."""
    parts = [part for part in str(draft.get("loss_scale") or "").split("+") if part not in ("", "default")]
    default = "last_round" if TASKS[task].whole else "default"
    base = next((part for part in parts if part in _TRAIN_ON), default)
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
    given = list(filter(draft.is_given, _THINKING))
    keep = draft.is_on("preserve_thinking") if draft.is_given("preserve_thinking") else not last
    if draft.is_given("enable_thinking") and not draft.is_on("enable_thinking"):
        note = "prompts with an empty thought, as there; thoughts in the rows are removed, there they stay"
        draft.put("data.thinking", "strip", f"enable_thinking; {note}")
    elif draft.is_given("add_non_thinking_prefix") and not draft.is_on("add_non_thinking_prefix"):
        draft.put("data.thinking", "as_in_template", "add_non_thinking_prefix")
    elif given or "ignore_empty_think" in str(draft.get("loss_scale")):
        note = f"{', '.join(given) or 'loss_scale'}; thoughts of earlier turns as there"
        draft.put("data.thinking", "keep" if keep else "empty", note)
    draft.read.update(_THINKING)


def _source(entry: Any) -> dict[str, Any]:
    """Return the source of `PATH` or `ID[:SUBSET][#ROWS]`."""
    name, _, rows = str(entry).partition("#")
    path = name.removeprefix("HF::").removeprefix("MS::")
    source = {"path": f"{path}:train" if ":" in path and not exists(path) else path}
    return source | ({"max_rows": whole(rows)} if rows else {})


TOOL = arguments.Tool(
    title="ms-swift",
    marks=("tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "torch_dtype", "model", "dataset"),
    defaults={
        "tuner_type": "lora", "per_device_train_batch_size": 1, "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine", "optim": "adamw_torch_fused", "weight_decay": 0.1, "adam_beta2": 0.95,
        "logging_steps": 5, "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05,
        "target_modules": ["all-linear"], "gradient_checkpointing": True,
    },
    keys={"model.name_or_path": "model", "model.add_tokens": "new_special_tokens"},
    convert=convert,
    reasons={
        "write it the other way round, {name in dsft: name in the file}, per source": "columns",
        "dsft takes the tokenizer's own chat template (data.chat_template for another)": "template",
        arguments.TURNS: "system agent_template response_prefix",
    },
)  # fmt: skip
