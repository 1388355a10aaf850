"""Suggest the spec's key for an unknown one: a name that other tools use, or a misspelling.

Sources: transformers' TrainingArguments and TRL, LLaMA-Factory, Axolotl, litgpt, torchtune, ms-swift,
DeepSpeed.
"""

from __future__ import annotations

import difflib
from functools import cache
from typing import get_args

from pydantic import BaseModel

from dsft.spec.not_offered import feature_of_key, feature_of_value, is_off
from dsft.spec.schema import Spec

# name in another tool -> key of the spec, in any section
ALIASES: dict[str, str] = {
    "model_name_or_path": "model.name_or_path",
    "model_name": "model.name_or_path",
    "base_model": "model.name_or_path",
    "checkpoint_dir": "model.name_or_path",
    "tokenizer_name": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "attn_implementation": "model.attention",
    "attn_impl": "model.attention",
    "flash_attn": "model.attention",
    "flash_attention": "model.attention",
    "enable_activation_checkpointing": "model.gradient_checkpointing",
    "activation_checkpointing": "model.gradient_checkpointing",
    "recompute": "model.gradient_checkpointing",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target": "model.lora.target_modules",
    "lora_target_modules": "model.lora.target_modules",
    "additional_target": "model.lora.modules_to_save",
    "freeze_trainable_modules": "model.trainable",
    "freeze_trainable_layers": "model.trainable",
    "unfrozen_parameters": "model.trainable",
    "torch_compile": "model.compile",
    "use_liger_kernel": "model.kernels: liger",
    "use_liger": "model.kernels: liger",
    "enable_liger_kernel": "model.kernels: liger",
    "liger_kernel": "model.kernels: liger",
    "liger_rope": "model.kernels: liger",
    "liger_rms_norm": "model.kernels: liger",
    "liger_glu_activation": "model.kernels: liger",
    "tf32": "train.tf32",
    "special_tokens": "model.add_tokens",
    "adapter": "model.lora",
    "finetuning_type": "model.lora (full training without it)",
    "dataset": "data.train",
    "datasets": "data.train",
    "dataset_path": "data.train",
    "train_file": "data.train",
    "train_data": "data.train",
    "eval_dataset": "data.eval",
    "eval_data": "data.eval",
    "validation_file": "data.eval",
    "test_datasets": "data.eval",
    "val_size": "data.eval_fraction",
    "val_set_size": "data.eval_fraction",
    "cutoff_len": "data.max_length",
    "sequence_len": "data.max_length",
    "seq_length": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "model_max_length": "data.max_length",
    "block_size": "data.max_length",
    "sample_packing": "data.packing",
    "packed": "data.packing",
    "neat_packing": "data.packing",
    "mask_history": "data.train_on: last",
    "train_on_prompt": "data.train_on: all",
    "train_on_inputs": "data.train_on: all",
    "assistant_only_loss": "data.train_on: assistant",
    "completion_only_loss": "data.train_on: assistant",
    "max_samples": "max_rows of a source in data.train",
    "interleave_probs": "weight of each source in data.train",
    "mix_strategy": "weight of each source in data.train",
    "preprocessing_num_workers": "data.num_workers",
    "dataset_num_proc": "data.num_workers",
    "dataset_prepared_path": "data.cache_dir",
    "template": "data.chat_template",
    "per_device_train_batch_size": "train.micro_batch_size",
    "per_device_eval_batch_size": "train.micro_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "micro_batch": "train.micro_batch_size",
    "batch_size": "train.micro_batch_size (per rank) or train.global_batch_size (over all ranks)",
    "train_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.accumulation_steps",
    "gradient_accumulation_iters": "train.accumulation_steps",
    "grad_accum": "train.accumulation_steps",
    "num_epochs": "train.num_train_epochs",
    "epochs": "train.num_train_epochs",
    "max_iters": "train.max_steps",
    "num_train_steps": "train.max_steps",
    "eval_steps": "train.eval_every",
    "eval_interval": "train.eval_every",
    "eval_strategy": "train.eval_every (in optimizer steps)",
    "evals_per_epoch": "train.eval_every (in optimizer steps)",
    "logging_steps": "train.log_every",
    "log_interval": "train.log_every",
    "bf16": "train.precision: bf16",
    "pure_bf16": "train.precision: bf16",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "mixed_precision": "train.precision",
    "fp16": "train.precision: fp16",
    "gradient_clipping": "train.max_grad_norm",
    "clip_grad_norm": "train.max_grad_norm",
    "max_norm": "train.max_grad_norm",
    "communication_data_type": "train.reduce_dtype",
    "neftune_noise_alpha": "train.neftune_alpha",
    "label_smoothing_factor": "train.label_smoothing",
    "lr": "optim.learning_rate",
    "optimizer": "optim.name",
    "scheduler": "optim.lr_scheduler_type",
    "lr_scheduler": "optim.lr_scheduler_type",
    "schedule": "optim.lr_scheduler_type",
    "warmup": "optim.warmup_steps or optim.warmup_ratio",
    "num_warmup_steps": "optim.warmup_steps",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "min_lr": "optim.min_lr_ratio (a fraction of learning_rate)",
    "cosine_min_lr_ratio": "optim.min_lr_ratio",
    "min_lr_rate": "optim.min_lr_ratio",
    "num_decay_steps": "optim.decay_steps",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_strategy": "checkpoint.every (in optimizer steps)",
    "saves_per_epoch": "checkpoint.every (in optimizer steps)",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "checkpoint.resume",
    "load_best_model_at_end": "checkpoint.keep_best",
    "metric_for_best_model": "checkpoint.keep_best (by eval/loss)",
    "overwrite_output_dir": "checkpoint.resume",
    "stage": "task",
    "rl": "task: dpo",
    "training_type": "task",
    "pref_beta": "dpo.beta",
    "rl_beta": "dpo.beta",
    "dpo_beta": "dpo.beta",
    "orpo_alpha": "dpo.beta",
    "cpo_alpha": "dpo.sft_weight",
    "pref_loss": "dpo.loss_type",
    "pref_ftx": "dpo.sft_weight",
    "rpo_alpha": "dpo.sft_weight",
    "gamma": "dpo.simpo_gamma",
    "gamma_beta_ratio": "dpo.simpo_gamma (a margin of rewards: the ratio × beta)",
    "dpo_label_smoothing": "dpo.label_smoothing",
    "reference_free": "dpo.loss_type: simpo or orpo",
    "ref_model": "dpo.reference_model",
    "ref_model_path": "dpo.reference_model",
    "ref_model_name_or_path": "dpo.reference_model",
    "reference_model_name_or_path": "dpo.reference_model",
    "precompute_ref_log_probs": "dpo.reference: precomputed",
    "cache_logprobs": "dpo.reference: precomputed",
    "max_prompt_length": "data.max_length (of the prompt and one answer)",
    "max_completion_length": "data.max_length (of the prompt and one answer)",
    "padding_free": "data.packing",
    "zero": "parallel.zero_stage",
    "zero_optimization": "parallel.zero_stage",
    "pipeline": "parallel.pipeline_stages",
    "pipeline_model_parallel_size": "parallel.pipeline_stages",
    "pipeline_parallel_size": "parallel.pipeline_stages",
    "pp": "parallel.pipeline_stages",
    "pp_size": "parallel.pipeline_stages",
    "offload_param": "parallel.offload_parameters",
    "offload_param_device": "parallel.offload_parameters: {device: …}",
    "offload_optimizer_device": "parallel.offload_optimizer: {device: …}",
    "cpu_offload": "parallel.offload_optimizer: {device: cpu}",
    "hostfile": "cluster.hosts",
    "nodes": "cluster.hosts",
    "num_gpus": "cluster.hosts",
    "report_to": "wandb.mode",
    "wandb_project": "wandb.project",
    "wandb_entity": "wandb.entity",
    "wandb_mode": "wandb.mode",
    "run_name": "name",
    "experiment_name": "name",
    "output_path": "output_dir",
    "out_dir": "output_dir",
}

# Names with another meaning in one section: dotted name -> key of the spec.
LOCAL_ALIASES: dict[str, str] = {
    "parallel.stage": "parallel.zero_stage",
    "optim.type": "optim.name",
    "optim.weight_decay_rate": "optim.weight_decay",
    "optim.beta1": "optim.betas",
    "optim.beta2": "optim.betas",
    "model.path": "model.name_or_path",
    "model.name": "model.name_or_path",
    "model.config": "model.from_config",
    "model.dtype": "train.precision",
    "cluster.slots": "cluster.hosts: {host: slots}",
    "checkpoint.dir": "output_dir",
    "checkpoint.save_every": "checkpoint.every",
}

# Key -> values that other tools use for it -> value in the spec.
VALUES: dict[str, dict[str, str]] = {
    "task": {
        "pt": "pretrain",
        "preference": "dpo",
        **{loss: f"dpo with dpo.loss_type: {loss}" for loss in ("ipo", "simpo", "orpo")},
    },
    "dpo.loss_type": {
        "dpo": "sigmoid",
        "cdpo": "sigmoid with dpo.label_smoothing",
        "rdpo": "robust",
        "slic": "hinge",
        "rso": "hinge",
        "apo": "apo_zero",
        "cpo": "simpo with dpo.simpo_gamma: 0",
    },
    "model.attention": {"flex_attention": "auto"},
    "dpo.reference": {"precompute": "precomputed", "model": "live", "lora": "adapter"},
}

_DEEPSPEED = "the JSON is made from the spec; leave it out, or give train.py a file with --deepspeed_config"

NO_KEY_FOR_IT: dict[str, str] = {
    "deepspeed": _DEEPSPEED,
    "deepspeed_config": _DEEPSPEED,
    "do_train": "leave it out: a run always trains",
    "do_eval": "leave it out: data.eval is evaluated where it is given",
    "zero3_init_flag": "leave it out: under ZeRO 3 no rank ever holds the whole model",
    "zero3_save_16bit_model": "leave it out: every run exports the whole model",
    "streaming": "leave it out: files are always read as streams",
    "push_to_hub": "leave it out: the export is a folder with a model card; send it with the hub's command",
    "hub_model_id": "leave it out: the export is a folder with a model card; send it with the hub's command",
    "early_stopping_patience": "leave it out: checkpoint.keep_best keeps the one of the lowest eval/loss",
    "group_by_length": "leave it out: rows follow train.seed; data.packing leaves no padding",
    "use_unsloth": "leave it out: the output layer goes in chunks, model.compile compiles layers",
    "<<": "merge keys are not read; write the keys out, or change single ones with key=value",
}


def suggestion(section: str, key: str, value: object = None) -> str:
    """Return what to do about an unknown key. section: dotted path of its mapping, without list numbers."""
    name = key.strip().lower().replace("-", "_")
    if name in NO_KEY_FOR_IT:
        return NO_KEY_FOR_IT[name]
    not_offered = feature_of_key(name) or feature_of_value(name, value)
    if not_offered is not None:
        return "leave it out" if is_off(value) else not_offered.clause()
    target = likely_key(section, name)
    if target is not None:
        return f"did you mean {target}?"
    siblings = ", ".join(sorted(k.rpartition(".")[2] for k in keys() if k.rpartition(".")[0] == section))
    return f"its keys are {siblings} (docs/spec.md; docs/limits.md has what is not offered)"


def likely_key(section: str, name: str) -> str | None:
    """Return the key that the user most likely meant by an unknown one, or None."""
    if feature_of_key(name) is not None:
        return None
    here = f"{section}." if section else ""
    local = LOCAL_ALIASES.get(here + name) or (ALIASES.get(name) if here + name not in keys() else None)
    if local is not None:
        return local
    elsewhere = [key for key in keys() if key.rpartition(".")[2] == name]
    if elsewhere:
        depth = min(key.count(".") for key in elsewhere)
        return " or ".join(key for key in elsewhere if key.count(".") == depth)
    siblings = [key for key in keys() if key.rpartition(".")[0] == section]
    close = difflib.get_close_matches(here + name, siblings, n=1, cutoff=0.7)
    if close and difflib.SequenceMatcher(None, close[0].rpartition(".")[2], name).ratio() >= 0.7:
        return close[0]
    return _close_anywhere(name)


def _close_anywhere(name: str) -> str | None:
    targets = {**{key.rpartition(".")[2]: key for key in keys()}, **ALIASES}
    close = difflib.get_close_matches(name, targets, n=1, cutoff=0.8)
    return targets[close[0]] if close else None


@cache
def keys() -> tuple[str, ...]:
    """Return every key of the schema, dotted, without list numbers; a section comes before its keys."""
    return tuple(_keys(Spec, ""))


def _keys(section: type[BaseModel], prefix: str) -> list[str]:
    found = []
    for name, field in section.model_fields.items():
        found.append(prefix + name)
        for inner in sections_in(field.annotation):
            found += _keys(inner, f"{prefix}{name}.")
    return found


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """Return the section classes in a field's annotation: the annotation itself, or members of a union, tuple
    or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in sections_in(part)]


@cache
def descriptions() -> dict[str, str]:
    """Return dotted key, without list numbers -> its description in the schema."""
    return dict(_descriptions(Spec, ""))


def _descriptions(section: type[BaseModel], prefix: str) -> list[tuple[str, str]]:
    found = []
    for name, field in section.model_fields.items():
        found.append((prefix + name, field.description or ""))
        for inner in sections_in(field.annotation):
            found += _descriptions(inner, f"{prefix}{name}.")
    return found
