"""Convert a config of Axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsft.convert import arguments, sections
from dsft.convert.draft import Draft, mistake, refuse
from dsft.spec.document import quote

_QUESTION = {"instruction": "question"}
_ARGILLA = {"chosen": "chosen_response", "rejected": "rejected_response"}
_ROWS: dict[str, dict[str, str]] = {
    "alpaca": {}, "alpaca_chat": {"output": "response"}, "gpteacher": {"output": "response"},
    "oasst": {"instruction": "INSTRUCTION", "output": "RESPONSE"},
    "jeopardy": {**_QUESTION, "output": "answer"}, "alpaca_chat.load_qa": {**_QUESTION, "output": "answer"},
    "alpaca_w_system.load_open_orca": {**_QUESTION, "output": "response", "system": "system_prompt"},
    "metharme": {"completion": "generation"}, "chatml.intel": _QUESTION, "llama3.intel": _QUESTION,
    "chatml.argilla": _ARGILLA, "llama3.argilla": _ARGILLA,
    "chatml.icr": {"prompt": "input"}, "llama3.icr": {"prompt": "input"},
}  # fmt: skip
"""Type of a data set -> columns of the spec, where they differ from its own."""
_LABELED = {"argilla": {"prompt": "instruction"}, "intel": {"prompt": "question"}}
"""Likewise of labeled answers (rl: kto), by what is behind the point in the type."""
_FIELDS = "system instruction input output prompt chosen rejected tools completion label".split()
"""Columns of the spec, which are field_system and so on there."""
_TEMPLATES = {
    "chatml": "chatml", "llama3": "llama3", "mistral_v1": "mistral", "gemma": "gemma", "cohere": "cohere",
    "phi_3": "phi3", "qwen_25": "qwen2_5", "qwen3": "qwen3",
}  # fmt: skip
_BY_ROWS = "dsft detects the format of the rows; dsft preview shows it"
_DETECTED = ("chat_template", "bradley_terry", "completion", "pretrain", "chatml", "llama3", "None")
"""Types of data sets whose rows dsft recognizes by their keys."""


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    method = draft.get("rl")
    if task is None and method is not None and method not in (*sections.METHODS, "kto"):
        raise refuse("rl", str(method))
    if draft.is_on("kd_trainer"):
        way_out = "take it out to convert the other keys, then set task: distill (docs/distill.md)"
        raise mistake("kd_trainer", f"Axolotl reads a teacher's values from the rows; {way_out}")
    if draft.get("process_reward_model") is True:
        raise mistake("process_reward_model", "dsft trains no model that scores the steps of an answer")
    rewards = draft.is_on("reward_model")
    texts = any(entry.get("type") in ("completion", "pretrain") for entry in _entries(draft, "datasets"))
    pretrain = texts or draft.is_given("pretraining_dataset")
    of_method = method if method == "kto" else "dpo" if method else None
    task = task or of_method or ("reward" if rewards else "pretrain" if pretrain else "sft")
    draft.put("task", task, "rl" if method else "reward_model" if rewards else "type of the datasets")
    if isinstance(section := draft.given.get("bnb_config_kwargs"), Mapping):
        rest = {name: value for name, value in draft.given.items() if name != "bnb_config_kwargs"}
        draft.given = rest | {f"bnb_config_kwargs.{name}": value for name, value in section.items()}
    arguments.model(draft, TOOL, "adapter")
    _data(draft, task)
    beta = "orpo_alpha rl_beta dpo_beta" if method == "orpo" else "rl_beta dpo_beta"
    pairs = {"key": "dpo_loss_type", "method": method or "dpo", "named": "rl", "beta": beta}
    sections.section(draft, dpo=pairs, kto={}, reward={})
    if draft.values["task"] == "dpo":
        draft.read.add("precompute_ref_log_probs")
    arguments.training(draft, "fp32")
    if not any(map(draft.is_given, ("warmup_steps", "warmup_ratio"))):
        draft.put("optim.warmup_ratio", 0.03, "default there: 3 % of the steps, at most 100 steps")
    if isinstance(draft.get("special_tokens"), Mapping):
        draft.left["special_tokens"] = (
            "dsft pads nothing that is trained on and needs no pad token; the end of a turn is the chat "
            "template's; new tokens go to model.add_tokens"
        )


def _entries(draft: Draft, name: str) -> list[Mapping[str, Any]]:
    entries = draft.get(name) or []
    entries = entries if isinstance(entries, list) else [entries]
    return [entry if isinstance(entry, Mapping) else {"path": str(entry)} for entry in entries]


def _data(draft: Draft, task: str) -> None:
    train = [*_entries(draft, "datasets"), *_entries(draft, "pretraining_dataset")]
    tests = _entries(draft, "test_datasets")
    for key, entries, name in (("data.train", train, "datasets"), ("data.eval", tests, "test_datasets")):
        if entries:
            draft.put(key, [_source(draft, n, entry, task) for n, entry in enumerate(entries)], name)
    strategy = draft.get("excess_length_strategy")
    ours = {"truncate": "truncate", "raise": "error"}.get(str(strategy), "drop")
    arguments.rows(draft, ours, "excess_length_strategy" if strategy else "default there: drop")
    if draft.is_on("sample_packing") or task == "pretrain":
        note = "rows of exactly max_length" if task == "pretrain" else arguments.PACKED
        draft.put("data.packing", True, f"sample_packing; {note}")
    draft.switch("data.train_on", "all")
    name = draft.get("chat_template")
    if name in _TEMPLATES:
        draft.put("data.chat_template", _TEMPLATES[name], "chat_template")
    elif name != "tokenizer_default":
        reason = "for another one write it to a Jinja file and name that in data.chat_template"
        reason = f"{quote(name)}: dsft takes the tokenizer's own chat template; {reason}"
        draft.leave("chat_template", reason)


def _source(draft: Draft, position: int, entry: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the source of an entry of `datasets`."""
    where = f"datasets.{position}"
    source = {"path": arguments.path_of(draft, where, entry)}
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


def _columns(draft: Draft, where: str, entry: Mapping[str, Any], task: str) -> dict[str, str]:
    """Return {name in dsft: name in the file}."""
    kind = entry.get("type")
    columns: dict[str, str] = {}
    if isinstance(kind, Mapping):
        columns = {name: str(kind[f"field_{name}"]) for name in _FIELDS if kind.get(f"field_{name}")}
        for name in ("format", "no_input_format", "prompt_format", "system_format"):
            if kind.get(name):
                draft.left[f"{where}.type.{name}"] = "the chat template formats the prompt"
    elif task == "kto":
        form = str(kind).partition(".")[2]
        columns = dict(_LABELED.get(form, {}))
        if form not in (*_LABELED, "ultra"):
            draft.left[f"{where}.type"] = f"{quote(kind)}: {_BY_ROWS}"
    elif kind in _ROWS:
        columns = dict(_ROWS[kind])
    elif str(kind).partition(".")[0] not in _DETECTED:
        draft.left[f"{where}.type"] = f"{quote(kind)}: {_BY_ROWS}"
    if task == "pretrain":
        columns["text"] = entry.get("field") or entry.get("text_column") or "text"
    elif entry.get("field_messages"):
        columns["messages"] = entry["field_messages"]
    columns |= {name: entry[f"field_{name}"] for name in _FIELDS if entry.get(f"field_{name}")}
    if task in ("dpo", "reward") and "messages" in columns:  # the prompt's turns, beside the two answers
        columns["prompt"] = columns.pop("messages")
    return columns


TOOL = arguments.Tool(
    title="Axolotl",
    marks=("base_model", "datasets", "sequence_len", "sample_packing", "val_set_size", "adapter"),
    defaults={
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0, "lr_scheduler": "cosine",
        "optimizer": "adamw_torch_fused", "weight_decay": 0.0, "sequence_len": 512, "lora_dropout": 0.0,
        "rl_beta": 0.1,
    },
    keys={
        "model.name_or_path": "base_model", "model.tokenizer": "tokenizer_config",
        "model.add_tokens": "tokens",
    },
    convert=convert,
)  # fmt: skip
