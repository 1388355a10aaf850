"""Convert a config of LLaMA-Factory, with the data sets that its dataset_info.json names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsft.convert import arguments
from dsft.convert.draft import Draft, flag, mistake, names_in, number, whole
from dsft.convert.parallel import parallel
from dsft.convert.tool import Tool, refuse
from dsft.spec.document import quote

_TASKS = {"pt": "pretrain", "sft": "sft", "dpo": "dpo"}
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_COLUMNS = {
    "alpaca": {
        "prompt": "instruction", "query": "input", "response": "output", "history": "history",
        "system": "system", "tools": "tools",
    },
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "system": "system", "tools": "tools"},
}  # fmt: skip
"""formatting -> column of dataset_info.json -> column of the spec."""
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_READ_TAGS = {
    "user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant", "model"),
    "observation_tag": ("observation", "tool", "function_response", "tool_response"),
    "function_tag": ("function_call", "tool_call"), "system_tag": ("system", "developer"),
}  # fmt: skip
"""Tag -> the roles that dsft reads as it."""
_TEMPLATES = (
    "chatml", "cohere", "deepseek", "gemma", "llama2", "llama3", "mistral", "phi3", "zephyr",
)  # fmt: skip
"""Names of templates that mean the same here."""
_REASONING = (
    "deepseekr1", "glm4_moe", "glm4_7", "glmz1", "mimo", "mimo_v2", "minimax2", "qwen3", "qwen3_5", "qwen3_6",
)  # fmt: skip
"""Names of templates whose answers have thoughts in <think>."""


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    stage = str(draft.get("stage"))
    if task is None and stage not in _TASKS:
        raise refuse("stage", stage)
    task = task or _TASKS[stage]
    draft.put("task", task, "stage" if draft.is_given("stage") else "default of stage")
    draft.carry("model.name_or_path", "model_name_or_path")
    draft.carry("model.add_tokens", "new_special_tokens", "add_special_tokens", "add_tokens", to=names_in)
    arguments.attention(draft)
    arguments.checkpointing(draft, by_default=True)
    arguments.quantization(draft)
    kind = draft.get("finetuning_type")
    if kind == "lora":
        arguments.lora(draft, "finetuning_type")
    elif kind != "full":
        draft.leave(
            "finetuning_type", f"{quote(kind)} is not offered; model.trainable trains a part of the weights"
        )
    _data(draft, task, dataset_info)
    _thinking(draft, task)
    if task == "dpo":
        _preferences(draft)
    parallel(draft)
    arguments.precision(draft, "fp32")
    arguments.training(draft)


def _data(draft: Draft, task: str, dataset_info: Path | None) -> None:
    info, folder = _read_info(draft, dataset_info)
    for key, ours in (("dataset", "train"), ("eval_dataset", "eval")):
        names = draft.names(key)
        sources = [_source(draft, name, info, folder, task, key) for name in names]
        if sources:
            draft.put(f"data.{ours}", sources, key)
        if sources and draft.get("max_samples") is not None:
            for source in sources:
                source["max_rows"] = whole(draft.get("max_samples"))
            draft.comments[f"data.{ours}"] += ", max_samples as max_rows"
    weights = draft.get("interleave_probs")
    if weights is not None:
        for source, weight in zip(draft.spec["data"]["train"], names_in(weights), strict=False):
            source["weight"] = number(weight)
        draft.comments["data.train"] += ", interleave_probs as weights"
        draft.get("mix_strategy")
    arguments.held_out(draft, "val_size")
    draft.carry("data.max_length", "cutoff_len", to=whole)
    _packing(draft, task)
    if draft.is_on("train_on_prompt"):
        draft.put("data.train_on", "all", "train_on_prompt")
    elif draft.is_on("mask_history"):
        draft.put("data.train_on", "last", "mask_history")
    name = draft.get("template")
    if name in _TEMPLATES:
        draft.put("data.chat_template", name, "template")
    elif name is not None and task != "pretrain":
        reason = "which an instruct model has; for a base model set data.chat_template; look at dsft preview"
        draft.leave("template", f"{quote(name)}: dsft takes the tokenizer's own chat template, {reason}")
    for key in ("default_system", "tool_format"):
        draft.leave(key, "the chat template decides it; a system turn can be in the rows")


def _thinking(draft: Draft, task: str) -> None:
    """Set data.thinking for templates that have thoughts there. Its training keeps those of all turns, unless
    mask_history leaves one turn to train on."""
    given = draft.get("enable_thinking"), draft.get("preserve_thinking")
    name = str(draft.get("template"))
    if task == "pretrain" or (name not in _REASONING and given == (None, None)):
        return
    if draft.is_given("enable_thinking") and not draft.is_on("enable_thinking"):
        draft.put("data.thinking", "strip", "enable_thinking")
    elif draft.is_on("preserve_thinking") or (task == "sft" and not draft.is_on("mask_history")):
        draft.put("data.thinking", "keep", "enable_thinking, preserve_thinking, as there for this task")
    else:
        draft.put(
            "data.thinking", "empty", "enable_thinking without preserve_thinking, as there for this task"
        )


def _packing(draft: Draft, task: str) -> None:
    neat = draft.is_on("neat_packing")
    given = draft.get("packing")
    if task == "pretrain":
        on = neat or given is None or flag(given)
        draft.put("data.packing", on, "packing; rows of exactly max_length")
        return
    draft.put("data.on_too_long", "truncate", "as there")
    if neat or flag(given or False):
        apart = "" if neat else "; examples in a row never see each other here"
        draft.put("data.packing", True, f"packing; {arguments.PACKED}{apart}")


def _read_info(draft: Draft, given: Path | None) -> tuple[Mapping[str, Any], Path]:
    """Return dataset_info.json and its folder, by default from dataset_dir."""
    name = str(draft.get("dataset_dir"))
    if name == "ONLINE" or name.startswith("REMOTE:"):
        return {}, Path()
    inside, beside = f"{name}/dataset_info.json", draft.folder / "dataset_info.json"
    path = given or draft.find(inside) or (beside if beside.is_file() else None)
    if path is None:
        raise mistake(
            "dataset_dir",
            f"there is no {inside} here, beside the config or above it, and no {beside}, so the files of "
            f"dataset {quote(draft.given.get('dataset'))} are not known; name it with --dataset-info PATH",
        )
    return arguments.read_json(path), path.parent


def _source(
    draft: Draft, name: str, info: Mapping[str, Any], folder: Path, task: str, key: str
) -> dict[str, Any]:
    """Return a source of `data.train`. A data set that is not in dataset_info.json is one of the hub if that
    file is not used (dataset_dir: ONLINE). Raise SpecError for one that cannot be found."""
    if not info:
        return {"path": name}
    if name not in info:
        raise mistake(key, f"{quote(name)} is not in dataset_info.json")
    entry = info[name]
    if "file_name" in entry:
        source: dict[str, Any] = {"path": str(folder / entry["file_name"])}
    elif "hf_hub_url" in entry:
        parts = [entry[part] for part in ("subset",) if part in entry]
        split = entry.get("split", "train")
        source = {"path": ":".join([entry["hf_hub_url"], *parts, split])}
    else:
        raise mistake(
            key,
            f"{quote(name)} is on a hub that dsft does not read; download it, and name its file in "
            "dataset_info.json as file_name",
        )
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _COLUMNS:
        raise mistake(key, f"{quote(name)} has formatting {quote(formatting)}, which is not known")
    columns = _columns(entry, formatting, task)
    if entry.get("ranking"):
        source["format"] = "preference"
    elif (entry.get("columns") or {}).get("kto_tag"):
        source["format"] = "kto"
    if columns:
        source["columns"] = columns
    if "num_samples" in entry:
        source["max_rows"] = whole(entry["num_samples"])
    tags = entry.get("tags") or {}
    for tag, read in _READ_TAGS.items():
        if tags.get(tag, _TAGS[tag]) not in read:
            draft.left[f"dataset_info.json, {name}, {tag}"] = (
                f"{quote(tags[tag])}: rename the role in the file; dsft reads {' and '.join(read)}"
            )
    return source


def _columns(entry: Mapping[str, Any], formatting: str, task: str) -> dict[str, str]:
    """Return the spec's columns: {name in dsft: name in the file}, where they differ."""
    given = entry.get("columns") or {}
    names = dict(_COLUMNS[formatting])
    tags = entry.get("tags") or {}
    if formatting == "sharegpt" and tags.get("role_tag") == "role":
        names["messages"] = "messages" if given.get("messages", "messages") == "messages" else "conversations"
    if task == "pretrain":
        return (
            {"text": given.get("prompt", "instruction")}
            if given.get("prompt", "instruction") != "text"
            else {}
        )
    names |= {"chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag"}
    found = {names[theirs]: column for theirs, column in given.items() if theirs in names}
    if entry.get("ranking"):
        found.pop("output", None)
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def _preferences(draft: Draft) -> None:
    loss = str(draft.get("pref_loss"))
    if loss not in _LOSSES:
        raise refuse("pref_loss", loss)
    draft.put(
        "dpo.loss_type", _LOSSES[loss], "pref_loss" if draft.is_given("pref_loss") else "default of pref_loss"
    )
    draft.carry("dpo.beta", "pref_beta", to=number)
    draft.carry("dpo.sft_weight", "pref_ftx", to=lambda value: number(value) or None)
    draft.carry("dpo.label_smoothing", "dpo_label_smoothing", to=lambda value: number(value) or None)
    if loss == "simpo":
        draft.carry("dpo.simpo_gamma", "simpo_gamma", to=number, note="a margin of rewards in both")
    else:
        draft.leave("simpo_gamma", "for pref_loss simpo only")
    reference(draft, "ref_model", adapter="lora" in draft.spec["model"])


def reference(draft: Draft, name: str, *, adapter: bool) -> None:
    """Choose where the reference's log-probabilities come from: another model, or, with an adapter, the model
    without it."""
    if draft.spec["dpo"]["loss_type"] in ("simpo", "orpo"):
        draft.leave(name, "this loss has no reference")
    elif draft.carry("dpo.reference_model", name) is None and adapter:
        draft.put("dpo.reference", "adapter", "the model without its adapter, as there")


TOOL = Tool(
    title="LLaMA-Factory",
    marks=("stage", "finetuning_type", "cutoff_len", "dataset_dir", "lora_target", "pref_beta", "template"),
    defaults={
        "stage": "sft", "finetuning_type": "lora", "cutoff_len": 2048, "dataset_dir": "data",
        "lora_rank": 8, "lora_alpha": "2 × rank", "lora_dropout": 0.0, "lora_target": "all",
        "pref_beta": 0.1, "pref_loss": "sigmoid", "simpo_gamma": 0.5,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
        "learning_rate": 5e-5, "lr_scheduler_type": "linear", "optim": "adamw_torch", "weight_decay": 0.0,
    },
    convert=convert,
)  # fmt: skip
