"""`dsft prove SPEC`: train a small model in the spec's own mode, compare the run with a plain PyTorch loop,
and print a certificate: losses, gradient norms, weights, masks and a resume, each with its bound."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers.utils import logging

from dsft.checkpoint.read import CheckpointReader
from dsft.data.render.template import choose_template
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import load_data
from dsft.data.steps.steps import TrainSteps
from dsft.data.tokenizer.load import open_tokenizer
from dsft.errors import DsftError, printable
from dsft.model.files import digests, model_files
from dsft.model.lora import own_names
from dsft.plan.tables import printed, table
from dsft.prove import plain
from dsft.prove.rows import masks, rows_of
from dsft.prove.small import SAVED, STEPS, build, refused, small_spec
from dsft.rank.start import run_ranks
from dsft.reference.start import SCRIPT
from dsft.remote import without_rank_variables
from dsft.report.folder import versions
from dsft.report.jsonl import STEP, read_metrics
from dsft.spec.document import quote
from dsft.spec.findings import value_at
from dsft.spec.layout import Layout, batch_on, layout_of
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec
from dsft.system.files import write_error
from dsft.system.json_file import read_json
from dsft.system.run_folder import step_folder

LOSSES = {"sft": "next_token", "pretrain": "next_token", "reward": "reward"}
BOUNDS = {
    "fp32": {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3},
    "bf16": {"loss": 2e-3, "gradient norm": 1e-2, "weights": 1e-1},
}
RESUMED = BOUNDS | {"bf16": {"loss": 1e-4, "gradient norm": 2e-3, "weights": 1e-2}}
"""Bounds of the differences from the loop, and of those of a resumed run from the one without a stop."""
OF_PAIRS = 1e-2  # bound of a pair's loss in bf16, a difference of sums over its answers
_FLOOR = 0.1  # a loss below is compared as if it were this

Check = dict[str, Any]
"""what is compared; the figures found and expected, None for weights; their difference; its bound."""


@dataclass(frozen=True)
class Ran:
    """A run that has ended. records: by step; final: its last checkpoint."""

    records: Mapping[int, Mapping[str, float]]
    final: CheckpointReader

    def outcome(self, start: Mapping[str, Tensor]) -> plain.Outcome:
        """Return it as what is expected of another. start: the values before all steps."""
        steps = [self.records[step] for step in range(1, STEPS + 1)]
        losses, norms = ([one[key] for one in steps] for key in ("train/loss", "train/grad_norm"))
        weights = {name: _value(self.final, name) for name in self.final.shapes if name in start}
        return plain.Outcome(losses, norms, dict(start), weights)


def prove(path: Path, overrides: Sequence[str], processes: int | None, *, as_json: bool) -> int:
    """Print the certificate and write it to OUTPUT_DIR/NAME-certificate.json. Return 0 if all holds, else 1.
    Raises DsftError, of a small run that fails with its exit code."""
    spec = load_spec(path, overrides)
    _check_known(spec)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    result = Path(spec.output_dir, f"{spec.name}-certificate.json")
    folder = Path(spec.output_dir, f"prove-{secrets.token_hex(4)}").absolute()
    try:
        folder.mkdir(parents=True)
        found = {"spec": str(path), "overrides": list(overrides), **_proved(spec, folder, processes)}
        result.write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as error:
        raise write_error(folder, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=1) if as_json else report(found, result), flush=True)
    return 0 if found["holds"] else 1


def _check_known(spec: Spec) -> None:
    """Raise SpecError for what the plain loop does not compute."""
    unknown = {
        "task": spec.task not in (*LOSSES, "dpo"), "optim.name": spec.optim.name not in ("adamw", "sgd"),
        "optim.groups": spec.optim.groups, "model.quantize": spec.model.quantize,
        "model.experts.balance": spec.model.experts.balance != "none",
        "model.experts.freeze_router": spec.model.experts.freeze_router,
        "train.precision": spec.train.precision not in BOUNDS,
    }  # fmt: skip
    for key, is_unknown in unknown.items():
        if is_unknown:
            message = f"dsft prove does not know {quote(value_at(spec, key))} yet; give another value for it"
            raise refused(key, message)


def _proved(spec: Spec, folder: Path, processes: int | None) -> dict[str, Any]:
    """Make the runs and the loop in a folder, and return the certificate."""
    together = spec.parallel.pipeline_stages * spec.parallel.sequence_parallel
    alone = together > 1 or torch.cuda.device_count() == 1
    layout, other = layout_of(spec.parallel, processes or (together if alone else 2)), Layout(1, 1, 1)
    tokenizer, _ = open_tokenizer(spec.model)
    choose_template(tokenizer, spec.data.chat_template, spec.data.thinking)
    model, adapter = build(spec, tokenizer, folder)
    values = small_spec(spec, model, adapter, folder, layout.data_parallel)
    data = load_data(_loaded(folder, values), tokenizer).train
    values["data"]["max_length"] = max(2, int(data.widths.max()))  # so that more micro-batches are packed
    small = _loaded(folder, values)
    data = load_data(small, tokenizer).train
    steps = TrainSteps(data, batch_on(small, layout), 0, small.train.seed, 0)
    ids = [steps.step(number).example_ids for number in range(STEPS)]
    runs = {"run": _trained(folder, "run", layout)}
    parallel: dict[str, Any] = {"pipeline_stages": 1, "sequence_parallel": 1}
    if layout.world_size == 1:
        parallel |= {"offload_parameters": {}, "offload_optimizer": {}}
        parallel |= {"zero_stage": 2 if small.parallel.zero_stage == 1 else 1}
    checkpoint = values["checkpoint"] | {"resume": str(step_folder(folder / "run", SAVED))}
    again = {"name": "again", "parallel": values["parallel"] | parallel, "checkpoint": checkpoint}
    resumed = _loaded(folder, values | again)
    runs["again"] = _trained(folder, "again", other)
    if spec.train.precision != "fp32":
        train = values["train"] | {"precision": "fp32", "reduce_dtype": None}
        model_keys = values["model"] | {"attention": "auto"}
        _loaded(folder, values | {"name": "exact", "train": train, "model": model_keys})
        runs["exact"] = _trained(folder, "exact", layout)
    with own_names() if adapter else nullcontext():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loop = plain.load(model, adapter, scores=spec.task_kind.head == "score", device=device)
    found = plain.train(loop, [list(_examples(data, of_step)) for of_step in ids], _recipe(small))
    looked_at = masks(small, data, tuple(chain(*ids)), tokenizer)
    precision = spec.train.precision
    bounds = BOUNDS[precision] | ({"loss": OF_PAIRS} if data.answers > 1 and precision == "bf16" else {})
    checks = [
        *_compared("", bounds, runs["run"], found),
        *_compared("resumed: ", RESUMED[precision], runs["again"], runs["run"].outcome(found.start), STEPS),
        *(_compared("in fp32: ", BOUNDS["fp32"], runs["exact"], found) if "exact" in runs else ()),
    ]
    return {
        "holds": all(one["holds"] for one in checks) and not looked_at["different"],
        "mode": _mode(small, layout), "resumed_in": _mode(resumed, other), "checks": checks,
        "masks": looked_at, "model": read_json(model / "config.json"), "versions": versions(),
        "digests": {"model": digests(model_files(str(model))), "rows": data.fingerprint},
    }  # fmt: skip


def _loaded(folder: Path, values: Mapping[str, Any]) -> Spec:
    path = folder / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return load_spec(path)


def _trained(folder: Path, name: str, layout: Layout) -> Ran:
    """Train a spec of the folder. Raises DsftError if the ranks fail, which have printed why."""
    argv = [sys.executable, str(SCRIPT), str(folder / f"{name}.yaml"), "--any_ranks"]
    with (folder / f"{name}.log").open("wb") as log:
        code = run(argv, without_rank_variables(os.environ), layout.world_size, log.fileno())
    if code:
        error = DsftError("the small run failed, so nothing is proved")
        error.exit_code = code
        raise error
    records = read_metrics(folder / name / "metrics.jsonl")
    by_step = {int(one[STEP]): one for one in records if "train/loss" in one}
    return Ran(by_step, CheckpointReader.open(step_folder(folder / name, STEPS)))


def run(argv: Sequence[str], environ: Mapping[str, str], ranks: int, stdout: int) -> int:
    print(f"training on {ranks} process{'es' * (ranks > 1)} …", file=sys.stderr, flush=True)
    return run_ranks(argv, environ, ranks, "nothing is proved.", stdout)


def _examples(data: Dataset, ids: Sequence[int]) -> Iterator[plain.Rows]:
    """Yield each pair as one example, and of other examples each segment as one of its own."""
    for rows in (rows_of(data[id]) for id in ids):
        yield from [rows] if data.answers > 1 else [(row,) for row in rows]


def _recipe(small: Spec) -> plain.Recipe:
    keys = small.of_task.model_dump(mode="json") if small.of_task else {}
    optim, rate, train = small.optim.model_dump(mode="json"), small.optim.learning_rate, small.train
    rates = [rate * (1 - step / STEPS) for step in range(STEPS)]
    loss, patterns = LOSSES.get(small.task) or keys["loss_type"], small.model.trainable or ("*",)
    return plain.Recipe(loss, keys, train.label_smoothing, optim, train.max_grad_norm, rates, patterns)


def _compared(
    name: str, bounds: Mapping[str, float], ran: Ran, expected: plain.Outcome, first: int = 1
) -> Iterator[Check]:
    """Compare a run with what is expected of it, from step `first` on. name: before those of the checks."""
    figures = {"loss": ("train/loss", expected.losses), "gradient norm": ("train/grad_norm", expected.norms)}
    for what, (key, values) in figures.items():
        for step in range(first, STEPS + 1):
            found, value = ran.records[step][key], values[step - 1]
            difference = abs(found - value) / max(abs(value), _FLOOR)
            yield _check(f"{name}{what}, step {step}", found, value, difference, bounds[what])
    ours, theirs = ran.final.shapes.keys(), expected.weights.keys()
    yield _check(f"{name}trained tensors", len(ours), len(theirs), len(ours ^ theirs), 0.0)
    weights = {name: value for name, value in expected.weights.items() if name in ours}
    yield _weights(f"{name}weights", ran.final, weights, expected.start, bounds["weights"])


def _check(what: str, found: float | None, expected: float | None, difference: float, bound: float) -> Check:
    figures = {"what": what, "found": found, "expected": expected, "difference": difference, "bound": bound}
    return figures | {"holds": difference <= bound}


def _weights(
    what: str, final: CheckpointReader, other: Mapping[str, Tensor], start: Mapping[str, Tensor], bound: float
) -> Check:
    """Compare all trained tensors: the largest ‖difference‖ ÷ ‖change‖, where a tensor's change counts as at
    least a hundredth of the mean tensor's."""
    change = {name: float((other[name].double() - start[name].double()).norm()) for name in other}
    elements = sum(one.numel() for one in other.values())
    least = 0.01 * (sum(one * one for one in change.values()) / elements) ** 0.5
    found = {}
    for name, value in other.items():
        difference = float((_value(final, name).double() - value.double()).norm())
        found[name] = difference / max(change[name], least * value.numel() ** 0.5, 1e-30)
    worst = max(found, key=lambda name: found[name])
    return _check(f"{what}, largest in {worst}", None, None, found[worst], bound)


def _value(reader: CheckpointReader, name: str) -> Tensor:
    shape = torch.Size(reader.shapes[name])
    return reader.read(name, "value", 0, shape.numel()).view(shape)


def _mode(spec: Spec, layout: Layout) -> str:
    """Return what is trained how, in words."""
    parallel = spec.parallel
    words = {
        f"{spec.task}, {spec.train.precision}, ZeRO {parallel.zero_stage}": True,
        f"a pipeline of {layout.pipeline_stages}": layout.pipeline_stages > 1,
        f"rows split over {layout.sequence_parallel}": layout.sequence_parallel > 1,
        f"optimizer on {parallel.offload_optimizer.device}": parallel.offload_optimizer.device != "none",
        f"parameters on {parallel.offload_parameters.device}": parallel.offload_parameters.device != "none",
        "packed": spec.data.packing,
        "LoRA": spec.model.lora is not None,
        f"{layout.world_size} process{'es' * (layout.world_size > 1)}": True,
    }
    return ", ".join(word for word, is_so in words.items() if is_so)


def report(found: Mapping[str, Any], path: Path) -> str:
    """Return the certificate as text."""
    rows = [
        [one["what"], *("" if one[key] is None else f"{one[key]:.7g}" for key in ("found", "expected"))]
        + [f"{one['difference']:.1e}", f"{one['bound']:.0e}", "" if one["holds"] else "FAILS"]
        for one in found["checks"]
    ]
    failed, seen = sum(not one["holds"] for one in found["checks"]), found["masks"]
    lines = [
        f"tokens and masks of {seen['compared']} rows: {len(seen['different'])} differ",
        *(f"  {place}" for place in seen["different"]),
        *(f"not compared: {count} rows, {reason}" for reason, count in seen["left"].items()),
        f"{failed} of {len(rows)} differ by more than their bound" if failed else f"all {len(rows)} hold",
        f"certificate: {path}",
    ]
    head = printed([table(["", "found", "expected", "difference", "bound", ""], rows)])
    text = "\n".join([found["mode"], f"resumed in: {found['resumed_in']}", head + lines[0], *lines[1:]])
    return printable(text)
