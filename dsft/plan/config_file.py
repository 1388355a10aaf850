"""Merge the user's own DeepSpeed JSON (`--deepspeed_config FILE`) with a spec.

The file decides how to train (ZeRO, offload, aio, precision, communication, profiling), the spec what to
train (batch sizes, accumulation, clipping, optimizer, schedule). Values in the file for the latter are not
used; each that differs from the spec is reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dsft.errors import MissingInputError, Problem, SpecError
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import UserConfig
from dsft.plan.ds_keys import problems
from dsft.spec.batch import BatchSizes
from dsft.spec.combinations import combinations
from dsft.spec.document import dotted
from dsft.spec.messages import sentences
from dsft.spec.not_offered import KEYS_IN_JSON, in_json, lookup
from dsft.spec.rules import rule_findings
from dsft.spec.schema import Spec
from dsft.system.json_file import read_json

LARGEST = 2**20
"""Maximum size of a file in bytes; usual files have a few thousand."""

_METRICS = "dsft writes metrics.jsonl and W&B"
_NO_EFFECT = "it has no effect here"
SPEC_DECIDES = {
    **dict.fromkeys(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
        "pipeline checkpoint zero_allow_untested_optimizer zero_force_ds_cpu_optimizer scheduler".split(),
        _NO_EFFECT,
    ),
    "optimizer": "the engine builds the optimizer from the spec",
    "tensorboard": _METRICS,
    "csv_monitor": _METRICS,
    "comet": _METRICS,
    "wandb": "the spec's wandb section is used",
    "activation_checkpointing": "the spec's model.gradient_checkpointing decides",
    "dataloader_drop_last": "dsft reads the data",
    "vocabulary_size": "the tokenizer has it",
    "use_data_before_expert_parallelism": "there are no experts to place",
}
"""Keys and sections whose values in the file are compared with the spec's, not used -> the reason for those
that the spec has no value for."""

FIXED: Mapping[str, Any] = {
    "fp16.enabled": False,
    "torch_autocast.enabled": False,
    "gradient_allreduce_op": "mean",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "managed_gradient_accumulation": True,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.legacy_stage1": False,
    "zero_optimization.elastic_checkpoint": False,
    "zero_optimization.offload_optimizer.fast_init": False,
}
"""Keys that change the loss or the gradient norm -> the only value with which dsft computes them
correctly."""


def merge_config_file(
    spec: Spec, batch: BatchSizes | None, path: Path, *, strict: bool = False
) -> tuple[Spec, UserConfig]:
    """Return the spec with the file's ZeRO stage, offload and precision, and what the file decides beside
    that. Raise MissingInputError if there is no file, SpecError for keys and values that cannot be used and,
    with `strict`, for each that is not used since the spec's is. batch: None if the spec has no cluster."""
    file = read_config_file(path)
    if "bfloat16" in file:  # DeepSpeed's other name for it
        file["bf16"] = file.pop("bfloat16")
    _refuse(path, _unusable(file, spec))
    merged, changes = _with_file(spec, file)
    base = deepspeed_config(merged, batch)
    spec_decides = dict(SPEC_DECIDES)
    if merged.train.precision == "fp16":  # the loss scale is dsft's own (engine/gradients.py)
        spec_decides["fp16"] = _NO_EFFECT
    unused = list(_unused(merged, base, file, spec_decides))
    if strict:
        _refuse(path, ((key, f"{rest}; with --strict the file must agree") for key, rest in unused))
    set_here = dict(_leaves(file, {*spec_decides, *KEYS_IN_JSON}))
    values = {key: value for key, value in set_here.items() if value not in ("auto", None)}
    values = {key: value for key, value in values.items() if not key.endswith(".nvme_path")}  # in `merged`
    without = [key for key, value in set_here.items() if value == "auto" and lookup(base, key) is None]
    _refuse(
        path,
        ((key, '"auto", but the spec has no value for it; write one, or leave it out') for key in without),
    )
    lines = (*changes, *(f"{key} {rest}" for key, rest in unused))
    return merged, UserConfig(path.name, values, tuple(f"{path.name}: {line}" for line in lines))


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file. Raise SpecError for duplicate keys."""
    try:
        values = read_json(path, LARGEST, object_pairs_hook=_no_duplicates)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingInputError(
            f"--deepspeed_config {path}: there is no such file; correct the path"
        ) from error
    except OSError as error:
        raise MissingInputError(f"--deepspeed_config {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _bad_file(path, f"{error}; correct the file") from None
    if not isinstance(values, dict):
        raise _bad_file(path, "is not a JSON object; give a DeepSpeed configuration")
    return values


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counted = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counted.items() if count > 1)
        raise ValueError(f"has the key {twice!r} twice in one section")
    return values


def _bad_file(path: Path, reason: str) -> SpecError:
    return SpecError("The DeepSpeed configuration cannot be used.", [Problem(str(path), reason)])


def _refuse(path: Path, problems: Iterable[tuple[str, str]]) -> None:
    """Raise SpecError with all problems, (key, clause) each, if there are any."""
    if found := [Problem(*one) for one in problems]:
        raise SpecError(f"{path} cannot be used.", found)


def _unusable(file: Mapping[str, Any], spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield (key, clause) for each key and value of the file that cannot be used."""
    not_offered = dict(in_json(file))
    yield from ((key, feature.clause()) for key, feature in not_offered.items())
    for key, fixed in FIXED.items():
        value = lookup(file, key)
        wanted = spec.train.precision == "fp16" if key == "fp16.enabled" else fixed
        if value is not None and value not in (wanted, "auto"):
            way_out = "set train.precision" if key == "fp16.enabled" else "leave it out"
            yield key, f"{json.dumps(value)}, but dsft supports only {json.dumps(wanted)}; {way_out}"
    yield from ((key, clause) for key, clause in problems(file) if key not in not_offered)


def _with_file(spec: Spec, file: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """Return the spec with the values of the file, and a line to print for each value that this changes."""
    found: dict[str, Any] = {}
    if "zero_optimization" in file:
        found["parallel.zero_stage"] = lookup(file, "zero_optimization.stage")
        copied = "zero_hpz_partition_size"
        found[f"parallel.{copied}"] = lookup(file, f"zero_optimization.{copied}") or None  # 0 is 1 too
        for ours, theirs in (
            ("offload_optimizer", "offload_optimizer"),
            ("offload_parameters", "offload_param"),
        ):
            found[f"parallel.{ours}.device"] = lookup(file, f"zero_optimization.{theirs}.device") or "none"
            found[f"parallel.{ours}.nvme_path"] = lookup(file, f"zero_optimization.{theirs}.nvme_path")
    bf16 = lookup(file, "bf16.enabled")
    if isinstance(bf16, bool):
        without = "fp16" if spec.train.precision == "fp16" else "fp32"
        found["train.precision"] = "bf16" if bf16 else without
    found["train.reduce_dtype"] = lookup(file, "communication_data_type")
    values = spec.model_dump()
    lines = []
    for where, value in found.items():
        *sections, key = where.split(".")
        place = values
        for section in sections:
            place = place[section]
        silent = value is None and key != "nvme_path"  # absent in the file; a path belongs to its device
        silent = silent or (
            where == "train.reduce_dtype" and (value, place[key]) == ("fp32", None)
        )  # the default
        if silent or value == "auto" or value == place[key]:
            continue
        lines.append(f"sets {where} to {value} (in the spec: {place[key]})")
        place[key] = value
    return validated(values), lines


def validated(values: Mapping[str, Any]) -> Spec:
    """Build a spec from changed values. Check it against the schema and all rules again; raise SpecError with
    all problems."""
    try:
        spec = Spec.model_validate(values)
        findings = [(f.path, f.message) for f in (*combinations(spec), *rule_findings(spec))]
    except ValidationError as error:
        findings = sentences(error.errors(include_url=False), values)
    if findings:
        problems = [Problem(dotted(where), message) for where, message in findings]
        raise SpecError("The values that the DeepSpeed configuration sets do not fit the spec.", problems)
    return spec


def _unused(
    spec: Spec, base: Mapping[str, Any], file: Mapping[str, Any], spec_decides: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (key, rest of the sentence) for each value of the file that is not used and not the spec's. base:
    the configuration that follows from the spec."""
    optim, size = spec.optim, spec.parallel.sequence_parallel
    params = {
        "lr": optim.learning_rate,
        "weight_decay": optim.weight_decay,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "momentum": optim.momentum,
    }
    ours = {
        **base,
        "gradient_clipping": spec.train.max_grad_norm,  # the effective value, even if dsft clips
        "optimizer": {"type": optim.name, "params": params},
        "scheduler": {"type": optim.lr_scheduler_type},
    }
    for section, reason in spec_decides.items():
        given = file.get(section)
        if isinstance(given, Mapping) and given.get("enabled") is False:
            continue
        for key, value in _leaves({section: given}):
            used = lookup(ours, key)
            if value in ("auto", None, used) or (key == "optimizer.type" and str(value).lower() == used):
                continue
            if used is None:
                yield key, f"is left out: {reason}"
                continue
            rest = f"{json.dumps(value)}, but the spec's {json.dumps(used)} is used"
            if key == "train_batch_size" and size > 1:
                rest += (
                    f": global_batch_size × sequence_parallel {size}, since DeepSpeed counts examples by rank"
                )
            yield key, rest


def _leaves(
    values: Mapping[str, Any], left_out: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all sections, except for the dotted keys in `left_out`."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in left_out:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, left_out, f"{key}.")
        else:
            yield key, value
