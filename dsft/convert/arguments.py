"""Convert what LLaMA-Factory, Axolotl, TRL and ms-swift share: the keys of transformers' TrainingArguments,
also under Axolotl's names, and the adapter, attention and DeepSpeed keys of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from dsft.convert.draft import Draft, NotOfferedError, flag, mistake, names_in, number, positive, whole
from dsft.spec.document import quote
from dsft.spec.not_offered import is_off
from dsft.spec.schema import Optim, Schedule
from dsft.system import json_file

_SCHEDULES = {"warmup_stable_decay": "wsd", "cosine_warmup_with_min_lr": "cosine_with_min_lr"}
_ATTENTION = {
    "auto": "auto", "disabled": "eager", "eager": "eager", "sdpa": "sdpa",
    **dict.fromkeys(("fa2", "fa3", "flash_attn", "flash_attention_2", "flash_attention_3"), "auto"),
}  # fmt: skip
_FLASH = (
    "auto takes FlashAttention, also without the package flash-attn, where GPU, precision and model allow it"
)
BALANCE = (
    "transformers' balance loss of a mixture of experts depends on how a step is divided and is not offered; "
    "the nearest is model.experts.balance: global_batch with balance_weight: the coefficient × the experts "
    "per token (docs/experts.md)"
)
_QUANTIZED = "load_in_4bit load_in_8bit quantization_bit quantization_method quant_bits quant_method".split()
_STEPS = "counted in steps here, and dsft preview prints the steps of an epoch"
PACKED = (
    "there a packed row of max_length counts as one example, here each example counts: for steps of the same "
    "size multiply global_batch_size by the examples that fit into a row (dsft preview shows them)"
)


def training(draft: Draft) -> None:
    """Convert batch sizes, length, precision, optimizer, schedule, evaluation, checkpoints and reports."""
    _batch(draft)
    _balance(draft)
    _optimizer(draft)
    _schedule(draft)
    _when(draft)
    _reports(draft)
    draft.carry("train.seed", "seed", to=whole)
    draft.carry("train.max_grad_norm", "max_grad_norm", to=number)
    draft.carry("train.neftune_alpha", "neftune_noise_alpha", to=number)
    draft.carry("train.label_smoothing", "label_smoothing_factor", to=lambda value: number(value) or None)


def _batch(draft: Draft) -> None:
    split = draft.spec.get("parallel", {}).get("sequence_parallel")
    unit = f"group of {split} GPUs" if split else "GPU"
    draft.carry(
        "train.micro_batch_size",
        "per_device_train_batch_size", "micro_batch_size",
        to=whole, note=f"per {unit}, as there",
    )  # fmt: skip
    if not draft.is_given("gradient_accumulation_steps") and draft.is_given("batch_size"):
        draft.carry("train.global_batch_size", "batch_size", to=whole, note="over all GPUs")
    else:
        draft.carry(
            "train.accumulation_steps",
            "gradient_accumulation_steps",
            to=whole,
            note=f"global batch = micro_batch_size × this × {'groups' if split else 'GPUs'}, as there",
        )
    if draft.carry("train.max_steps", "max_steps", to=positive) is None:
        draft.carry("train.num_train_epochs", "num_train_epochs", "num_epochs", to=number)
    else:
        draft.leave("num_train_epochs", "max_steps decides the length")
        draft.leave("num_epochs", "max_steps decides the length")


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
    name = str(draft.get("optim", "optimizer"))
    given = "optim" if draft.is_given("optim") or "optim" in draft.defaults else "optimizer"
    if name == "sgd":
        draft.put("optim.name", "sgd", given)
    elif name.startswith("adamw") or "adamw" in name:
        exact = name in ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
        note = "" if exact else f"; {name} there, full-precision AdamW here"
        draft.put("optim.name", "adamw", (given if draft.is_given(given) else f"default of {given}") + note)
    else:
        draft.put("optim.name", "adamw", f"{name} is not offered; AdamW may need another learning rate")
        draft.leave(given, f"{quote(name)} is not offered; optim.name has adamw and sgd")
    draft.carry("optim.learning_rate", "learning_rate", to=number)
    draft.carry("optim.weight_decay", "weight_decay", to=number)
    given_betas = (draft.get("adam_beta1"), 0.9), (draft.get("adam_beta2"), 0.999)
    betas = [default if beta is None else number(beta) for beta, default in given_betas]
    if betas != list(Optim.model_fields["betas"].default):
        named = [name for name in ("adam_beta1", "adam_beta2") if draft.is_given(name)]
        draft.put("optim.betas", betas, ", ".join(named) or "default of adam_beta1, adam_beta2")
    draft.carry("optim.eps", "adam_epsilon", to=number)


def _schedule(draft: Draft) -> None:
    options = draft.get("lr_scheduler_kwargs") or {}
    options = json_file.parse_json(options) if isinstance(options, str) else options
    theirs = "lr_scheduler_type"
    given = theirs if draft.is_given(theirs) or theirs in draft.defaults else "lr_scheduler"
    name = str(draft.get("lr_scheduler_type", "lr_scheduler"))
    least = _least(draft, options)
    kind, note = _SCHEDULES.get(name, name), given if draft.is_given(given) else f"default of {given}"
    if kind not in get_args(Schedule):
        draft.leave(given, f"{quote(name)} is not offered; the spec has cosine in its place")
        kind, note = "cosine", f"{name} is not offered"
    if kind == "cosine" and least:
        kind = "cosine_with_min_lr"
    draft.put("optim.lr_scheduler_type", kind, note)
    if kind in ("cosine_with_min_lr", "wsd"):
        draft.put("optim.min_lr_ratio", least, "of learning_rate")
    if kind == "wsd":
        steps = options.get("num_decay_steps")
        key, value = ("decay_steps", whole(steps)) if steps else ("decay_ratio", 0.1)
        draft.put(f"optim.{key}", value, "num_decay_steps" if steps else "not in the config: choose it")
        if "decay_type" in options:
            draft.put("optim.decay_type", options["decay_type"])
    _warmup(draft, kind)


def _least(draft: Draft, options: Mapping[str, Any]) -> float:
    """Return the lowest learning rate as a fraction of the highest."""
    given, rate = draft.get("cosine_min_lr_ratio", "min_lr_rate"), draft.get("learning_rate")
    if "min_lr" in options and rate:
        return number(options["min_lr"]) / number(rate)
    return number(options.get("min_lr_rate") or options.get("min_lr_ratio") or given or 0)


def _warmup(draft: Draft, kind: str) -> None:
    steps, ratio = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if kind == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            draft.leave(key, "a constant rate has no warm-up; use constant_with_warmup")
    elif steps >= 1:
        draft.carry("optim.warmup_steps", "warmup_steps", to=whole)
        draft.leave("warmup_ratio", "warmup_steps decides")
    elif steps > 0:
        draft.carry("optim.warmup_ratio", "warmup_steps", to=number, note="below 1: a fraction of all steps")
    elif ratio > 0:
        draft.carry("optim.warmup_ratio", "warmup_ratio", to=number)


def _when(draft: Draft) -> None:
    """Convert when to evaluate, log and save."""

    def steps(value: Any) -> int | None:
        if 0 < number(value) < 1:
            raise NotOfferedError("a fraction of all steps; here a number of steps is needed")
        return positive(value)

    strategy = draft.get("eval_strategy", "evaluation_strategy")
    if strategy in (None, "steps"):
        every = draft.carry("train.eval_every", "eval_steps", to=steps)
        if every is None and strategy == "steps" and draft.number("logging_steps") >= 1:
            draft.put(
                "train.eval_every", whole(draft.get("logging_steps")), "the same as logging_steps, as there"
            )
    else:
        draft.leave("eval_steps", f"eval_strategy is {strategy}")
    if strategy not in (None, "no", False, "steps"):
        draft.leave("eval_strategy", f"{_STEPS}; write them to train.eval_every")
    for key, ours in (("evals_per_epoch", "train.eval_every"), ("saves_per_epoch", "checkpoint.every")):
        draft.leave(key, f"{_STEPS}; divide them by {draft.get(key)} and write that to {ours}")
    draft.carry("train.eval_on_start", "eval_on_start", to=lambda value: flag(value) or None)
    draft.carry("train.log_every", "logging_steps", to=steps)
    saving = draft.get("save_strategy")
    if saving in ("no", False):
        draft.put("checkpoint.every", None, "save_strategy: one at the end")
        draft.leave("save_steps", "save_strategy is no")
    elif saving in ("epoch", "best"):
        draft.leave("save_strategy", f"{_STEPS}; write them to checkpoint.every")
        draft.leave("save_steps", f"save_strategy is {saving}")
    else:
        draft.carry("checkpoint.every", "save_steps", to=steps)
    draft.carry("checkpoint.keep_last", "save_total_limit", to=positive)
    best = draft.is_on("load_best_model_at_end")
    if best and draft.is_given("load_best_model_at_end"):
        draft.put("checkpoint.keep_best", 1, "load_best_model_at_end; it is in checkpoints/best")
    if draft.get("metric_for_best_model") not in (None, "loss", "eval_loss"):
        draft.leave("metric_for_best_model", "checkpoint.keep_best goes by eval/loss")
    draft.get("greater_is_better")


def held_out(draft: Draft, name: str) -> None:
    """Convert the rows kept for evaluation: a fraction below 1, or a number of rows."""
    size = draft.number(name)
    if 0 < size < 1:
        draft.carry("data.eval_fraction", name, to=number)
    elif size:
        draft.carry("data.eval_count", name, to=whole)


def precision(draft: Draft, fallback: str) -> None:
    """Convert bf16 and fp16 (also "auto"); `fallback` is the precision if neither is on."""
    half = [
        name for name in ("bf16", "bfloat16", "pure_bf16") if draft.get(name) not in (None, False, "false")
    ]
    fp16 = [name for name in ("fp16", "float16") if draft.get(name) not in (None, False, "false")]
    draft.get("float32", "fp16_full_eval", "bf16_full_eval", "fp16_opt_level", "half_precision_backend")
    if half and not (fp16 and draft.given.get(half[0]) == "auto"):
        note = "; master weights are fp32 here" if half[0] in ("pure_bf16", "bfloat16") else ""
        draft.put("train.precision", "bf16", half[0] + note)
    elif fp16:
        draft.put("train.precision", "fp16", fp16[0])
    else:
        draft.put("train.precision", fallback, "neither bf16 nor fp16 is set")
    if draft.get("tf32") in (True, "true"):
        if draft.spec["train"]["precision"] == "fp32":
            draft.put("train.tf32", True, "tf32")
        else:
            draft.leave("tf32", f"has no effect on matrix products in {draft.spec['train']['precision']}")


def attention(draft: Draft) -> None:
    """Convert the choice of an attention implementation."""
    for name in ("flash_attn", "attn_implementation", "attn_impl"):
        if draft.is_given(name):
            value = str(draft.get(name)).lower()
            if value in _ATTENTION:
                note = f"{name}: {value} there; {_FLASH}" if value.startswith(("fa", "flash")) else name
                draft.put("model.attention", _ATTENTION[value], note)
            else:
                draft.leave(name, f"{quote(value)} is not offered; model.attention: auto chooses one")
    switches = {"flash_attention": "auto", "sdp_attention": "sdpa", "eager_attention": "eager"}
    for name, ours in switches.items():
        if draft.get(name) in (True, "true"):
            draft.put("model.attention", ours, f"{name}; {_FLASH}" if ours == "auto" else name)
    draft.get("xformers_attention", "flex_attention", "sage_attention")


def checkpointing(draft: Draft, *, by_default: bool) -> None:
    """Convert gradient checkpointing; `by_default`: whether the tool has it on."""
    on = draft.get("gradient_checkpointing")
    off = draft.get("disable_gradient_checkpointing") in (True, "true")
    value = by_default and not off if on is None else on not in (False, "false")
    named = "gradient_checkpointing" if on is not None else "disable_gradient_checkpointing"
    draft.put("model.gradient_checkpointing", value, named if draft.is_given(named) else "the tool's default")
    offload = draft.get("activation_offloading")
    if on in ("offload", "offload_disk") or offload not in (None, False):
        draft.put("model.activation_offload", True, "activations in host memory")
        draft.put("model.gradient_checkpointing", True, "needed by activation_offload")


def quantization(draft: Draft) -> None:
    """Leave the keys of quantized training (QLoRA) with the reason."""
    reason = "dsft trains no quantized weights; here the adapter is trained on the unquantized model"
    for name in (*_QUANTIZED, *(name for name in draft.given if name.startswith(("bnb_", "hqq_")))):
        if not is_off(draft.get(name)):
            draft.leave(name, reason)


def lora(draft: Draft, name: str) -> None:
    """Convert the keys of a LoRA adapter. name: key that asks for one."""
    draft.comments["model.lora"] = name if draft.is_given(name) else f"default of {name}"
    rank = draft.carry("model.lora.rank", "lora_rank", "lora_r", to=whole)
    if not draft.is_given("lora_alpha") and draft.defaults.get("lora_alpha") == "2 × rank":
        draft.put("model.lora.alpha", 2 * rank, "default of lora_alpha: twice the rank")
        draft.read.add("lora_alpha")
    else:
        draft.carry("model.lora.alpha", "lora_alpha", to=number)
    if draft.spec["task"] == "dpo" and draft.number("lora_dropout") > 0:
        draft.put("model.lora.dropout", 0.0, "lora_dropout, but dropout would change the policy alone")
        draft.leave("lora_dropout", "dropout would make the policy differ from its reference: 0 here")
    else:
        draft.carry("model.lora.dropout", "lora_dropout", to=number)
    names = ("lora_target", "lora_target_modules", "target_modules")
    if draft.is_on("lora_target_linear"):
        draft.put("model.lora.target_modules", "all-linear", "lora_target_linear")
        for name in names:
            draft.leave(name, "lora_target_linear covers all linear modules")
    else:
        draft.carry("model.lora.target_modules", *names, to=_targets)
    for ours, others in (
        ("use_rslora", ("use_rslora", "peft_use_rslora")), ("use_dora", ("use_dora", "peft_use_dora"))
    ):  # fmt: skip
        draft.carry(f"model.lora.{ours}", *others, to=lambda value: flag(value) or None)
    draft.carry(
        "model.lora.modules_to_save",
        "additional_target", "lora_modules_to_save", "modules_to_save",
        to=lambda value: names_in(value) or None,
    )  # fmt: skip
    draft.carry(
        "model.lora.path", "adapter_name_or_path", "lora_model_dir", "adapters",
        to=lambda value: _one_of(names_in(value)),
    )  # fmt: skip


def _targets(value: Any) -> str | list[str]:
    names = names_in(value)
    if names in (["all"], ["all-linear"]):
        return "all-linear"
    if any("*" in name or "|" in name or "\\" in name for name in names):
        raise NotOfferedError("a pattern; model.lora.target_modules takes names of modules, or all-linear")
    return names


def _one_of(names: list[str]) -> str | None:
    if len(names) > 1:
        raise NotOfferedError("several adapters; merge them first, here one is trained")
    return names[0] if names else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raise SpecError if there is none."""
    try:
        found = json_file.read_json(path)
    except (OSError, ValueError) as error:
        raise mistake(str(path), f"it {json_file.reason_of(error)}") from error
    if not isinstance(found, dict):
        raise mistake(str(path), "it is no mapping of keys to values")
    return found


def _reports(draft: Draft) -> None:
    targets = draft.get("report_to")
    project = draft.get("wandb_project")
    reports = names_in(targets) if targets is not None else []
    wandb = "wandb" in reports or "all" in reports or bool(project) or draft.is_on("use_wandb")
    named = "report_to" if "wandb" in reports or not project else "wandb_project"
    if wandb:
        draft.put("wandb.mode", "auto", named)
        draft.carry("wandb.project", "wandb_project")
        draft.carry("wandb.entity", "wandb_entity")
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
    for name in ("swanlab_api_key", "swanlab_token", "hub_token", "hf_hub_token", "swanlab_secret"):
        draft.leave(name, "a secret; set it as an environment variable (docs/telemetry.md)")
