"""Convert what decides how the work is divided over GPUs: DeepSpeed's JSON, FSDP, and the keys that split
rows."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import isfile
from pathlib import Path
from typing import Any

from dsft.convert.arguments import read_json
from dsft.convert.draft import Draft, mistake, positive, whole
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
        _sequence(draft, name, draft.get(name), note)
    if draft.get("sequence_parallel") is True:
        draft.leave("sequence_parallel", "a part of tensor parallelism there, which dsft does not have")
    for key, size in (draft.get("parallelism_config") or {}).items():
        name, where = key.removeprefix("parallelism_config_"), f"{key} of parallelism_config"
        if name in ("sp_size", "cp_size"):
            _sequence(draft, where, size, _RING if name == "cp_size" else "")
        elif name == "tp_size" and size not in (None, 1):
            draft.left[where] = (
                "tensor parallelism is not offered; parallel.zero_stage: 3 shards every weight"
            )
    if draft.is_on("tiled_mlp") and draft.spec["model"]["gradient_checkpointing"]:
        draft.carry("model.mlp_chunks", "tiled_mlp_num_shards", to=positive)
        draft.leave("tiled_mlp", _CHUNKS)
    else:
        draft.leave("tiled_mlp_num_shards", _CHUNKS)
    _shards(draft)


def _sequence(draft: Draft, name: str, size: Any, note: str = "") -> None:
    """Set the number of GPUs that split a row, if it is above 1, and an attention that can be split. name:
    key of `size`, which is None, or empty, where it is not set."""
    try:
        size = whole(1 if size in (None, "") else size)
    except ValueError as error:
        raise mistake(name, f"{quote(size)}: {error}") from error
    if size <= 1:
        draft.leave(name, "rows are not split, as here")
    else:
        draft.put("parallel.sequence_parallel", size, f"{name}; {note}" if note else name)
        given = draft.spec.get("model", {}).get("attention", "auto")
        if given not in ("auto", "sdpa"):
            named = draft.comments["model.attention"]
            draft.put("model.attention", "auto", f"{named}: {given} there, but only auto can split rows here")


def _shards(draft: Draft) -> None:
    """Convert `deepspeed` and `fsdp`."""
    value = draft.get("deepspeed")
    if draft.given.get("fsdp") or draft.given.get("fsdp_config"):
        draft.put("parallel.zero_stage", 3, "fsdp: ZeRO 3 shards the same")
        draft.leave("fsdp", "parallel.zero_stage: 3 shards as full_shard does")
        draft.leave("fsdp_config", "parallel.zero_stage: 3 shards as full_shard does")
        draft.get("fsdp_version", "fsdp_final_state_dict_type")
    if value is None:
        return
    if isinstance(value, Mapping):
        deepspeed(draft, value, "deepspeed")
        return
    name = str(value)
    for path in (
        Path(name),
        draft.folder / name,
        *(parent / name for parent in draft.folder.resolve().parents),
    ):
        if isfile(path):
            deepspeed(draft, read_json(path), path.name)
            return
    stage = next((int(digit) for digit in "3210" if f"z{digit}" in name or f"zero{digit}" in name), None)
    if stage is None:
        draft.leave("deepspeed", f"{quote(name)} is not there; set parallel.zero_stage")
        return
    draft.put("parallel.zero_stage", stage, f"deepspeed: {name}, by its name; the file is not there")
    if "offload" in name:
        draft.put("parallel.offload_optimizer", {"device": "cpu"}, "by its name")
        if stage == 3:
            draft.put("parallel.offload_parameters", {"device": "cpu"}, "by its name")


def deepspeed(draft: Draft, file: Mapping[str, Any], name: str) -> None:
    """Convert the sections of a DeepSpeed JSON that decide what is stored where. Batch sizes, precision,
    clipping and optimizer of the JSON come in as keys of TrainingArguments: `from_deepspeed`."""
    zero = file.get("zero_optimization") or {}
    draft.put("parallel.zero_stage", int(zero.get("stage", 0)), f"deepspeed: {name}")
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key)
        if not isinstance(section, Mapping) or section.get("device") in (None, "none"):
            continue
        ours = {"device": section["device"]}
        if section["device"] == "nvme":
            ours["nvme_path"] = str(section.get("nvme_path"))
        if isinstance(section.get("pin_memory"), bool):
            ours["pin_memory"] = section["pin_memory"]
        draft.put(f"parallel.{key.replace('param', 'parameters')}", ours, f"{key} of {name}")
    _sequence(draft, f"sequence_parallel_size of {name}", file.get("sequence_parallel_size"))
