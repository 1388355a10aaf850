"""Convert what LLaMA-Factory, Axolotl, TRL and ms-swift share: the keys of transformers' TrainingArguments,
also under Axolotl's names, and the adapter and attention keys of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os.path import exists
from pathlib import Path
from typing import Any, get_args

from dsft.convert import adapter
from dsft.convert.draft import Draft, hub_path, is_file_name, mistake
from dsft.convert.parallel import parallel
from dsft.convert.values import names_in, number, whole
from dsft.spec.aliases import OTHER_NAMES, VALUES
from dsft.spec.document import quote
from dsft.spec.optimizers import OPTIMIZERS
from dsft.spec.schema import Schedule
from dsft.system import json_file

_CARRIED = (
    "train.seed", "train.max_grad_norm", "train.neftune_alpha", "train.label_smoothing", "train.log_every",
    "train.eval_on_start", "optim.learning_rate", "optim.weight_decay", "optim.eps", "checkpoint.keep_last",
)  # fmt: skip
"""Keys of the spec that depend on no other key."""
_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
_EXACT = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "sgd")
_8_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_ATTENTION = {
    **{name: name for name in ("auto", "eager", "sdpa")}, **VALUES["model.attention"],
    "flash_attention_2": "auto", "flash_attention_3": "auto",  # they need the package flash-attn
}  # fmt: skip
_ATTENTION_SWITCHES = {"flash_attention": "auto", "sdp_attention": "sdpa", "eager_attention": "eager"}
_FLASH = (
    "auto takes FlashAttention, also without the package flash-attn, where GPU, precision and model allow it"
)
BALANCE = (
    "transformers' balance loss of a mixture of experts depends on how a step is divided and is not offered; "
    "the nearest is model.experts.balance: global_batch with balance_weight: the coefficient × the experts "
    "per token (docs/experts.md)"
)
_STEPS = "counted in steps here, and dsft preview prints the steps of an epoch"
PACKED = (
    "there a packed row of max_length counts as one example, here each example counts: for steps of the same "
    "size multiply global_batch_size by the examples that fit into a row (dsft preview shows them)"
)
UNSET = "neither bf16 nor fp16 is set"
TURNS = "the chat template decides it; a system turn can be in the rows"


@dataclass(frozen=True)
class Tool:
    """A tool whose configs can be converted.

    marks     keys by which its configs are recognized
    defaults  its defaults of keys that decide the result
    keys      key of the spec -> the tool's keys for it, where it has a meaning of its own for them
    convert   fills in a draft; takes the task (None: from the config) and the path of dataset_info.json
    reasons   reason -> keys that are not carried over for it
    """

    title: str
    marks: tuple[str, ...]
    defaults: Mapping[str, Any]
    keys: Mapping[str, str]
    convert: Callable[[Draft, str | None, Path | None], None]
    reasons: Mapping[str, str] = field(default_factory=dict)


def training(draft: Draft, precision: str) -> None:
    """Convert how the work is divided, precision (`precision` if neither bf16 nor fp16 is on), batch sizes,
    length, optimizer, schedule, evaluation, checkpoints and reports."""
    parallel(draft)
    _precision(draft, precision)
    split = draft.values.get("parallel.sequence_parallel")
    unit = f"group of {split} GPUs" if split else "GPU"
    draft.carry("train.micro_batch_size", note=f"per {unit}, as there")
    if not draft.is_given("gradient_accumulation_steps") and draft.is_given("batch_size"):
        draft.carry("train.global_batch_size", "batch_size", note="over all GPUs")
    else:
        note = f"global batch = micro_batch_size × this × {'groups' if split else 'GPUs'}, as there"
        draft.carry("train.accumulation_steps", note=note)
    if draft.carry("train.max_steps") is None:
        draft.carry("train.num_train_epochs")
    else:
        draft.leave("num_train_epochs num_epochs", "max_steps decides the length")
    draft.carry_all(*_CARRIED)
    for part in (_balance, _optimizer, _schedule, _evaluation, _checkpoints, _reports):
        part(draft)


def _balance(draft: Draft) -> None:
    """Leave what asks for transformers' balance loss of a mixture of experts, with the reason."""
    for name in ("router_aux_loss_coef", "moe_aux_loss_coef", "moe_aux_loss_coeff"):
        if draft.get(name) != 0:
            draft.leave(name, BALANCE)
    for name in ("model_config", "overrides_of_model_config"):  # Axolotl's
        keys = draft.given.get(name)
        if isinstance(keys, Mapping) and keys.get("output_router_logits"):
            draft.left[f"{name}.output_router_logits"] = BALANCE


def _optimizer(draft: Draft) -> None:
    given, value = draft.entry("optim optimizer")
    name, note = str(value), draft.source(given)
    if draft.is_on("use_muon"):
        name, note = "muon", draft.source("use_muon")
    exact = name in OPTIMIZERS and "adamw" not in name
    if not exact and "adamw" not in name:
        draft.leave(given, f"{quote(name)} is not offered; optim.name has {', '.join(OPTIMIZERS)}")
        note = f"{name} is not offered; AdamW may need another learning rate"
    in_8_bits = name in _8_BITS and not draft.has("parallel.offload_optimizer")
    if in_8_bits:
        note += "; its moments are not paged here" if name.startswith("paged") else ""
    elif "adamw" in name and name not in _EXACT:
        note += f"; {name} there, full-precision AdamW here"
    if name == "muon":
        note += "; its steps are as long as AdamW's here, so check the learning rate"
    draft.put("optim.name", name if exact else "adamw_8bit" if in_8_bits else "adamw", note)
    values = {name: draft.get(name) for name in _BETAS}
    betas = [_BETAS[name] if value is None else number(value) for name, value in values.items()]
    if betas != list(_BETAS.values()):
        named = ", ".join(filter(draft.is_given, _BETAS))
        draft.put("optim.betas", betas, named or "default of adam_beta1, adam_beta2")


def _schedule(draft: Draft) -> None:
    options = draft.get("lr_scheduler_kwargs") or {}
    options = json_file.parse_json(options) if isinstance(options, str) else options
    given, value = draft.entry("lr_scheduler_type lr_scheduler")
    kind = VALUES["optim.lr_scheduler_type"].get(str(value), str(value))
    note = draft.source(given)
    if kind not in get_args(Schedule):
        draft.leave(given, f"{quote(str(value))} is not offered; the spec has cosine in its place")
        kind, note = "cosine", f"{value} is not offered"
    given, rate = draft.get("cosine_min_lr_ratio min_lr_rate"), draft.get("learning_rate")
    if "min_lr" in options and rate:
        least = number(options["min_lr"]) / number(rate)
    else:
        least = number(options.get("min_lr_rate") or options.get("min_lr_ratio") or given or 0)
    if kind == "cosine" and least:
        kind = "cosine_with_min_lr"
    draft.put("optim.lr_scheduler_type", kind, note)
    if kind in ("cosine_with_min_lr", "wsd"):
        draft.put("optim.min_lr_ratio", least, "of learning_rate")
    if kind == "wsd":
        if steps := options.get("num_decay_steps"):
            draft.put("optim.decay_steps", whole(steps), "num_decay_steps")
        else:
            draft.put("optim.decay_ratio", 0.1, "not in the config: choose it")
        if "decay_type" in options:
            draft.put("optim.decay_type", options["decay_type"])
    _warmup(draft, kind)


def _warmup(draft: Draft, kind: str) -> None:
    steps, ratio = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if kind == "constant":
        reason = "a constant rate has no warm-up; use constant_with_warmup"
        draft.leave("warmup_steps warmup_ratio", reason)
    elif steps >= 1:
        draft.carry("optim.warmup_steps", "warmup_steps")
        draft.leave("warmup_ratio", "warmup_steps decides")
    elif steps > 0:
        draft.carry("optim.warmup_ratio", "warmup_steps", note="below 1: a fraction of all steps")
    elif ratio > 0:
        draft.carry("optim.warmup_ratio", "warmup_ratio")


def _evaluation(draft: Draft) -> None:
    """Convert when to evaluate and log."""
    strategy = draft.get("eval_strategy evaluation_strategy")
    if strategy in (None, "steps"):
        every = draft.carry("train.eval_every")
        if every is None and strategy == "steps" and draft.number("logging_steps") >= 1:
            note = "the same as logging_steps, as there"
            draft.put("train.eval_every", whole(draft.get("logging_steps")), note)
    else:
        draft.leave("eval_steps", f"eval_strategy is {strategy}")
    if strategy not in (None, "no", False, "steps"):
        draft.leave("eval_strategy", f"{_STEPS}; write them to train.eval_every")
    for key, ours in (("evals_per_epoch", "train.eval_every"), ("saves_per_epoch", "checkpoint.every")):
        draft.leave(key, f"{_STEPS}; divide them by {draft.get(key)} and write that to {ours}")


def _checkpoints(draft: Draft) -> None:
    saving = draft.get("save_strategy")
    if saving in ("no", False):
        draft.put("checkpoint.every", None, "save_strategy: one at the end")
        draft.leave("save_steps", "save_strategy is no")
    elif saving in ("epoch", "best"):
        draft.leave("save_strategy", f"{_STEPS}; write them to checkpoint.every")
        draft.leave("save_steps", f"save_strategy is {saving}")
    else:
        draft.carry("checkpoint.every")
    draft.switch("checkpoint.keep_best", 1, "load_best_model_at_end", "it is in checkpoints/best")
    if draft.get("metric_for_best_model") not in (None, "loss", "eval_loss"):
        draft.leave("metric_for_best_model", "checkpoint.keep_best goes by eval/loss")


def _precision(draft: Draft, fallback: str) -> None:
    """Convert bf16 and fp16 (also "auto"); `fallback` is the precision if neither is on."""
    bf16, fp16 = (
        [name for name in names.split() if draft.get(name) not in (None, False, "false")]
        for names in ("bf16 bfloat16 pure_bf16", "fp16 float16")
    )
    kind, note = fallback, UNSET
    if bf16 and not (fp16 and draft.given.get(bf16[0]) == "auto"):
        kind = "bf16"
        note = bf16[0] + ("" if bf16[0] == "bf16" else "; master weights are fp32 here")
    elif fp16:
        kind, note = "fp16", fp16[0]
    if draft.values.get("model.quantize"):
        name, computed = draft.entry(adapter.COMPUTED)
        computed = str(computed).removeprefix("torch.")
        if VALUES["train.precision"].get(computed, computed) == kind:
            note += f", {name}"
        else:
            draft.leave(name, "train.precision is also the type that 4-bit weights are computed in")
    draft.put("train.precision", kind, note)
    if draft.get("tf32") in (True, "true"):
        if kind == "fp32":
            draft.put("train.tf32", True, "tf32")
        else:
            draft.leave("tf32", f"has no effect on matrix products in {kind}")


def model(draft: Draft, tool: Tool, method: str = "") -> Any:
    """Convert the keys of the model, and those of an adapter. method: the tool's keys for its kind, which is
    returned."""
    for key, names in tool.keys.items():
        draft.carry(key, names)
    _attention(draft)
    _checkpointing(draft)
    if not method:
        return None
    name, kind = draft.entry(method)
    if kind in ("lora", "qlora"):
        adapter.lora(draft, name)
    elif kind != "full":
        reason = "dsft has model.lora, full training, and model.trainable for a part of the weights"
        draft.leave(method, f"{quote(kind)} is not offered; {reason}")
    return kind


def _attention(draft: Draft) -> None:
    for name in ("flash_attn", "attn_implementation", "attn_impl"):
        value = str(draft.get(name)).lower()
        if draft.is_given(name) and value not in _ATTENTION:
            draft.leave(name, f"{quote(value)} is not offered; model.attention: auto chooses one")
        elif draft.is_given(name):
            note = f"{name}: {value} there; {_FLASH}" if value.startswith(("fa", "flash")) else name
            draft.put("model.attention", _ATTENTION[value], note)
    for name, ours in _ATTENTION_SWITCHES.items():
        if draft.get(name) in (True, "true"):
            draft.put("model.attention", ours, f"{name}; {_FLASH}" if ours == "auto" else name)


def _checkpointing(draft: Draft) -> None:
    name = "gradient_checkpointing"
    on = draft.get(name)
    value = bool(on) and on not in (False, "false")
    if not draft.is_given(name) and draft.is_given("disable_gradient_checkpointing"):
        name = "disable_gradient_checkpointing"
        value = value and draft.get(name) not in (True, "true")
    draft.put("model.gradient_checkpointing", value, name if draft.is_given(name) else "the tool's default")
    if on in ("offload", "offload_disk") or draft.get("activation_offloading") not in (None, False):
        draft.put("model.activation_offload", True, "activations in host memory")
        draft.put("model.gradient_checkpointing", True, "needed by activation_offload")


def rows(draft: Draft, too_long: str, note: str) -> None:
    """Convert the weights of the sources, the rows kept for evaluation (a fraction below 1, or a number), the
    longest row, and, except in pretraining, what happens to longer ones."""
    sources, names = draft.values.get("data.train"), "interleave_probs interleave_prob"
    if sources and draft.get(names) is not None:
        name, weights = draft.entry(names)
        for source, weight in zip(sources, names_in(weights), strict=False):
            source["weight"] = number(weight)
        draft.comments["data.train"] += f", {name} as weights"
    names = OTHER_NAMES["data.eval_fraction"]
    if size := draft.number(names):
        draft.carry("data.eval_fraction" if 0 < size < 1 else "data.eval_count", names)
    draft.carry("data.max_length")
    if draft.values["task"] != "pretrain":
        draft.put("data.on_too_long", too_long, note)


def path_of(draft: Draft, where: str, entry: Mapping[str, Any]) -> str:
    """Return the path of a source from an entry {path, name, data_files, split}, as of load_dataset."""
    path, files = entry.get("path"), entry.get("data_files") or []
    files = names_in(next(iter(files.values())) if isinstance(files, Mapping) else files)
    if path in ("json", "csv", "parquet", "text", None) and files:
        if others := ", ".join(files[1:]):
            draft.left[f"{where}.data_files"] = f"add the other files as sources of their own: {others}"
        return files[0]
    if path is None:
        raise mistake(where, "it has no path")
    name = str(path)
    if is_file_name(name) or exists(draft.path.parent / name):
        return name
    if files:
        reason = "dsft reads a whole split of the hub; download the files and name them"
        draft.left[f"{where}.data_files"] = reason
    return hub_path(name, entry.get("name"), entry.get("split", "train"))


def packing(draft: Draft) -> None:
    """Convert the keys of TRL and ms-swift that pack rows."""
    note = PACKED if draft.values["task"] != "pretrain" else ""
    if not draft.switch("data.packing", True, "packing", note):
        draft.switch("data.packing", True, "padding_free", "rows without padding, the same examples a step")


def _reports(draft: Draft) -> None:
    targets, project = draft.get("report_to"), draft.get("wandb_project")
    reports = names_in(targets) if targets is not None else []
    wandb = "wandb" in reports or "all" in reports or bool(project) or draft.is_on("use_wandb")
    if wandb:
        draft.put("wandb.mode", "auto", "report_to" if "wandb" in reports or not project else "wandb_project")
        draft.carry_all("wandb.project", "wandb.entity")
    elif draft.is_given("report_to"):  # else a key and WANDB_PROJECT would record the run
        draft.put("wandb.mode", "disabled", "report_to")
    mode = draft.get("wandb_mode")
    if mode == "disabled" or (mode == "offline" and wandb):
        draft.put("wandb.mode", mode, "wandb_mode")
    if "tensorboard" in reports or draft.is_on("use_tensorboard"):
        draft.put("tensorboard", True, "report_to" if "tensorboard" in reports else "use_tensorboard")
    if "swanlab" in reports or draft.is_on("use_swanlab"):
        draft.put("swanlab.project", draft.get("swanlab_project") or "dsft", "swanlab")
        draft.carry("swanlab.workspace", "swanlab_workspace")
