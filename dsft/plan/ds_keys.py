"""Find unknown keys in a DeepSpeed JSON, by a closed list of all keys that DeepSpeed reads.

DeepSpeed 0.19.8 silently accepts unknown keys at the top level and in the sections that it reads with
`.get()`, so a typo changes what is trained. tests/unit/plan/test_ds_keys.py compares the list with the
installed DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

Section = Mapping[str, "Section | None"]
"""Key -> the keys below it, or None if the value is not checked."""


def _leaves(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


_OFFLOAD_OPTIMIZER = _leaves(
    "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload "
    "cpuadam_cores_perc"
)
_OFFLOAD_PARAM = _leaves("device nvme_path buffer_count buffer_size max_in_cpu pin_memory")
_ZERO: Section = {
    **_leaves(
        "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint zenflow sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients "
        "parameter_alignment zero_hpz_partition_size zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory"
    ),
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "offload_param": _OFFLOAD_PARAM,
    "leaf_module": _leaves("classes names name_suffixes"),
}
_BF16 = _leaves(
    "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)
_FP16 = _leaves(
    "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads"
)

KEYS: Section = {
    **_leaves(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation steps_per_print gradient_clipping zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer communication_data_type seq_parallel_communication_data_type "
        "prescale_gradients gradient_predivide_factor gradient_allreduce_op disable_allgather dump_state "
        "memory_breakdown wall_clock_breakdown disable_python_gc vocabulary_size dataloader_drop_last "
        "log_level use_data_before_expert_parallelism sequence_parallel_size data_parallel_size "
        "tensor_parallel expert_parallel compile autotuning data_efficiency hybrid_engine "
        "weight_quantization datastates_ckpt tensorboard wandb csv_monitor comet"
    ),
    "optimizer": _leaves("type params legacy_fusion"),
    "scheduler": _leaves("type params"),
    "fp16": _FP16,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": _leaves("enabled dtype lower_precision_safe_modules"),
    "data_types": _leaves("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "zero_optimization": _ZERO,
    "aio": _leaves("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
    "activation_checkpointing": _leaves(
        "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints profile "
        "synchronize_checkpoint_boundary"
    ),
    "pipeline": _leaves(
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
        "use_reentrant"
    ),
    "checkpoint": {
        **_leaves("tag_validation load_universal use_node_local_storage checkpoint_serialization"),
        "parallel_write": _leaves("pipeline_stage"),
        "writer": _leaves(
            "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier"
        ),
    },
    "flops_profiler": _leaves(
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"
    ),
    "comms_logger": _leaves("enabled prof_all prof_ops verbose debug"),
    "timers": {"throughput": _leaves("enabled synchronized")},
}

REMOVED: Mapping[str, str] = {
    **dict.fromkeys(
        "elasticity nebula compression_training quantize_training sparse_gradients eigenvalue "
        "graph_harvesting curriculum_learning progressive_layer_drop zero_optimization.mics_shard_size "
        "zero_optimization.mics_hierarchical_params_gather zero_optimization.zeropp_loco_param".split(),
        "DeepSpeed has removed this feature; leave it out",
    ),
    "amp": "DeepSpeed has removed Apex AMP; use bf16",
    "sparse_attention": "DeepSpeed has removed it; set model.attention in the spec",
    "aio.thread_count": "DeepSpeed calls it intra_op_parallelism; write that, or leave it out",
    "aio.num_threads": "DeepSpeed calls it intra_op_parallelism; write that, or leave it out",
    "zero_optimization.cpu_offload": "deprecated; use zero_optimization.offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "deprecated; use zero_optimization.offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_params": "deprecated; use zero_optimization.offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_use_pin_memory": "deprecated; use pin_memory in the offload section",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "deprecated; use stage3_gather_16bit_weights_on_model_save"
    ),
}
"""Dotted key that DeepSpeed removed or renamed -> what to write instead. DeepSpeed itself fails on most of
them, but late."""


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each key that DeepSpeed does not read, has removed, or expects to be a
    section."""
    return list(_unknown(config, KEYS, ""))


def _unknown(config: Mapping[str, Any], keys: Section, prefix: str) -> Iterator[str]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name in REMOVED:
            yield f"{name}: {REMOVED[name]}"
        elif key not in keys:
            yield f"{name}: DeepSpeed does not know this key{_suggestion(key, keys, prefix)}"
        elif (below := keys[key]) is not None and isinstance(value, Mapping):
            yield from _unknown(value, below, f"{name}.")
        elif below is not None and value is not None:
            yield f"{name}: {json.dumps(value)} is not a section; write {{…}}, or leave it out"


def _suggestion(key: str, keys: Section, prefix: str) -> str:
    close = difflib.get_close_matches(key, keys, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "; leave it out"
