"""Find invalid values in a DeepSpeed JSON.

DeepSpeed 0.19.8 checks some values with a pydantic model, which prints a traceback on every rank after the
start, and others not at all. The table has every key that `--deepspeed_config` passes on; its bounds are
those of DeepSpeed's models, or of its code if a model has none. tests/unit/plan/test_ds_values.py compares it
with the installed DeepSpeed.
"""

from __future__ import annotations

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

_BY_SECTION: Mapping[str, Mapping[str, ValueRule]] = {
    "": {
        "steps_per_print": SIZE,
        "disable_allgather dump_state memory_breakdown wall_clock_breakdown disable_python_gc": SWITCH,
        "seq_parallel_communication_data_type": _one_of("fp32", "fp16", "bf16"),
        "log_level": _one_of("debug", "info", "warning", "error", "critical"),
    },
    "optimizer": {"params": SECTION},
    "fp16": {
        "auto_cast consecutive_hysteresis": SWITCH,
        "loss_scale": POSITIVE,
        "loss_scale_window hysteresis": SIZE,
        "initial_scale_power min_loss_scale": COUNT,
    },
    "bf16": {"enabled immediate_grad_update check_grad_overflow": SWITCH},
    "torch_autocast": {"dtype": DTYPE, "lower_precision_safe_modules": NAMES},
    "data_types": {"grad_accum_dtype param_dtype buffer_dtype": DTYPE, "keep_in_fp32_modules": NAMES},
    "zero_optimization": {
        "stage": _one_of(0, 1, 2, 3),
        "reduce_bucket_size allgather_bucket_size sub_group_size": SIZE,
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold": COUNT,
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
        "overlap_comm load_from_fp32_weights stage3_gather_16bit_weights_on_model_save "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters "
        "round_robin_gradients parameter_alignment memory_efficient_linear pipeline_loading_checkpoint "
        "override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory": SWITCH,
    },
    "zero_optimization.offload_optimizer": {
        "device": DEVICE,
        "nvme_path": TEXT,
        "buffer_count": SIZE,
        "ratio": _one_of(1, 1.0),
        "pin_memory pipeline_read pipeline_write": SWITCH,
        "cpuadam_cores_perc": SHARE,
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
    },
    "flops_profiler": {
        "enabled detailed": SWITCH,
        "recompute_fwd_factor": POSITIVE,
        "profile_step top_modules": SIZE,
        "module_depth": _whole(-1),
        "output_file": NO_FILE,
    },
    "comms_logger": {"enabled prof_all verbose debug": SWITCH, "prof_ops": NAMES},
    "timers.throughput": {"enabled synchronized": SWITCH},
}

RULES: Mapping[str, ValueRule] = {
    f"{section}.{name}" if section else name: rule
    for section, rules in _BY_SECTION.items()
    for names, rule in rules.items()
    for name in names.split()
}
"""Dotted key -> rule. communication_data_type is missing: it becomes train.reduce_dtype and is checked
there."""


def wrong_values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, clause) for each value that DeepSpeed cannot use. null and "auto" are not checked."""
    for key, rule in RULES.items():
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != "auto" and not rule.holds(value):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 80 else f"{shown[:76]} ..."
            yield key, f"{shown}, but it must be {rule.words}; correct it, or leave it out"
