"""Find keys of a DeepSpeed JSON that DeepSpeed does not read, and values that it cannot use.

DeepSpeed 0.19.8 silently accepts unknown keys at the top level and in the sections that it reads with
`.get()`, so a typo changes what is trained. It checks some values with a pydantic model, which prints a
traceback on every rank after the start, and others not at all. `KEYS` has every key that it reads; bounds are
those of its models, or of its code where a key has none. tests/unit/plan/test_ds_keys.py compares the table
with the installed DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class ValueRule(NamedTuple):
    """A condition on a value. words: the condition, to follow "must be"; holds: the check."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """Return whether the value is a number in the range of a float; integers may have thousands of digits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _whole(least: int) -> ValueRule:
    """Return a rule for whole numbers from `least` on. Floats such as 5e8 pass, since JSON files use them."""

    def holds(value: Any) -> bool:
        return _is_number(value) and value == int(value) and least <= value <= sys.maxsize

    return ValueRule(f"a whole number of at least {least}", holds)


def _one_of(*values: Any) -> ValueRule:
    """Return a rule for these values, compared with their type: 1.0 and true are not 1."""
    words = f"{', '.join(map(json.dumps, values[:-1]))} or {json.dumps(values[-1])}"
    return ValueRule(words, lambda value: any(type(value) is type(one) and value == one for one in values))


SWITCH = _one_of(True, False)
SIZE, COUNT = _whole(1), _whole(0)
POSITIVE = ValueRule("a number of at least 0", lambda value: _is_number(value) and value >= 0)
SHARE = ValueRule("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
DTYPE = _one_of("fp32", "fp16", "bf16", "float32", "float16", "bfloat16")
NAMES = ValueRule(
    "a list of names",
    lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
)
TEXT = ValueRule("text", lambda value: isinstance(value, str))
DEVICE = _one_of("none", "cpu", "nvme")
SECTION = ValueRule("a section, {…}", lambda value: isinstance(value, Mapping))
NO_FILE = ValueRule("null, since dsft prints the profile and supports no file", lambda value: False)

ANY = ValueRule(
    "anything, since the value is compared with the spec or refused elsewhere", lambda value: True
)

_BF16 = {
    "enabled immediate_grad_update check_grad_overflow": SWITCH,
    "bf16_master_weights_and_grads bf16_optimizer_states": ANY,
}
_BY_SECTION: Mapping[str, Mapping[str, ValueRule]] = {
    "": {
        "steps_per_print": SIZE,
        "disable_allgather dump_state memory_breakdown wall_clock_breakdown disable_python_gc": SWITCH,
        "seq_parallel_communication_data_type": _one_of("fp32", "fp16", "bf16"),
        "log_level": _one_of("debug", "info", "warning", "error", "critical"),
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation gradient_clipping zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer communication_data_type prescale_gradients gradient_predivide_factor "
        "gradient_allreduce_op vocabulary_size dataloader_drop_last use_data_before_expert_parallelism "
        "sequence_parallel_size data_parallel_size tensor_parallel expert_parallel compile autotuning "
        "data_efficiency hybrid_engine weight_quantization datastates_ckpt tensorboard wandb csv_monitor "
        "comet": ANY,
    },
    "optimizer": {"params": SECTION, "type legacy_fusion": ANY},
    "scheduler": {"type params": ANY},
    "fp16": {
        "auto_cast consecutive_hysteresis": SWITCH,
        "loss_scale": POSITIVE,
        "loss_scale_window hysteresis": SIZE,
        "initial_scale_power min_loss_scale": COUNT,
        "enabled fp16_master_weights_and_grads": ANY,
    },
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": {"dtype": DTYPE, "lower_precision_safe_modules": NAMES, "enabled": ANY},
    "data_types": {"grad_accum_dtype param_dtype buffer_dtype": DTYPE, "keep_in_fp32_modules": NAMES},
    "zero_optimization": {
        "stage": _one_of(0, 1, 2, 3),
        "reduce_bucket_size allgather_bucket_size sub_group_size": SIZE,
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold "
        "zero_hpz_partition_size": COUNT,
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
        "overlap_comm load_from_fp32_weights stage3_gather_16bit_weights_on_model_save "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters "
        "round_robin_gradients parameter_alignment memory_efficient_linear pipeline_loading_checkpoint "
        "override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory": SWITCH,
        "compute_grad_norm elastic_checkpoint legacy_stage1 zenflow zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients": ANY,
    },
    "zero_optimization.offload_optimizer": {
        "device": DEVICE,
        "nvme_path": TEXT,
        "buffer_count": SIZE,
        "ratio": _one_of(1, 1.0),
        "pin_memory pipeline_read pipeline_write": SWITCH,
        "cpuadam_cores_perc": SHARE,
        "fast_init super_offload": ANY,
    },
    "zero_optimization.offload_param": {
        "device": DEVICE,
        "nvme_path": TEXT,
        "buffer_count buffer_size": SIZE,
        "max_in_cpu": COUNT,
        "pin_memory": SWITCH,
    },
    "zero_optimization.leaf_module": {"classes names name_suffixes": NAMES},
    "aio": {
        "block_size queue_depth intra_op_parallelism": SIZE,
        "single_submit overlap_events": SWITCH,
        "use_gds": ANY,
    },
    "activation_checkpointing": {
        "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints profile "
        "synchronize_checkpoint_boundary": ANY,
    },
    "pipeline": {
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
        "use_reentrant": ANY,
    },
    "checkpoint": {
        "tag_validation load_universal use_node_local_storage checkpoint_serialization": ANY,
    },
    "checkpoint.parallel_write": {"pipeline_stage": ANY},
    "checkpoint.writer": {
        "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier": ANY,
    },
    "flops_profiler": {
        "enabled detailed": SWITCH,
        "recompute_fwd_factor": POSITIVE,
        "profile_step top_modules": SIZE,
        "module_depth": _whole(-1),
        "output_file": NO_FILE,
    },
    "comms_logger": {"enabled prof_all verbose debug": SWITCH, "prof_ops": NAMES},
    "timers": {},
    "timers.throughput": {"enabled synchronized": SWITCH},
}

KEYS: Mapping[str, ValueRule] = {
    f"{section}.{name}" if section else name: rule
    for section, rules in _BY_SECTION.items()
    for names, rule in rules.items()
    for name in names.split()
}
"""Dotted key -> rule. communication_data_type becomes train.reduce_dtype and is checked there."""

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


def problems(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, clause) for each key that DeepSpeed does not read, has removed or expects to be a
    section, and for each value that it cannot use. null and "auto" are not checked."""
    known = [*KEYS, *_BY_SECTION, *REMOVED]
    for key, value in config.items():
        name = f"{section}.{key}" if section else key
        if "." in key or name not in known:
            beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
            close = difflib.get_close_matches(key, beside, n=1)
            hint = f"did you mean {beside[close[0]]}?" if close else "leave it out"
            hint = "sections are nested, {…}" if "." in key else hint
            yield name, f"DeepSpeed does not know this key; {hint}"
        elif name in REMOVED:
            yield name, REMOVED[name]
        elif name in _BY_SECTION:
            if isinstance(value, Mapping):
                yield from problems(value, name)
            elif value is not None:
                yield name, f"{_shown(value)} is not a section; write {{…}}, or leave it out"
        elif value is not None and value != "auto" and not KEYS[name].holds(value):
            yield name, f"{_shown(value)}, but it must be {KEYS[name].words}; correct it, or leave it out"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
