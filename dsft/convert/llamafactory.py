"""Convert a config of LLaMA-Factory, with the data sets that its dataset_info.json names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsft.convert import arguments, sections
from dsft.convert.draft import Draft, hub_path, mistake, read_json, refuse
from dsft.convert.values import flag, whole
from dsft.spec.aliases import VALUES
from dsft.spec.document import quote
from dsft.spec.task import TASKS

_COLUMNS = {
    "alpaca": {
        "prompt": "instruction", "query": "input", "response": "output", "history": "history",
        "system": "system", "tools": "tools",
    },
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "system": "system", "tools": "tools"},
}  # fmt: skip
"""formatting -> column of dataset_info.json -> column of the spec."""
_ROLES = {
    "user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant", "model"),
    "observation_tag": ("observation", "tool", "function_response", "tool_response"),
    "function_tag": ("function_call", "tool_call"), "system_tag": ("system", "developer"),
}  # fmt: skip
"""Tag -> the roles that dsft reads as it; the first is the tag's default."""
_TEMPLATES = "chatml cohere deepseek gemma llama2 llama3 mistral phi3 zephyr".split()
"""Names of templates that mean the same here."""
_REASONING = "deepseekr1 glm4_moe glm4_7 glmz1 mimo mimo_v2 minimax2 qwen3 qwen3_5 qwen3_6".split()
"""Names of templates whose answers have thoughts in <think>."""


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    stage = str(draft.get("stage"))
    task = task or VALUES["task"].get(stage, stage)
    if task not in TASKS:
        raise refuse("stage", stage)
    draft.put("task", task, draft.source("stage"))
    arguments.model(draft, TOOL, "finetuning_type")
    _data(draft, task, dataset_info)
    _thinking(draft, task)
    sections.section(draft, dpo={"key": "pref_loss"}, kto={}, reward={})
    arguments.training(draft, "fp32")


def _data(draft: Draft, task: str, dataset_info: Path | None) -> None:
    info, folder = _read_info(draft, dataset_info)
    rows = draft.get("max_samples")
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        sources = [_source(name, info, folder, key) for name in draft.names(key)]
        for name, source in zip(draft.names(key), sources, strict=True):
            _shape(draft, name, source, info.get(name, {}), task, key)
            if rows is not None:
                source["max_rows"] = whole(rows)
        if sources:
            draft.put(ours, sources, key + (", max_samples as max_rows" if rows is not None else ""))
    arguments.rows(draft, "truncate", "as there")
    packing, neat = draft.get("packing"), draft.is_on("neat_packing")
    if task == "pretrain":
        on = neat or packing is None or flag(packing)
        draft.put("data.packing", on, "packing; rows of exactly max_length")
    elif neat or flag(packing or False):
        apart = "" if neat else "; examples in a row never see each other here"
        draft.put("data.packing", True, f"packing; {arguments.PACKED}{apart}")
    if not draft.switch("data.train_on", "all"):
        draft.switch("data.train_on", "last")
    name = draft.get("template")
    if name in _TEMPLATES:
        draft.put("data.chat_template", name, "template")
    elif task != "pretrain":
        reason = "which an instruct model has; for a base model set data.chat_template; look at dsft preview"
        draft.leave("template", f"{quote(name)}: dsft takes the tokenizer's own chat template, {reason}")


def _thinking(draft: Draft, task: str) -> None:
    """Set data.thinking for templates that have thoughts there. Its training keeps those of all turns, unless
    mask_history leaves one turn to train on."""
    given = draft.get("enable_thinking"), draft.get("preserve_thinking")
    if task == "pretrain" or (str(draft.get("template")) not in _REASONING and given == (None, None)):
        return
    if draft.is_given("enable_thinking") and not draft.is_on("enable_thinking"):
        draft.put("data.thinking", "strip", "enable_thinking")
    elif draft.is_on("preserve_thinking") or (task == "sft" and not draft.is_on("mask_history")):
        draft.put("data.thinking", "keep", "enable_thinking, preserve_thinking, as there for this task")
    else:
        note = "enable_thinking without preserve_thinking, as there for this task"
        draft.put("data.thinking", "empty", note)


def _read_info(draft: Draft, given: Path | None) -> tuple[Mapping[str, Any], Path]:
    """Return dataset_info.json and its folder, by default from dataset_dir."""
    name = str(draft.get("dataset_dir"))
    if name == "ONLINE" or name.startswith("REMOTE:"):
        return {}, Path()
    inside, beside = f"{name}/dataset_info.json", draft.path.parent / "dataset_info.json"
    path = given or draft.find(inside) or (beside if beside.is_file() else None)
    if path is None:
        raise mistake(
            "dataset_dir",
            f"there is no {inside} here, beside the config or above it, and no {beside}, so the files of "
            f"dataset {quote(draft.given.get('dataset'))} are not known; name it with --dataset-info PATH",
        )
    return read_json(path), path.parent


def _source(name: str, info: Mapping[str, Any], folder: Path, key: str) -> dict[str, Any]:
    """Return a source of `data.train`. A data set that is not in dataset_info.json is one of the hub if that
    file is not used (dataset_dir: ONLINE). Raise SpecError for one that cannot be found."""
    if not info:
        return {"path": name}
    if name not in info:
        raise mistake(key, f"{quote(name)} is not in dataset_info.json")
    entry = info[name]
    if "file_name" in entry:
        return {"path": str(folder / entry["file_name"])}
    if "hf_hub_url" in entry:
        return {"path": hub_path(entry["hf_hub_url"], entry.get("subset"), entry.get("split", "train"))}
    raise mistake(
        key,
        f"{quote(name)} is on a hub that dsft does not read; download it, and name its file in "
        "dataset_info.json as file_name",
    )


def _shape(
    draft: Draft, name: str, source: dict[str, Any], entry: Mapping[str, Any], task: str, key: str
) -> None:
    """Set the format, columns and number of rows of a source from its entry in dataset_info.json."""
    if not entry:
        return
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _COLUMNS:
        raise mistake(key, f"{quote(name)} has formatting {quote(formatting)}, which is not known")
    given, tags = entry.get("columns") or {}, entry.get("tags") or {}
    names = {**_COLUMNS[formatting], "chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag"}
    if formatting == "sharegpt" and tags.get("role_tag") == "role":
        names["messages"] = "messages" if given.get("messages", "messages") == "messages" else "conversations"
    columns = {names[theirs]: column for theirs, column in given.items() if theirs in names}
    if entry.get("ranking"):
        source["format"] = "preference"
        columns.pop("output", None)
    elif given.get("kto_tag"):
        source["format"] = "kto"
    if task == "pretrain":
        columns = {"text": given.get("prompt", "instruction")}
    if columns := {ours: theirs for ours, theirs in columns.items() if ours != theirs}:
        source["columns"] = columns
    if "num_samples" in entry:
        source["max_rows"] = whole(entry["num_samples"])
    for tag, roles in _ROLES.items():
        if tags.get(tag, roles[0]) not in roles:
            reason = f"rename the role in the file; dsft reads {' and '.join(roles)}"
            draft.left[f"dataset_info.json, {name}, {tag}"] = f"{quote(tags[tag])}: {reason}"


TOOL = arguments.Tool(
    title="LLaMA-Factory",
    marks=("stage", "finetuning_type", "cutoff_len", "dataset_dir", "lora_target", "pref_beta", "template"),
    defaults={
        "stage": "sft", "finetuning_type": "lora", "cutoff_len": 2048, "dataset_dir": "data",
        "lora_rank": 8, "lora_alpha": "2 × rank", "lora_dropout": 0.0, "lora_target": "all",
        "pref_beta": 0.1, "pref_loss": "sigmoid", "simpo_gamma": 0.5,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
        "learning_rate": 5e-5, "lr_scheduler_type": "linear", "optim": "adamw_torch", "weight_decay": 0.0,
        "gradient_checkpointing": True,
    },
    keys={
        "model.name_or_path": "model_name_or_path",
        "model.add_tokens": "new_special_tokens add_special_tokens add_tokens",
    },
    convert=convert,
    reasons={
        arguments.TURNS: "default_system tool_format",
        "rows of all sources are mixed by their weights": "mix_strategy",
    },
)  # fmt: skip
