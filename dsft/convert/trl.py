"""Convert a config of TRL's command line, or transformers' TrainingArguments."""

from __future__ import annotations

from pathlib import Path

from dsft.convert import adapter, arguments, sections
from dsft.convert.draft import Draft, hub_path, is_file_name
from dsft.convert.values import flag
from dsft.spec.task import task_names
from dsft.system.json_file import read_text

_PREFERENCES = (
    "beta", "precompute_ref_log_probs", "ref_model_mixup_alpha", "sync_ref_model", "max_prompt_length",
    "cpo_alpha",
)  # fmt: skip
_LABELED = ("desirable_weight", "undesirable_weight")
_REWARDS = "center_rewards_coefficient"
_TAUGHT = ("teacher_model_name_or_path", "lmbda", "seq_kd")
_MARKS = (
    "dataset_name", "dataset_train_split", "use_peft", "assistant_only_loss", "completion_only_loss",
    "dataset_text_field", "max_length", "packing", *_PREFERENCES, *_LABELED, _REWARDS, *_TAUGHT,
    "dataset_num_proc",
)  # fmt: skip
_TARGETS = (
    "peft's default for the model there, such as q_proj and v_proj; name them as a list to train only those"
)
_OF_TRL = {
    "logging_steps": 10, "max_length": 1024, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
    "gradient_checkpointing": True, "use_bnb_nested_quant": False,
}  # fmt: skip


def convert(draft: Draft, task: str | None, dataset_info: Path | None) -> None:
    labeled = any(map(draft.is_given, _LABELED)) or draft.given.get("loss_type") in sections.KTO_LOSSES
    other = "reward" if draft.is_given(_REWARDS) else "sft"
    is_cpo = draft.is_given("cpo_alpha") or draft.given.get("loss_type") == "simpo"
    method = draft.command if draft.command in ("cpo", "orpo") else "cpo" if is_cpo else "dpo"
    of_pairs = method != "dpo" or any(map(draft.is_given, _PREFERENCES))
    other = "kto" if labeled else "dpo" if of_pairs else other
    task = task or ("distill" if any(map(draft.is_given, _TAUGHT)) else other)
    trl = any(map(draft.is_given, _MARKS))
    if trl:
        rate = {"dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}.get(task, 2e-5)
        draft.defaults |= {**_OF_TRL, "learning_rate": rate, "beta": 0.1}
    draft.put("task", task, f"choose another one with --task {task_names()}")
    if trl and draft.get("router_aux_loss_coef") is None and _may_be_mixture(draft.get("model_name_or_path")):
        draft.left["router_aux_loss_coef"] = f"on by default in TRL, for mixtures: {arguments.BALANCE}"
    arguments.model(draft, TOOL)
    if draft.is_on("use_peft"):
        adapter.lora(draft, "use_peft")
        if "model.lora.target_modules" not in draft.values:
            draft.put("model.lora.target_modules", "all-linear", _TARGETS)
    _data(draft)
    _rows(draft, task, trl)
    pairs = {"key": "loss_type", "method": method, "named": "" if method == "dpo" else draft.command}
    sections.section(draft, dpo=pairs, kto={"key": "loss_type"}, reward={}, distill={"cools": False})
    arguments.training(draft, "bf16" if trl and draft.given.get("bf16") is None else "fp32")


def _may_be_mixture(model: object) -> bool:
    """Return False where the config.json of a model's folder names no experts."""
    try:
        return "expert" in read_text(Path(str(model), "config.json"))
    except (OSError, ValueError):
        return True  # as of a model on the hub


def _data(draft: Draft) -> None:
    name, sources = draft.get("dataset_name"), draft.get("datasets")
    if name is not None:
        local, subset = is_file_name(str(name)), draft.get("dataset_config")
        named = filter(draft.is_given, ("dataset_name", "dataset_config", "dataset_train_split"))
        path = str(name) if local else hub_path(name, subset, draft.get("dataset_train_split"))
        draft.put("data.train", [{"path": path}], ", ".join(named))
        if draft.get("eval_strategy") in (None, "no", False):
            draft.leave("dataset_test_split", "eval_strategy is no: nothing is evaluated, as there")
        elif local:
            draft.leave("dataset_test_split", "a split of a local data set; give its files in data.eval")
        else:
            path = hub_path(name, subset, draft.get("dataset_test_split"))
            draft.put("data.eval", [{"path": path}], draft.source("dataset_test_split"))
    elif sources is not None:
        paths = [arguments.path_of(draft, f"datasets.{n}", entry) for n, entry in enumerate(sources)]
        draft.put("data.train", [{"path": path} for path in paths], "datasets")
    field = draft.get("dataset_text_field")
    if field not in (None, "text"):
        for source in draft.values.get("data.train", []):
            source["columns"] = {"text": field}


def _rows(draft: Draft, task: str, trl: bool) -> None:
    """Convert what happens to rows: length, packing, targets, template."""
    note = "as there (truncation_mode keep_start)" if trl else "not in TrainingArguments: choose it"
    if task == "reward":
        arguments.rows(draft, "drop", "as there: longer rows are left out")
    else:
        arguments.rows(draft, "truncate", note)
    if draft.get("truncation_mode") not in (None, "keep_start"):
        reason = "a row is cut at its end, the prompt before the answer (docs/masks.md)"
        draft.leave("truncation_mode", reason)
    arguments.packing(draft)
    if task == "sft" and trl:
        draft.put("data.train_on", "all", "TRL's default: all turns of a conversation; assistant is dsft's")
    if task == "distill" and trl:
        draft.put("data.train_on", "last", "as there: the last answer of a conversation")
    for name in ("assistant_only_loss", "completion_only_loss"):
        if draft.is_given(name):
            draft.put("data.train_on", "assistant" if flag(draft.get(name)) else "all", name)
    draft.carry("data.chat_template", "chat_template_path")


TOOL = arguments.Tool(
    title="TRL or transformers",
    marks=(*_MARKS, "model_name_or_path", "per_device_train_batch_size", "eval_strategy", "warmup_steps"),
    defaults={
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
        "learning_rate": 5e-5, "lr_scheduler_type": "linear", "optim": "adamw_torch_fused",
        "weight_decay": 0.0, "dataset_train_split": "train", "dataset_test_split": "test",
    },
    keys={"model.name_or_path": "model_name_or_path"},
    convert=convert,
    reasons={
        "data.max_length holds the prompt and one answer together": "max_prompt_length max_completion_length",
        "dpo.reference: precomputed is the default without an adapter": "precompute_ref_log_probs",
        "the end of a turn is the chat template's": "eos_token",
        "nothing that is trained on is padded; no pad token is needed": "pad_token",
    },
)  # fmt: skip
