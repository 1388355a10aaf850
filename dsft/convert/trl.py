"""Convert a config of TRL's command line, or transformers' TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsft.convert import arguments
from dsft.convert.draft import Draft, flag, is_file_name, names_in, number, whole
from dsft.convert.llamafactory import reference
from dsft.convert.parallel import parallel
from dsft.convert.tool import Tool, refuse

_PREFERENCES = (
    "beta",
    "precompute_ref_log_probs",
    "ref_model_mixup_alpha",
    "sync_ref_model",
    "max_prompt_length",
)
_LOSSES = ("sigmoid", "robust", "ipo", "hinge", "apo_zero")
_TARGETS = (
    "peft's default for the model there, such as q_proj and v_proj; name them as a list to train only those"
)


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    guess = "dpo" if any(draft.is_given(name) for name in _PREFERENCES) else "sft"
    trl = any(draft.is_given(name) for name in TRL_MARKS)
    task = task or guess
    if trl:
        draft.defaults = {**draft.defaults, **_OF_TASK[task]}
    draft.put("task", task, "choose another one with --task sft, pretrain or dpo")
    draft.carry("model.name_or_path", "model_name_or_path")
    if trl and draft.get("router_aux_loss_coef") is None:
        draft.left["router_aux_loss_coef"] = f"on by default in TRL, for mixtures: {arguments.BALANCE}"
    arguments.attention(draft)
    arguments.checkpointing(draft, by_default=trl)
    arguments.quantization(draft)
    if draft.is_on("use_peft"):
        arguments.lora(draft, "use_peft")
        if "target_modules" not in draft.spec["model"]["lora"]:
            draft.put("model.lora.target_modules", "all-linear", _TARGETS)
    draft.get("lora_task_type")
    _data(draft, task)
    if task == "dpo":
        _preferences(draft)
    parallel(draft)
    arguments.precision(draft, "bf16" if trl and draft.given.get("bf16") is None else "fp32")
    arguments.training(draft)


def _data(draft: Draft, task: str) -> None:
    name, sources = draft.get("dataset_name"), draft.get("datasets")
    if name is not None:
        parts = [draft.get("dataset_config"), draft.get("dataset_train_split")]
        local = is_file_name(str(name))
        path = str(name) if local else ":".join(str(part) for part in (name, *parts) if part is not None)
        named = [
            key for key in ("dataset_name", "dataset_config", "dataset_train_split") if draft.is_given(key)
        ]
        draft.put("data.train", [{"path": path}], ", ".join(named))
        if draft.get("eval_strategy") in (None, "no", False):
            draft.leave("dataset_test_split", "eval_strategy is no: nothing is evaluated, as there")
        elif local:
            draft.leave("dataset_test_split", "a split of a local data set; give its files in data.eval")
        else:
            path = ":".join(str(part) for part in (name, parts[0], draft.get("dataset_test_split")) if part)
            given = draft.is_given("dataset_test_split")
            draft.put("data.eval", [{"path": path}], f"{'' if given else 'default of '}dataset_test_split")
    elif sources is not None:
        draft.put("data.train", [_source(entry) for entry in sources], "datasets")
    field = draft.get("dataset_text_field")
    if field not in (None, "text"):
        for source in draft.spec.get("data", {}).get("train", []):
            source["columns"] = {"text": field}
    _rows(draft, task)


def _rows(draft: Draft, task: str) -> None:
    """Convert what happens to rows: length, packing, targets, template."""
    draft.carry("data.eval_fraction", "test_split_size", to=number)
    draft.carry("data.max_length", "max_length", "max_seq_length", to=whole)
    if task != "pretrain":
        trl = "max_length" in draft.defaults
        note = "as there (truncation_mode keep_start)" if trl else "not in TrainingArguments: choose it"
        draft.put("data.on_too_long", "truncate", note)
    if draft.get("truncation_mode") not in (None, "keep_start"):
        draft.leave(
            "truncation_mode", "a row is cut at its end, the prompt before the answer (docs/masks.md)"
        )
    if draft.is_on("packing"):
        draft.put("data.packing", True, f"packing; {arguments.PACKED}")
    elif draft.is_on("padding_free"):
        draft.put("data.packing", True, "padding_free: rows without padding, the same examples a step")
    if task == "sft" and "max_length" in draft.defaults:
        draft.put("data.train_on", "all", "TRL's default: all turns of a conversation; assistant is dsft's")
    for name in ("assistant_only_loss", "completion_only_loss"):
        if draft.is_given(name):
            on = flag(draft.get(name))
            draft.put("data.train_on", "assistant" if on else "all", name)
    template = draft.get("chat_template_path")
    if template is not None:
        draft.put("data.chat_template", template, "chat_template_path")
    draft.leave("eos_token", "the end of a turn is the chat template's")
    draft.leave("pad_token", "nothing that is trained on is padded; no pad token is needed")


def _source(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of an entry {path, name, data_files, split}."""
    files = entry.get("data_files")
    if files and entry["path"] in ("json", "csv", "parquet", "text"):
        names = names_in(files if not isinstance(files, Mapping) else list(files.values())[0])
        return {"path": names[0]}
    if is_file_name(str(entry["path"])):
        return {"path": entry["path"]}
    parts = (entry["path"], entry.get("name"), entry.get("split", "train"))
    return {"path": ":".join(str(part) for part in parts if part)}


def _preferences(draft: Draft) -> None:
    losses = draft.get("loss_type") or "sigmoid"
    losses = losses if isinstance(losses, list) else [losses]
    loss = str(losses[0])
    if len(losses) > 1 or loss not in _LOSSES:
        raise refuse("loss_type", ", ".join(map(str, losses)))
    draft.put("dpo.loss_type", loss, "loss_type" if draft.is_given("loss_type") else "default of loss_type")
    draft.carry("dpo.beta", "beta", to=number)
    draft.carry("dpo.label_smoothing", "label_smoothing", to=lambda value: number(value) or None)
    draft.carry("dpo.sft_weight", "rpo_alpha", to=number)
    for name in ("max_prompt_length", "max_completion_length"):
        draft.leave(name, "data.max_length holds the prompt and one answer together")
    draft.leave("precompute_ref_log_probs", "dpo.reference: precomputed is the default without an adapter")
    reference(draft, "ref_model_name_or_path", adapter="lora" in draft.spec["model"])


TRL_MARKS = (
    "dataset_name", "dataset_train_split", "use_peft", "assistant_only_loss", "completion_only_loss",
    "dataset_text_field", "max_length", "packing", *_PREFERENCES, "dataset_num_proc",
)  # fmt: skip
_TRL = {"logging_steps": 10, "max_length": 1024, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
_OF_TASK: Mapping[str, Mapping[str, Any]] = {
    "sft": {**_TRL, "learning_rate": 2e-5},
    "pretrain": {**_TRL, "learning_rate": 2e-5},
    "dpo": {**_TRL, "learning_rate": 1e-6, "beta": 0.1},
}
ARGUMENTS = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "optim": "adamw_torch_fused", "weight_decay": 0.0,
    "dataset_train_split": "train", "dataset_test_split": "test",
}  # fmt: skip
"""Defaults of transformers' TrainingArguments."""
TOOL = Tool(
    title="TRL or transformers",
    marks=(*TRL_MARKS, "model_name_or_path", "per_device_train_batch_size", "eval_strategy", "warmup_steps"),
    defaults=ARGUMENTS,
    convert=convert,
)
