"""Merge the user's own DeepSpeed JSON (`--deepspeed_config FILE`) with a spec.

The file decides how to train (ZeRO, offload, aio, precision, communication, profiling), the spec what to
train (batch sizes, accumulation, clipping, optimizer, schedule). Values in the file for the latter are not
used; each that differs from the spec is reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dsft.errors import MissingInputError, Problem, SpecError
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import UserConfig
from dsft.plan.ds_keys import unknown_keys
from dsft.plan.ds_values import wrong_values
from dsft.spec.batch import BatchSizes
from dsft.spec.combinations import combinations
from dsft.spec.document import dotted
from dsft.spec.messages import sentences
from dsft.spec.not_offered import in_json, switched_off_keys
from dsft.spec.rules import rule_findings
from dsft.spec.schema import Spec
from dsft.system.json_file import read_json

LARGEST = 2**20
"""Maximum size of a file in bytes; usual files have a few thousand."""

SPEC_DECIDES = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping pipeline "
    "checkpoint zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
).split()
"""Keys whose value in the file is only compared with the spec's, not used."""

WITHOUT_EFFECT = {
    "tensorboard": "dsft writes metrics.jsonl and W&B",
    "csv_monitor": "dsft writes metrics.jsonl and W&B",
    "comet": "dsft writes metrics.jsonl and W&B",
    "wandb": "the spec's wandb section is used",
    "activation_checkpointing": "the spec's model.gradient_checkpointing decides",
    "dataloader_drop_last": "dsft reads the data",
    "vocabulary_size": "the tokenizer has it",
    "use_data_before_expert_parallelism": "there are no experts to place",
}
"""Keys that DeepSpeed reads and dsft leaves out -> what decides instead."""

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
    unknown = [Problem(key, rest) for key, _, rest in (s.partition(": ") for s in unknown_keys(file))]
    _refuse(path, [*unknown, *_unusable(file, spec)])
    merged, changes = _with_file(spec, file)
    base = deepspeed_config(merged, batch)
    unused = list(_unused(merged, base, file))
    if strict:
        _refuse(path, [Problem(key, f"{rest}; with --strict the file must agree") for key, rest in unused])
    left_out = {*_LEFT_OUT, *(["fp16"] if merged.train.precision == "fp16" else [])}
    problems: list[Problem] = []
    values = dict(_decided(base, file, "", left_out, problems))
    _refuse(path, problems)
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


_LEFT_OUT = {*SPEC_DECIDES, *WITHOUT_EFFECT, "optimizer", "scheduler", *switched_off_keys()}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counted = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counted.items() if count > 1)
        raise ValueError(f"has the key {twice!r} twice in one section")
    return values


def _bad_file(path: Path, reason: str) -> SpecError:
    return SpecError("The DeepSpeed configuration cannot be used.", [Problem(str(path), reason)])


def _refuse(path: Path, problems: list[Problem]) -> None:
    if problems:
        raise SpecError(f"{path} cannot be used.", problems)


def _lookup(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted key; None if it or a section above it is absent or null."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _unusable(file: Mapping[str, Any], spec: Spec) -> Iterator[Problem]:
    not_offered = dict(in_json(file))
    for key, feature in not_offered.items():
        yield Problem(key, feature.clause())
    for key, fixed in FIXED.items():
        value = _lookup(file, key)
        wanted = spec.train.precision == "fp16" if key == "fp16.enabled" else fixed
        if value is not None and value not in (wanted, "auto"):
            way_out = "set train.precision" if key == "fp16.enabled" else "leave it out"
            yield Problem(key, f"{json.dumps(value)}, but dsft supports only {json.dumps(wanted)}; {way_out}")
    for key, clause in wrong_values(file):
        if key not in not_offered:
            yield Problem(key, clause)


def _with_file(spec: Spec, file: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """Return the spec with the values of the file, and a line to print for each value that this changes."""
    found: dict[str, Any] = {}
    if "zero_optimization" in file:
        found["parallel.zero_stage"] = _lookup(file, "zero_optimization.stage")
        for ours, theirs in (
            ("offload_optimizer", "offload_optimizer"),
            ("offload_parameters", "offload_param"),
        ):
            found[f"parallel.{ours}.device"] = _lookup(file, f"zero_optimization.{theirs}.device") or "none"
            found[f"parallel.{ours}.nvme_path"] = _lookup(file, f"zero_optimization.{theirs}.nvme_path")
    bf16 = _lookup(file, "bf16.enabled")
    if isinstance(bf16, bool):
        without = "fp16" if spec.train.precision == "fp16" else "fp32"
        found["train.precision"] = "bf16" if bf16 else without
    found["train.reduce_dtype"] = _lookup(file, "communication_data_type")
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


def _unused(spec: Spec, base: Mapping[str, Any], file: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, rest of the sentence) for each value of the file that is not used."""
    for key in SPEC_DECIDES:
        yield from _differing(key, file.get(key), base.get(key), spec)
    if spec.train.precision == "fp16":  # the loss scale is dsft's own (engine/gradients.py)
        yield from _differing("fp16", file.get("fp16"), base["fp16"], spec)
    for key, reason in WITHOUT_EFFECT.items():
        value = file.get(key)
        if value is not None and not (isinstance(value, Mapping) and value.get("enabled") is False):
            yield key, f"is left out: {reason}"
    yield from _optimizer(spec, file.get("optimizer") or {})
    kind = _lookup(file, "scheduler.type")
    if kind is not None and kind != "auto":
        yield "scheduler", f"{kind}, but the spec's {spec.optim.lr_scheduler_type} is used"


def _differing(key: str, value: Any, ours: Any, spec: Spec) -> Iterator[tuple[str, str]]:
    if key == "gradient_clipping":
        ours = spec.train.max_grad_norm  # the effective value, even if dsft clips instead of DeepSpeed
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _differing(f"{key}.{name}", below, _lookup(ours or {}, name), spec)
    elif value is not None and value != "auto" and value != ours:
        used = (
            f"but the spec's {json.dumps(ours)} is used" if ours is not None else "which has no effect here"
        )
        size = spec.parallel.sequence_parallel
        if key == "train_batch_size" and size > 1:
            used += f": global_batch_size × sequence_parallel {size}, since DeepSpeed counts examples by rank"
        yield key, f"{json.dumps(value)}, {used}"


def _optimizer(spec: Spec, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    optim = spec.optim
    kind = section.get("type")
    if kind is not None and str(kind).lower() not in ("auto", optim.name):
        yield "optimizer.type", f"{kind}, but the spec's {optim.name} is used"
    ours = {
        "lr": optim.learning_rate,
        "weight_decay": optim.weight_decay,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "momentum": optim.momentum,
    }
    given = section.get("params")
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if name in ours:
            yield from _differing(f"optimizer.params.{name}", value, ours[name], spec)
        elif value != "auto":
            yield f"optimizer.params.{name}", "is left out: the engine builds the optimizer from the spec"


def _decided(
    base: Mapping[str, Any],
    file: Mapping[str, Any],
    prefix: str,
    left_out: Collection[str],
    problems: list[Problem],
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for what the file sets, except for the dotted keys in `left_out`. "auto"
    takes the value of `base`; if `base` has none, a problem is appended to `problems`."""
    for key, value in file.items():
        name, ours = f"{prefix}{key}", base.get(key)
        if name in left_out:
            continue
        if isinstance(value, Mapping):
            yield from _decided(
                ours if isinstance(ours, Mapping) else {}, value, f"{name}.", left_out, problems
            )
        elif value == "auto" and key not in base:
            problem = '"auto", but the spec has no value for it; write one, or leave it out'
            problems.append(Problem(name, problem))
        elif value not in ("auto", None) and key != "nvme_path":  # which the merged spec has
            yield name, value
