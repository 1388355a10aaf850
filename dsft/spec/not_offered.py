"""What dsft does not train, refused by the names under which people ask for it. One list; pure.

Takes a key of a spec with its value, a DeepSpeed JSON, or a model's config; gives a clause with the way out.
`table_markdown` prints the list for docs/limits.md. Names of keys: those of DeepSpeed, accelerate,
transformers and TRL, LLaMA-Factory, Axolotl, ms-swift, NeMo and Megatron. What DeepSpeed has removed from its
JSON stands in dsft/plan/ds_keys.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dsft.spec.document import shown
from dsft.spec.finding import Finding


@dataclass(frozen=True)
class NotOffered:
    """keys: of a spec, wherever they stand; values: of keys that mean something else otherwise, key -> "
    "values;
    in_json: dotted keys of a DeepSpeed JSON. Spaces separate names, which are small, with `_` for `-`."""

    title: str
    way_out: str
    keys: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    in_json: str = ""

    def clause(self) -> str:
        return f"{self.title} is not offered; {self.way_out}"


_METHODS = ("adapter", "finetuning_type", "peft_type", "peft_method", "train_type", "tuner_type", "lora_type")
_OPTIMIZERS = ("optim.name", "optimizer", "optim.type", "optimizer_type")
_TASKS = ("task", "stage", "rl", "training_type", "rlhf_type", "trainer_type")


def _each(names: tuple[str, ...], values: str) -> dict[str, str]:
    return dict.fromkeys(names, values)


NOT_OFFERED: tuple[NotOffered, ...] = (
    NotOffered(
        "QLoRA and other training on quantized weights",
        "train model.lora on the unquantized model, with parallel.zero_stage: 3 or "
        "parallel.offload_optimizer "
        "where memory is short",
        "load_in_4bit load_in_8bit quantization_bit quantization_method quantization_type quantization "
        "quantization_config quantize quant_method quant_bits double_quantization bnb_config "
        "bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant use_bnb_nested_quant qlora "
        "use_qlora gptq gptq_disable_exllama awq hqq eetq weight_quantization",
        _each(_METHODS, "qlora"),
        "weight_quantization",
    ),
    NotOffered(
        "tensor parallelism",
        "parallel.zero_stage: 3 shards every weight, parallel.pipeline_stages divides the layers",
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
        "model_parallel_size tp tp_size tp_degree tp_plan autotp autotp_size",
        in_json="tensor_parallel",
    ),
    NotOffered(
        "sequence and context parallelism (Ulysses, ALST, ring attention, FPDT)",
        "model.gradient_checkpointing, model.activation_offload and train.micro_batch_size: 1 make room "
        "for "
        "longer rows",
        "sequence_parallel sequence_parallel_size sequence_parallel_degree sequence_parallel_mode sp "
        "sp_size "
        "sp_degree ulysses ulysses_size ulysses_sequence_parallel_size ulysses_parallel_size alst fpdt "
        "tiled_mlp "
        "tiled_logits context_parallel context_parallel_size context_parallel_degree cp cp_size cp_degree "
        "cp_backend ring_attn ring_attention ring_attn_func heads_k_stride "
        "parallelism_config",
        in_json="sequence_parallel_size data_parallel_size",
    ),
    NotOffered(
        "expert parallelism, as all training of mixtures of experts,",
        "train a dense model (docs/models.md)",
        "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep "
        "ep_size moe "
        "use_moe moe_layers moe_aux_loss_coef router_aux_loss_coef aux_loss_coef output_router_logits",
        in_json="expert_parallel",
    ),
    NotOffered(
        "ZeRO++ (quantized traffic, a second copy of the weights within a host: hpZ)",
        "train.reduce_dtype: bf16 halves the traffic of fp32 gradients, and at parallel.zero_stage: 2 "
        "no weights "
        "travel in forward and backward",
        "zero++ zeropp zero_pp zero_plus_plus zero_quantized_weights zero_quantized_gradients "
        "zero_quantized_nontrainable_weights zero_hpz_partition_size hpz hpz_partition_size",
        in_json="zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients "
        "zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_hpz_partition_size",
    ),
    NotOffered(
        "MiCS (shards within groups of ranks)",
        "DeepSpeed 0.19.8 has removed it; use parallel.zero_stage: 2 or 3",
        "mics mics_shard_size mics_hierarchical_params_gather",
    ),
    NotOffered(
        "ZenFlow (updates that lag behind)",
        "parallel.offload_optimizer: {device: cpu} updates exactly",
        "zenflow zen_flow",
        in_json="zero_optimization.zenflow",
    ),
    NotOffered(
        "SuperOffload (Grace-Hopper machines)",
        "use parallel.offload_optimizer: {device: cpu}",
        "super_offload superoffload cpuadam_cores_perc",
        in_json="zero_optimization.offload_optimizer.super_offload",
    ),
    NotOffered(
        "Twin-Flow (a share of the optimizer on the GPU)",
        "parallel.offload_optimizer: {device: cpu} moves all of it",
        "twin_flow twinflow offload_ratio offload_optimizer_ratio ratio",
        in_json="zero_optimization.offload_optimizer.ratio",
    ),
    NotOffered(
        "GPUDirect storage",
        "use parallel.offload_optimizer: {device: nvme}, which goes through host memory",
        "use_gds gds gpu_direct_storage",
        in_json="aio.use_gds",
    ),
    NotOffered(
        "DeepCompile",
        "model.compile: true compiles the layers with torch.compile",
        "deepcompile deep_compile use_deepcompile",
        in_json="compile",
    ),
    NotOffered(
        "an optimizer other than AdamW and SGD (Muon, 1-bit Adam, LAMB, Lion, Adafactor, 8-bit, GaLore, …)",
        "set optim.name: adamw; where its states take too much memory, shard them (parallel.zero_stage) or "
        "offload them (parallel.offload_optimizer)",
        "use_muon muon muon_lr muon_momentum ns_steps ns_method use_galore galore galore_rank galore_scale "
        "galore_update_interval galore_target use_badam badam badam_mode use_apollo apollo apollo_rank "
        "use_adam_mini use_lomo loraplus_lr_ratio loraplus_lr_embedding loraplus_lr_groups optim_args "
        "optim_target_modules freeze_step onebit_adam one_bit_adam schedule_free sophia "
        "save_muon_momentum_buffer_in_memory",
        _each(
            _OPTIMIZERS,
            "muon onebitadam one_bit_adam 1_bit_adam zerooneadam 0_1_adam onebitlamb lamb fusedlamb lion "
            "lion_8bit lion_32bit paged_lion_8bit paged_lion_32bit adafactor adagrad rmsprop nadam "
            "radam adamax "
            "adamw_8bit adamw_bnb_8bit paged_adamw paged_adamw_8bit paged_adamw_32bit adamw_torch_8bit "
            "adamw_torch_4bit adamw_apex_fused ademamix ademamix_8bit galore_adamw galore_adamw_8bit "
            "galore_adafactor apollo_adamw lomo adalomo sophia schedule_free_adamw schedule_free_sgd "
            "grokadamw "
            "came_pytorch optimi_adamw ao_adamw_4bit ao_adamw_8bit ao_adamw_fp8 stable_adamw badam "
            "adam_mini",
        ),
    ),
    NotOffered(
        "16-bit master weights and optimizer states",
        "train.precision: bf16 keeps both in fp32; shard them (parallel.zero_stage) or offload them "
        "(parallel.offload_optimizer)",
        "bf16_optimizer_states bf16_master_weights_and_grads fp16_master_weights_and_grads optimizer_dtype "
        "master_weights",
        in_json="bf16.bf16_optimizer_states bf16.bf16_master_weights_and_grads "
        "fp16.fp16_master_weights_and_grads",
    ),
    NotOffered(
        "8-bit and 4-bit arithmetic (fp8, int8, mxfp8, nvfp4)",
        "use train.precision: bf16",
        "fp8 fp8_format fp8_backend fp8_recipe fp8_hybrid fp8_enable_fsdp_float8_all_gather int8_training "
        "mxfp8 nvfp4 use_te transformer_engine",
        _each(
            ("train.precision", "mixed_precision", "dtype", "torch_dtype", "precision"),
            "fp8 float8 int8 int4 mxfp8 nvfp4 8 4",
        ),
    ),
    NotOffered(
        "another parallel engine (FSDP, DDP, Megatron)",
        "parallel.zero_stage: 3 shards as FSDP does, 0 is plain data parallelism",
        "fsdp fsdp2 fsdp_config fsdp_version fsdp_transformer_layer_cls_to_wrap fsdp_final_state_dict_type "
        "fsdp_offload_params use_fsdp ddp ddp_find_unused_parameters ddp_timeout ddp_backend "
        "ddp_bucket_cap_mb "
        "megatron megatron_lm_config dp_shard_size dp_replicate_size distributed_type",
    ),
    NotOffered(
        "an interleaved or zero-bubble pipeline",
        "parallel.pipeline_stages runs one forward and one backward in turn (1F1B)",
        "virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size "
        "num_layers_per_virtual_pipeline_stage "
        "vpp vpp_size interleaved_pipeline pipeline_schedule zero_bubble zb_h1",
    ),
    NotOffered(
        "autotuning",
        "dsft plan SPEC --compare ranks the layouts that fit, and a run whose longest micro-batch does "
        "not fit "
        "names the sizes that would",
        "autotuning autotune auto_find_batch_size",
        in_json="autotuning",
    ),
    NotOffered(
        "DeepSpeed's elastic training",
        "set cluster.min_hosts and start torchrun with --nnodes MIN:MAX --max-restarts N, or start the same "
        "command again with the hosts that are left: any number of ranks reads a checkpoint",
        "elastic elasticity elastic_training enable_elastic_training min_nodes max_nodes",
    ),
    NotOffered(
        "data efficiency (curriculum, random layer token dropping, batches of variable size)",
        "rows stand in the order of train.seed, and data.train's weights mix sources",
        "data_efficiency curriculum curriculum_learning random_ltd dynamic_batching group_by_length "
        "variable_batch_size_and_lr progressive_layer_drop",
        in_json="data_efficiency",
    ),
    NotOffered(
        "compression while training (pruning, sparse attention, layer reduction)",
        "train the model as it is",
        "compression_training sparse_attention sparse_gradients layer_reduction pruning shift_attn",
    ),
    NotOffered(
        "training by generation or rewards (PPO, GRPO, RLOO, KTO, reward models, distillation)",
        "the tasks are sft, pretrain and dpo",
        "hybrid_engine reward_model reward_model_path reward_funcs ppo_epochs ppo_target num_generations "
        "use_vllm vllm_mode trl grpo ppo teacher_model kd_temperature kto_chosen_weight "
        "kto_rejected_weight "
        "pref_bco_weight",
        _each(
            _TASKS,
            "rm prm ppo grpo gspo dapo rloo reinforce reinforce++ kto gkd kd online_dpo reward distill",
        ),
        "hybrid_engine",
    ),
    NotOffered(
        "a preference loss beside those of docs/dpo.md (f-divergences, weights, a reference that moves)",
        "choose dpo.loss_type and dpo.sft_weight",
        "f_divergence_type f_alpha_divergence_coef use_weighting ld_alpha discopop_tau sync_ref_model "
        "ref_model_mixup_alpha ref_model_sync_steps",
    ),
    NotOffered(
        "early stopping",
        "checkpoint.keep_best keeps the checkpoint with the lowest eval/loss, and train.max_steps ends a run",
        "early_stopping_patience early_stopping_threshold early_stopping_steps early_stopping",
    ),
    NotOffered(
        "sending the model to a hub",
        "the export is a folder with a model card; send it with the hub's own command",
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo",
    ),
    NotOffered(
        "an adapter other than LoRA and DoRA (prompt and prefix tuning, IA³, OFT, AdaLoRA, LoftQ, PiSSA, …)",
        "use model.lora, or model.trainable for a part of the model's own weights",
        "loftq_config loftq_init pissa_init pissa_iter pissa_convert use_llama_pro num_virtual_tokens "
        "prompt_tuning prefix_tuning p_tuning ia3 adalora oft oft_rank oft_block_size oft_target boft vera "
        "vera_rank lisa lisa_activated_layers relora relora_steps relora_prune_ratio reft llama_adapter "
        "init_lora_weights lora_init",
        _each(
            _METHODS,
            "oft boft ia3 adalora vera llama_adapter longlora reft prefix_tuning prompt_tuning p_tuning "
            "loha "
            "lokr adapter pissa loftq fourierft bone hra",
        ),
    ),
    NotOffered(
        "training on images, video or sound",
        "give data of texts to a model of texts",
        "image_folder media_dir image_dir video_dir audio_dir freeze_vision_tower freeze_vit "
        "freeze_aligner "
        "image_max_pixels video_max_pixels mm_proj is_multimodal processor_type image_size",
    ),
    NotOffered(
        "a kernel or a framework beside transformers (Unsloth, cut cross-entropy, Liger's loss)",
        "leave it out: the head goes in chunks by itself (docs/head.md), and model.compile compiles the "
        "layers",
        "liger_fused_linear_cross_entropy use_unsloth unsloth use_unsloth_gc cut_cross_entropy",
    ),
    NotOffered(
        "a checkpoint of DeepSpeed's own (DataStates, Nebula, universal)",
        "dsft's are read by any number of ranks, any stage and any cut (docs/checkpoints.md)",
        "datastates_ckpt nebula load_universal universal_checkpoint use_node_local_storage dist_ckpt "
        "fast_persist save_only_model",
        in_json="datastates_ckpt",
    ),
)


@cache
def _by_key() -> dict[str, NotOffered]:
    return {key: one for one in NOT_OFFERED for key in one.keys.split()}


@cache
def _by_value() -> dict[tuple[str, str], NotOffered]:
    return {
        (key, value): one
        for one in NOT_OFFERED
        for key, values in one.values.items()
        for value in values.split()
    }


@cache
def _by_json() -> dict[str, NotOffered]:
    return {key: one for one in NOT_OFFERED for key in one.in_json.split()}


def of_key(name: str) -> NotOffered | None:
    """What an unknown key of a spec asks for, wherever it stands."""
    return _by_key().get(_plain(name))


def of_value(name: str, value: object) -> NotOffered | None:
    """What a value asks for; `name`: the key, as its writer calls it or dotted as ours."""
    return _by_value().get((_plain(name), _plain(str(value))))


def in_json(file: Mapping[str, Any]) -> Iterator[tuple[str, NotOffered]]:
    """Key and feature for each that a DeepSpeed JSON switches on."""
    for key, one in _by_json().items():
        value: Any = file
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not is_off(value):
            yield key, one


def switched_off_keys() -> Iterator[str]:
    """Dotted keys of a DeepSpeed JSON that may stand there only switched off."""
    return iter(_by_json())


def config_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """A model whose weights are quantized, by its config.json or from_config."""
    for key in ("quantization_config", "compression_config"):
        value = config.get(key)
        if value:
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            named = f" ({shown(method)})" if method else ""
            message = (
                f"its config's {key}{named} says that its weights are quantized, which cannot be trained"
            )
            yield Finding(("model",), f"{message}; name the model that it was made from", _MODEL)


_MODEL = ("model.name_or_path", "model.from_config")


def is_off(value: object) -> bool:
    """Whether a value switches a feature off: a size or share of 1 does, and a section with nothing on."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(is_off(below) for below in value.values())
    return value is not True and value in (None, False, 0, 1, "auto", "none", "")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def table_markdown() -> str:
    """The table as docs/limits.md shows it."""
    lines = ["| not offered | what to do instead | asked for by | in a DeepSpeed JSON |", "|---|---|---|---|"]
    for one in NOT_OFFERED:
        named = [f"`{key}`" for key in one.keys.split()]
        named += [
            f"`{key}: {value}`" for key, values in list(one.values.items())[:1] for value in values.split()
        ]
        files = ", ".join(f"`{key}`" for key in one.in_json.split())
        lines.append(f"| {one.title.rstrip(',')} | {one.way_out} | {', '.join(named)} | {files} |")
    return "\n".join(lines) + "\n"
