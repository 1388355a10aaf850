"""Convert a config of Axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import exists
from pathlib import Path
from typing import Any

from dsft.convert import arguments
from dsft.convert.draft import Draft, is_file_name, mistake, names_in, number, whole
from dsft.convert.llamafactory import reference
from dsft.convert.parallel import parallel
from dsft.convert.tool import Tool, refuse
from dsft.spec.document import quote

_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
_ROWS: dict[str, dict[str, str]] = {
    "alpaca": {}, "alpaca_chat": {"output": "response"}, "gpteacher": {"output": "response"},
    "oasst": {"instruction": "INSTRUCTION", "output": "RESPONSE"},
    "jeopardy": {"instruction": "question", "output": "answer"},
    "alpaca_chat.load_qa": {"instruction": "question", "output": "answer"},
    "alpaca_w_system.load_open_orca": {
        "instruction": "question", "output": "response", "system": "system_prompt"
    },
    "metharme": {"completion": "generation"},
    "chatml.intel": {"instruction": "question"}, "llama3.intel": {"instruction": "question"},
    "chatml.argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
    "llama3.argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
    "chatml.icr": {"prompt": "input"}, "llama3.icr": {"prompt": "input"},
}  # fmt: skip
"""Type of a data set -> columns of the spec, where they differ from its own."""
_FIELDS = {
    "field_system": "system", "field_instruction": "instruction", "field_input": "input",
    "field_output": "output", "field_prompt": "prompt", "field_chosen": "chosen",
    "field_rejected": "rejected", "field_tools": "tools",
}  # fmt: skip
_TEMPLATES = {
    "chatml": "chatml", "llama3": "llama3", "mistral_v1": "mistral", "gemma": "gemma", "cohere": "cohere",
    "phi_3": "phi3", "qwen_25": "qwen2_5", "qwen3": "qwen3",
}  # fmt: skip
_DETECTED = ("chat_template", "completion", "pretrain", "chatml", "llama3", "None")
"""Types of data sets whose rows dsft recognizes by their keys."""


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    method = draft.get("rl")
    if task is None and method is not None and method not in _LOSSES:
        raise refuse("rl", str(method))
    for name in ("reward_model", "process_reward_model"):
        if draft.get(name) is True:
            raise refuse(name, "reward")
    pretrain = draft.is_given("pretraining_dataset") or any(
        entry.get("type") in ("completion", "pretrain") for entry in _entries(draft, "datasets")
    )
    task = task or ("dpo" if method else "pretrain" if pretrain else "sft")
    draft.put("task", task, "rl" if method else "type of the datasets")
    draft.carry("model.name_or_path", "base_model")
    draft.carry("model.tokenizer", "tokenizer_config")
    draft.carry("model.add_tokens", "tokens", to=lambda value: names_in(value) or None)
    arguments.attention(draft)
    arguments.checkpointing(draft, by_default=False)
    arguments.quantization(draft)
    if draft.get("adapter") in ("lora", "qlora"):
        arguments.lora(draft, "adapter")
        if draft.get("adapter") == "qlora":
            draft.left["adapter"] = "qlora: dsft trains the adapter on the unquantized model"
    elif draft.is_given("adapter"):
        draft.leave("adapter", f"{quote(draft.get('adapter'))} is not offered; dsft has model.lora")
    _data(draft, task)
    if task == "dpo":
        losses = draft.get("dpo_loss_type")
        loss = losses[0] if isinstance(losses, list) and losses else None
        draft.put("dpo.loss_type", loss or _LOSSES[method or "dpo"], "dpo_loss_type" if loss else "rl")
        draft.carry(
            "dpo.beta", *(("orpo_alpha",) if method == "orpo" else ()), "rl_beta", "dpo_beta", to=number
        )
        draft.carry("dpo.label_smoothing", "dpo_label_smoothing", to=lambda value: number(value) or None)
        draft.carry("dpo.simpo_gamma" if method == "simpo" else "dpo.unused", "simpo_gamma", to=number)
        draft.spec["dpo"].pop("unused", None)
        reference(draft, "ref_model", adapter="lora" in draft.spec["model"])
        draft.get("precompute_ref_log_probs")
    parallel(draft)
    arguments.precision(draft, "fp32")
    arguments.training(draft)
    if not any(draft.is_given(name) for name in ("warmup_steps", "warmup_ratio")):
        draft.put("optim.warmup_ratio", 0.03, "default there: 3 % of the steps, at most 100 steps")
    special = draft.get("special_tokens")
    if isinstance(special, Mapping):
        draft.left["special_tokens"] = (
            "dsft pads nothing that is trained on and needs no pad token; the end of a turn is the chat "
            "template's; new tokens go to model.add_tokens"
        )


def _entries(draft: Draft, name: str) -> list[Mapping[str, Any]]:
    entries = draft.get(name) or []
    entries = entries if isinstance(entries, list) else [entries]
    return [entry if isinstance(entry, Mapping) else {"path": str(entry)} for entry in entries]


def _data(draft: Draft, task: str) -> None:
    entries = [*_entries(draft, "datasets"), *_entries(draft, "pretraining_dataset")]
    if entries:
        draft.put(
            "data.train", [_source(draft, n, entry, task) for n, entry in enumerate(entries)], "datasets"
        )
    tests = _entries(draft, "test_datasets")
    held_out = [_source(draft, n, entry, task) for n, entry in enumerate(tests)]
    if held_out:
        draft.put("data.eval", held_out, "test_datasets")
    arguments.held_out(draft, "val_set_size")
    draft.carry("data.max_length", "sequence_len", to=whole)
    strategy = draft.get("excess_length_strategy")
    if task != "pretrain":
        ours = {"truncate": "truncate", "raise": "error"}.get(str(strategy), "drop")
        draft.put("data.on_too_long", ours, "excess_length_strategy" if strategy else "default there: drop")
    if draft.is_on("sample_packing") or task == "pretrain":
        note = "rows of exactly max_length" if task == "pretrain" else arguments.PACKED
        draft.put("data.packing", True, f"sample_packing; {note}")
    if draft.is_on("train_on_inputs"):
        draft.put("data.train_on", "all", "train_on_inputs")
    name = draft.get("chat_template")
    if name in _TEMPLATES:
        draft.put("data.chat_template", _TEMPLATES[name], "chat_template")
    elif name not in (None, "tokenizer_default"):
        draft.leave(
            "chat_template",
            f"{quote(name)}: dsft takes the tokenizer's own chat template; for another one write it to a "
            "Jinja file and name that in data.chat_template",
        )


def _source(draft: Draft, position: int, entry: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the source of an entry of `datasets`."""
    where = f"datasets.{position}"
    source = {"path": _path(draft, where, entry)}
    columns = _columns(draft, where, entry, task)
    roles = entry.get("message_property_mappings") or {}
    if "from" in (roles.get("role"), entry.get("message_field_role")):
        source["format"] = "sharegpt"
        columns["conversations"] = columns.pop("messages", "messages")
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if entry.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
        draft.left[f"{where}.roles_to_train"] = "data.train_on has assistant, last and all"
    if entry.get("train_on_eos") not in (None, "turn") or entry.get("train_on_eot") not in (None, "turn"):
        draft.left[f"{where}.train_on_eos"] = "the end of every trained turn is trained on here"
    return source | ({"columns": columns} if columns else {})


def _path(draft: Draft, where: str, entry: Mapping[str, Any]) -> str:
    path, files = entry.get("path"), names_in(entry.get("data_files") or [])
    if path in ("json", "csv", "parquet", "text", None) and files:
        if len(files) > 1:
            others = ", ".join(files[1:])
            draft.left[f"{where}.data_files"] = f"add the other files as sources of their own: {others}"
        return files[0]
    if path is None:
        raise mistake(where, "it has no path")
    name = str(path)
    if is_file_name(name) or exists(draft.folder / name):
        return name
    if files:
        draft.left[f"{where}.data_files"] = (
            "dsft reads a whole split of the hub; download the files and name them"
        )
    return ":".join(str(part) for part in (name, entry.get("name"), entry.get("split", "train")) if part)


def _columns(draft: Draft, where: str, entry: Mapping[str, Any], task: str) -> dict[str, str]:
    """Return {name in dsft: name in the file}."""
    kind = entry.get("type")
    columns: dict[str, str] = {}
    if isinstance(kind, Mapping):
        columns = {ours: str(kind[theirs]) for theirs, ours in _FIELDS.items() if kind.get(theirs)}
        for name in ("format", "no_input_format", "prompt_format", "system_format"):
            if kind.get(name):
                draft.left[f"{where}.type.{name}"] = "the chat template formats the prompt"
    elif kind in _ROWS:
        columns = dict(_ROWS[kind])
    elif str(kind).partition(".")[0] not in _DETECTED:
        draft.left[f"{where}.type"] = (
            f"{quote(kind)}: dsft detects the format of the rows; dsft preview shows it"
        )
    if task == "pretrain":
        columns["text"] = entry.get("field") or entry.get("text_column") or "text"
    elif entry.get("field_messages"):
        columns["messages"] = entry["field_messages"]
    columns |= {ours: entry[theirs] for theirs, ours in _FIELDS.items() if entry.get(theirs)}
    if task == "dpo" and "messages" in columns:  # the prompt's turns, beside the two answers
        columns["prompt"] = columns.pop("messages")
    return columns


TOOL = Tool(
    title="Axolotl",
    marks=("base_model", "datasets", "sequence_len", "sample_packing", "val_set_size", "adapter"),
    defaults={
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0, "lr_scheduler": "cosine",
        "optimizer": "adamw_torch_fused", "weight_decay": 0.0, "sequence_len": 512, "lora_dropout": 0.0,
        "rl_beta": 0.1,
    },
    convert=convert,
)  # fmt: skip
