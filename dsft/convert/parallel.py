"""Convert what decides how the work is divided over GPUs: DeepSpeed's JSON, FSDP, and the keys that split
rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsft.convert.draft import Draft, mistake, no_key_for, read_json
from dsft.convert.values import whole
from dsft.spec.document import quote

_RING = "ring attention there, all-to-alls over the attention heads here, so it must divide their number"
_SPLIT = {
    "sequence_parallel_size": "", "context_parallel_size": _RING, "sequence_parallel_degree": _RING,
    "hyper_parallel_cp_size": "",
}  # fmt: skip
"""Key that splits rows over GPUs -> what it does otherwise there."""

_CHUNKS = "checkpointed layers (model.gradient_checkpointing: true) compute long MLPs in chunks by themselves"


def parallel(draft: Draft) -> None:
    """Convert `deepspeed` (a JSON, its path, or ms-swift's name of one), `fsdp`, and what splits rows."""
    for name, note in _SPLIT.items():
        if not _sequence(draft, name, draft.get(name), note):
            draft.leave(name, "rows are not split, as here")
    if draft.get("sequence_parallel") is True:
        draft.leave("sequence_parallel", "a part of tensor parallelism there, which dsft does not have")
    for key, size in (draft.get("parallelism_config") or {}).items():
        name, where = key.removeprefix("parallelism_config_"), f"{key} of parallelism_config"
        if name in ("sp_size", "cp_size"):
            _sequence(draft, where, size, _RING if name == "cp_size" else "")
        elif name == "tp_size" and size not in (None, 1):
            draft.left[where] = no_key_for(name, size)
    if draft.is_on("tiled_mlp") and draft.values["model.gradient_checkpointing"]:
        draft.carry("model.mlp_chunks")
        draft.leave("tiled_mlp", _CHUNKS)
    else:
        draft.leave("tiled_mlp_num_shards", _CHUNKS)
    if draft.given.get("fsdp") or draft.given.get("fsdp_config"):
        draft.put("parallel.zero_stage", 3, "fsdp: ZeRO 3 shards the same")
        draft.leave("fsdp fsdp_config", "parallel.zero_stage: 3 shards as full_shard does")
    value = draft.get("deepspeed")
    if isinstance(value, Mapping):
        deepspeed(draft, value, "deepspeed")
    elif value is not None:
        _named(draft, str(value))


def _sequence(draft: Draft, name: str, size: Any, note: str = "") -> bool:
    """Set the number of GPUs that split a row, and an attention that can be split; return whether it is above
    1. name: key of `size`, which is None, or empty, where it is not set."""
    try:
        size = whole(1 if size in (None, "") else size)
    except ValueError as error:
        raise mistake(name, f"{quote(size)}: {error}") from error
    if size > 1:
        draft.put("parallel.sequence_parallel", size, f"{name}; {note}" if note else name)
        given = draft.values.get("model.attention", "auto")
        if given not in ("auto", "sdpa"):
            named = draft.comments["model.attention"]
            draft.put("model.attention", "auto", f"{named}: {given} there, but only auto can split rows here")
    return bool(size > 1)


def _named(draft: Draft, name: str) -> None:
    """Convert a DeepSpeed JSON by its path, or by its name where it is not here."""
    if path := draft.find(name):
        deepspeed(draft, read_json(path), path.name)
        return
    stage = next((int(digit) for digit in "3210" if f"z{digit}" in name or f"zero{digit}" in name), None)
    if stage is None:
        draft.leave("deepspeed", f"{quote(name)} is not there; set parallel.zero_stage")
        return
    draft.put("parallel.zero_stage", stage, f"deepspeed: {name}, by its name; the file is not there")
    for part in ("optimizer", "parameters")[: (2 if stage == 3 else 1) if "offload" in name else 0]:
        draft.put(f"parallel.offload_{part}.device", "cpu")
        draft.comments[f"parallel.offload_{part}"] = "by its name"


def deepspeed(draft: Draft, file: Mapping[str, Any], name: str) -> None:
    """Convert the sections of a DeepSpeed JSON that decide what is stored where. Its batch sizes, precision,
    clipping and optimizer come in as keys of TrainingArguments (dsft/convert/command.py)."""
    zero = file.get("zero_optimization") or {}
    draft.put("parallel.zero_stage", int(zero.get("stage", 0)), f"deepspeed: {name}")
    if isinstance(copied := zero.get("zero_hpz_partition_size"), int) and copied > 1:
        if zero.get("stage") == 3:
            draft.put("parallel.zero_hpz_partition_size", copied, name)
        else:
            draft.left["zero_optimization.zero_hpz_partition_size"] = "DeepSpeed reads it at ZeRO 3 alone"
    for key, ours in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        section = zero.get(key)
        if not isinstance(section, Mapping) or section.get("device") in (None, "none"):
            continue
        draft.put(f"parallel.{ours}.device", section["device"])
        draft.comments[f"parallel.{ours}"] = f"{key} of {name}"
        if section["device"] == "nvme":
            draft.put(f"parallel.{ours}.nvme_path", str(section.get("nvme_path")))
        if isinstance(section.get("pin_memory"), bool):
            draft.put(f"parallel.{ours}.pin_memory", section["pin_memory"])
    _sequence(draft, f"sequence_parallel_size of {name}", file.get("sequence_parallel_size"))
