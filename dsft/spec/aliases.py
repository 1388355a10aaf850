"""Suggest the spec's key for an unknown one: a name that other tools use, or a misspelling. The tables serve
`dsft convert` too.

Sources: transformers' TrainingArguments and TRL, LLaMA-Factory, Axolotl, litgpt, torchtune, ms-swift,
DeepSpeed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dsft.spec.not_offered import feature_of_key, feature_of_value, is_off
from dsft.spec.schema import Spec

OTHER_NAMES = {
    "model.name_or_path": "model_name_or_path model_name base_model checkpoint_dir model.path model.name",
    "model.from_config": "model.config",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "model.attention": "attn_implementation attn_impl flash_attn flash_attention",
    "model.gradient_checkpointing": "enable_activation_checkpointing activation_checkpointing recompute",
    "model.lora.rank": "lora_rank lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.target_modules": "lora_target lora_target_modules target_modules targets",
    "model.lora.target_modules: all-linear": "lora_target_linear",
    "model.lora.path": "adapter_name_or_path lora_model_dir adapters",
    "model.lora.modules_to_save": "additional_target lora_modules_to_save modules_to_save",
    "model.lora.use_rslora": "use_rslora peft_use_rslora",
    "model.lora.use_dora": "use_dora peft_use_dora",
    "model.trainable": "freeze_trainable_modules freeze_trainable_layers unfrozen_parameters",
    "model.experts.balance_weight (with model.experts.balance)": "router_aux_loss_coef aux_loss_coef "
    "moe_aux_loss_coef moe_aux_loss_coeff output_router_logits",
    "model.compile": "torch_compile",
    "model.kernels: auto or liger": "use_liger_kernel use_liger enable_liger_kernel liger_kernel "
    "liger_rope liger_rms_norm liger_glu_activation",
    "model.add_tokens": "special_tokens",
    "model.lora": "adapter",
    "model.lora (full training without it)": "finetuning_type",
    "data.train": "dataset datasets dataset_path train_file train_data",
    "data.eval": "eval_dataset eval_data validation_file test_datasets",
    "data.eval_fraction": "val_size val_set_size split_dataset_ratio test_split_size",
    "data.max_length": "cutoff_len sequence_len max_length seq_length "
    "max_seq_length max_seq_len model_max_length block_size",
    "data.packing": "sample_packing packed neat_packing padding_free",
    "data.train_on: last": "mask_history",
    "data.train_on: all": "train_on_prompt train_on_inputs",
    "data.train_on: assistant": "assistant_only_loss completion_only_loss",
    "data.thinking": "enable_thinking preserve_thinking",
    "max_rows of a source in data.train": "max_samples",
    "weight of each source in data.train": "interleave_probs mix_strategy",
    "data.num_workers": "preprocessing_num_workers dataset_num_proc",
    "data.cache_dir": "dataset_prepared_path",
    "data.chat_template": "template",
    "train.micro_batch_size": "per_device_train_batch_size micro_batch_size "
    "train_micro_batch_size_per_gpu micro_batch",
    "train.micro_batch_size (also for evaluation)": "per_device_eval_batch_size",
    "train.micro_batch_size (per rank) or train.global_batch_size (over all ranks)": "batch_size",
    "train.global_batch_size": "train_batch_size",
    "train.accumulation_steps": "gradient_accumulation_steps gradient_accumulation_iters grad_accum",
    "train.num_train_epochs": "num_train_epochs num_epochs epochs",
    "train.max_steps": "max_steps max_iters num_train_steps",
    "train.eval_every": "eval_steps eval_interval",
    "train.eval_on_start": "eval_on_start",
    "train.seed": "seed",
    "train.eval_every (in optimizer steps)": "eval_strategy evals_per_epoch",
    "train.log_every": "logging_steps log_interval",
    "train.precision: bf16": "bf16 pure_bf16",
    "train.precision": "dtype torch_dtype mixed_precision model.dtype",
    "train.precision: fp16": "fp16",
    "train.max_grad_norm": "max_grad_norm gradient_clipping clip_grad_norm max_norm",
    "train.reduce_dtype": "communication_data_type",
    "train.neftune_alpha": "neftune_noise_alpha",
    "train.label_smoothing": "label_smoothing_factor",
    "optim.name: muon": "use_muon",
    "optim.learning_rate": "learning_rate lr",
    "optim.weight_decay": "weight_decay optim.weight_decay_rate",
    "optim.name": "optimizer optim.type",
    "optim.lr_scheduler_type": "scheduler lr_scheduler schedule",
    "optim.warmup_steps or optim.warmup_ratio": "warmup",
    "optim.warmup_steps": "num_warmup_steps",
    "optim.betas": "adam_beta1 adam_beta2 optim.beta1 optim.beta2",
    "optim.eps": "adam_epsilon",
    "optim.min_lr_ratio (a fraction of learning_rate)": "min_lr",
    "optim.min_lr_ratio": "cosine_min_lr_ratio min_lr_rate",
    "optim.decay_steps": "num_decay_steps",
    "checkpoint.every": "save_steps save_interval save_every",
    "checkpoint.every (in optimizer steps)": "save_strategy saves_per_epoch",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint overwrite_output_dir",
    "checkpoint.keep_best": "load_best_model_at_end",
    "checkpoint.keep_best (by eval/loss)": "metric_for_best_model",
    "task": "stage training_type",
    "task: dpo": "rl",
    "dpo.beta": "pref_beta rl_beta dpo_beta beta orpo_alpha",
    "dpo.sft_weight": "cpo_alpha pref_ftx rpo_alpha",
    "dpo.loss_type": "pref_loss",
    "dpo.simpo_gamma": "simpo_gamma gamma",
    "dpo.simpo_gamma (a margin of rewards: the ratio × beta)": "gamma_beta_ratio",
    "dpo.label_smoothing": "dpo_label_smoothing label_smoothing",
    "dpo.loss_type: simpo or orpo": "reference_free",
    "dpo.reference_model": "ref_model ref_model_path ref_model_name_or_path reference_model_name_or_path",
    "dpo.reference: precomputed": "precompute_ref_log_probs cache_logprobs",
    "kto.desirable_weight": "kto_chosen_weight desirable_weight kto_desirable_weight",
    "kto.undesirable_weight": "kto_rejected_weight undesirable_weight kto_undesirable_weight",
    "reward.center_rewards_coefficient": "center_rewards_coefficient",
    "classify.labels (their names)": "num_labels id2label label_names",
    "distill.reference_model": "teacher_model teacher_model_name_or_path teacher_model_path teacher",
    "distill.temperature": "kd_temperature",
    "distill.top_k": "gkd_logits_topk kd_top_k",
    "distill.weight": "kd_alpha",
    "distill.weight (1 - weight is that of the next-token loss)": "kd_ce_alpha sft_alpha",
    "data.max_length (of the prompt and one answer)": "max_prompt_length max_completion_length",
    "parallel.zero_stage": "zero zero_optimization parallel.stage",
    "parallel.pipeline_stages": "pipeline pipeline_model_parallel_size pipeline_parallel_size pp pp_size",
    "parallel.sequence_parallel": "sp sp_size ulysses alst sequence_parallel_size "
    "ulysses_sequence_parallel_size",
    "model.mlp_chunks": "tiled_mlp_num_shards",
    "model.mlp_chunks (by itself with gradient_checkpointing)": "tiled_mlp",
    "parallel.zero_hpz_partition_size": "hpz hpzero hpz_size hpz_partition_size",
    "parallel.offload_parameters": "offload_param",
    "parallel.offload_parameters: {device: …}": "offload_param_device",
    "parallel.offload_optimizer: {device: …}": "offload_optimizer_device",
    "parallel.offload_optimizer: {device: cpu}": "cpu_offload",
    "cluster.hosts": "hostfile nodes num_gpus",
    "cluster.hosts: {host: slots}": "cluster.slots",
    "wandb.mode": "report_to wandb_mode",
    "wandb.project": "wandb_project",
    "wandb.entity": "wandb_entity",
    "name": "run_name experiment_name",
    "output_dir": "output_path out_dir checkpoint.dir",
}
"""Key of the spec, maybe with a note -> its names in other tools, its own among them if they have it. A name
with a dot counts in that section only. `dsft convert` reads a key without a note from these names."""
ALIASES = {
    name: key
    for key, names in OTHER_NAMES.items()
    for name in names.split()
    if name != key.rpartition(".")[2]
}

VALUES: dict[str, dict[str, str]] = {
    "task": {
        "pt": "pretrain", "preference": "dpo", "rm": "reward",
        **dict.fromkeys(("seq_cls", "classification", "sequence_classification"), "classify"),
        **dict.fromkeys(("kd", "gkd", "distillation"), "distill"),
        **{loss: f"dpo with dpo.loss_type: {loss}" for loss in ("ipo", "simpo", "orpo")},
    },
    "dpo.loss_type": {
        "dpo": "sigmoid", "cdpo": "sigmoid with dpo.label_smoothing", "rdpo": "robust", "slic": "hinge",
        "rso": "hinge", "apo": "apo_zero",
    },
    "model.attention": {
        "disabled": "eager", **dict.fromkeys(("flex_attention", "fa2", "fa3", "flash_attn"), "auto"),
    },
    "train.precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "optim.lr_scheduler_type": {
        "warmup_stable_decay": "wsd", "cosine_warmup_with_min_lr": "cosine_with_min_lr",
        "WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine",
    },
    "distill.loss_type": {"kl": "forward_kl", "fkl": "forward_kl", "rkl": "reverse_kl", "js": "jsd"},
    "dpo.reference": {"precompute": "precomputed", "model": "live", "lora": "adapter"},
}  # fmt: skip
"""Key -> values that other tools use for it -> value in the spec, maybe with what else to set."""

LEFT_OUT: dict[str, str] = {
    "the JSON is generated from the spec, unless train.py gets --deepspeed_config FILE": "deepspeed "
    "deepspeed_config",
    "a run exports a folder with a model card; upload it with the hub's own command": "push_to_hub "
    "hub_model_id",
    "a run always trains": "do_train",
    "data.eval is evaluated if it is given": "do_eval",
    "under ZeRO 3 no rank ever holds the whole model": "zero3_init_flag",
    "every run exports the whole model": "zero3_save_16bit_model",
    "files are always read as streams": "streaming",
    "checkpoint.keep_best keeps the checkpoints with the lowest eval/loss": "early_stopping_patience",
    "train.seed alone decides the order of rows; data.packing avoids padding": "group_by_length",
    "the output layer is computed in chunks, and model.compile compiles the layers": "use_unsloth",
    "dsft prepares and reads rows in its own way; it changes no result": """
        dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
        dataloader_persistent_workers preprocessing_batch_size preprocessing_num_workers dataset_num_proc
        dataset_processes dataset_prepared_path load_from_cache_file tokenized_path buffer_size
        pad_to_sequence_len pad_to_multiple_of lazy_tokenize remove_unused_columns sample_packing_bin_size
        sample_packing_group_size eval_sample_packing packing_num_proc packing_strategy
        skip_prepare_dataset shuffle_merged_datasets""",
    "name the weights that stay in 16 bits, as patterns, in model.quantize_skip": "llm_int8_skip_modules",
    "dsft never runs code that comes with a model": "trust_remote_code",
    "dsft fills in no placeholders; write the names into the rows": "model_author model_name",
    "dsft resumes from its own checkpoints by itself; to start from weights of the other tool, set "
    "model.name_or_path to their folder": "resume_from_checkpoint auto_resume_from_checkpoints",
    "model.kernels: auto, the default, uses Liger's kernels on a GPU": "plugins use_liger_kernel "
    "enable_liger_kernel use_liger liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
    "liger_fused_linear_cross_entropy liger_rms_norm_gated liger_cross_entropy",
    "dsft decides it from other keys": "float32 fp16_full_eval bf16_full_eval fp16_opt_level "
    "half_precision_backend xformers_attention flex_attention sage_attention greater_is_better "
    "fsdp_version fsdp_final_state_dict_type lora_task_type",
    "a secret; set it as an environment variable (docs/telemetry.md)": "swanlab_api_key swanlab_token "
    "hub_token hf_hub_token swanlab_secret",
    "dsft needs no such setting": """
        overwrite_cache overwrite_output_dir plot_loss logging_first_step logging_strategy logging_dir
        log_level disable_tqdm save_only_model save_safetensors logging_nan_inf_filter save_first_step
        ddp_timeout debug strict local_rank per_device_eval_batch_size eval_batch_size
        prediction_loss_only use_cache gradient_checkpointing_kwargs model_type tokenizer_type
        tokenizer_use_fast use_fast_tokenizer create_new_adapter wandb_watch wandb_log_model
        accelerator_config run_name wandb_name wandb_run_id use_hf ignore_args_error
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model torch_empty_cache_steps
        gc_steps low_cpu_mem_usage ddp_find_unused_parameters ddp_bucket_cap_mb
        include_num_input_tokens_seen include_tokens_per_second average_tokens_across_devices
        ring_attn_func heads_k_stride""",
}
"""Reason -> keys of other tools that a spec leaves out for it, also `dsft convert`."""
_LEFT_OUT = {name: reason for reason, names in LEFT_OUT.items() for name in names.split()}


def suggestion(section: str, key: str, value: object = None) -> str:
    """Return what to do about an unknown key. section: dotted path of its mapping, without list numbers."""
    name = key.strip().lower().replace("-", "_")
    if name == "<<":
        return "merge keys are not supported; write the keys out, or replace single ones with key=value"
    is_own = any(key.rpartition(".")[2] == name for key in keys())
    if name in _LEFT_OUT and name not in ALIASES and not is_own:
        return f"leave it out: {_LEFT_OUT[name]}"
    not_offered = feature_of_key(name) or feature_of_value(name, value)
    if not_offered is not None:
        return "leave it out" if is_off(value) else not_offered.clause()
    target = likely_key(section, name)
    if target is not None:
        return f"did you mean {target}?"
    siblings = ", ".join(sorted(k.rpartition(".")[2] for k in _siblings(section)))
    return f"the keys here are {siblings} (see docs/spec.md, and docs/limits.md for what is not offered)"


def likely_key(section: str, name: str) -> str | None:
    """Return the key that the user most likely meant by an unknown one, or None."""
    if feature_of_key(name) is not None:
        return None
    here = f"{section}." if section else ""
    if here + name not in keys() and (meant := ALIASES.get(here + name) or ALIASES.get(name)):
        return meant
    elsewhere = [key for key in keys() if key.rpartition(".")[2] == name]
    if elsewhere:
        depth = min(key.count(".") for key in elsewhere)
        return " or ".join(key for key in elsewhere if key.count(".") == depth)
    close = difflib.get_close_matches(here + name, _siblings(section), n=1, cutoff=0.7)
    if close and difflib.SequenceMatcher(None, close[0].rpartition(".")[2], name).ratio() >= 0.7:
        return close[0]
    anywhere = {key.rpartition(".")[2]: key for key in keys()}
    anywhere |= {other: key for other, key in ALIASES.items() if "." not in other}
    close = difflib.get_close_matches(name, anywhere, n=1, cutoff=0.8)
    return anywhere[close[0]] if close else None


def is_of_another_tool(data: object) -> bool:
    """Return whether a spec's document has keys of other tools, at least three, and no section of a spec."""
    if not isinstance(data, dict) or any(
        isinstance(data.get(name), dict) for name in ("data", "train", "optim")
    ):
        return False
    return sum(key in ALIASES or key in _LEFT_OUT for key in data) >= 3


def keys() -> tuple[str, ...]:
    """Return every key of the schema, dotted, without list numbers; a section comes before its keys."""
    return tuple(fields())


def _siblings(section: str) -> list[str]:
    return [key for key in keys() if key.rpartition(".")[0] == section]


@cache
def fields() -> dict[str, FieldInfo]:
    """Return dotted key, without list numbers -> its field in the schema."""
    return dict(_fields(Spec, ""))


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for inner in sections_in(field.annotation):
            yield from _fields(inner, f"{prefix}{name}.")


def description(key: str) -> str:
    """Return a key's description in the schema, in one line; empty for an unknown key."""
    return " ".join((fields()[key].description or "").split()) if key in fields() else ""


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """Return the section classes in a field's annotation: the annotation itself, or members of a union, tuple
    or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in sections_in(part)]
