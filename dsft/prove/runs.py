"""Make the runs of `dsft prove` in a folder: a small model of the spec's class is trained in the spec's own
mode, from a checkpoint in another layout, and in fp32 where that is not the mode's precision. Then the plain
loop takes the rows of the same steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml

from dsft.checkpoint.read import CheckpointReader
from dsft.data.render.template import choose_template
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import load_data
from dsft.data.sets.mismatched import of_set
from dsft.data.steps.steps import TrainSteps
from dsft.data.tokenizer.load import open_tokenizer
from dsft.errors import DsftError
from dsft.model.files import digests, model_files
from dsft.model.lora import own_names
from dsft.model.stacked import to_peft
from dsft.plan.reference import other_model
from dsft.prove import plain
from dsft.prove.rows import masks, rows_of
from dsft.prove.small import ADAPTER, LENGTH, MODEL, REFERENCE, SAVED, STEPS, build, mode, small_spec, zero3
from dsft.rank.start import run_ranks
from dsft.reference.start import SCRIPT
from dsft.remote import without_rank_variables
from dsft.report.folder import versions
from dsft.report.jsonl import read_metrics
from dsft.spec.layout import Layout, batch_on, fewest_ranks, layout_of
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec
from dsft.system.json_file import read_json
from dsft.system.run_folder import step_folder


def make_runs(
    spec: Spec, folder: Path, processes: int | None
) -> tuple[dict[str, Any], dict[str, plain.Outcome]]:
    """Make the model, the runs and the loop. Return what the certificate says of them, and the outcomes of
    the "run", of the one that is resumed "again" in another layout, of the "exact" one in fp32 where the
    others are not, and of the "loop". processes: by default 2, or the fewest of the layout. Raises DsftError,
    of a run that fails with its exit code."""
    copied = min(spec.parallel.zero_hpz_partition_size, 2)  # else two times as many processes as a host has
    parallel = spec.parallel.model_copy(update={"zero_hpz_partition_size": copied})
    spec = spec.model_copy(update={"parallel": parallel})
    together = fewest_ranks(parallel)
    alone = together > 1 or torch.cuda.device_count() == 1
    layout, other = layout_of(parallel, processes or (together if alone else 2)), Layout(1, 1, 1)
    tokenizer, _ = open_tokenizer(spec.model)
    choose_template(tokenizer, spec.data.chat_template, spec.data.thinking)
    build(spec, tokenizer, folder)
    values = small_spec(spec, folder, layout.data_parallel)
    small = _loaded(folder, values)
    read = load_data(small, tokenizer)
    facts: dict[str, Any] = {"masks": masks(small, read.train, tokenizer)}
    widths = (one.widths.max() for one in (read.train, *(one.data for one in read.held_out)))
    values["data"]["max_length"] = max(2, min(LENGTH, *map(int, widths)))  # no longer than the longest row
    for source in values["data"]["train"]:  # a reference scores all, so they are few
        source["max_rows"] = min(source["max_rows"], 2 * STEPS * values["train"]["global_batch_size"])
    small = _loaded(folder, values)
    rows = load_data(small, tokenizer)
    data = rows.train
    order = TrainSteps(data, batch_on(small, layout), 0, small.train.seed, 0)
    ids = [order.step(number).example_ids for number in range(STEPS)]
    outcomes = {"run": _trained(small, folder, layout)}
    again = _loaded(folder, values | _resumed(values, small, layout, folder))
    outcomes["again"] = _trained(again, folder, other)
    if spec.train.precision != "fp32":
        train = values["train"] | {"precision": "fp32", "reduce_dtype": None}
        of_model = values["model"] | {"attention": "auto"}
        exact = _loaded(folder, values | {"name": "exact", "train": train, "model": of_model})
        outcomes["exact"] = _trained(exact, folder, layout)
    steps = [list(_examples(small, data, of_step, [*of_step[-1:], *of_step[:-1]])) for of_step in ids]
    held_out: list[plain.Example] = []
    for one in (one.data for one in rows.held_out):
        all_of_it = others = range(len(one))
        if small.task == "kto":
            others = of_set(one, small.data.max_length).answer.tolist()
        held_out += _examples(small, one, all_of_it, others)
    outcomes["loop"] = plain.train(*_models(small, folder), steps, held_out, _recipe(small))
    facts |= {"mode": mode(small, layout), "resumed_in": mode(again, other), "versions": versions()}
    model = {"model": digests(model_files(str(folder / MODEL))), "rows": data.fingerprint}
    facts |= {"model": read_json(folder / MODEL / "config.json"), "digests": model}
    return facts, outcomes


def _models(small: Spec, folder: Path) -> tuple[torch.nn.Module, torch.nn.Module | None]:
    """Return the loop's model, and the reference where it is another one."""
    device, model = "cuda" if torch.cuda.is_available() else "cpu", small.model
    saved = model.lora.modules_to_save if model.lora else ()
    whole = [*model.quantize_skip, *(f"*{name}.weight" for name in saved)]
    adapter = folder / ADAPTER if model.lora else None
    scores = model.head == "score"
    with own_names() if adapter else nullcontext():
        loaded = plain.load(folder / MODEL, adapter, scores, device, model.quantize, whole)
    if small.reference is None or other_model(small) is None:
        return loaded, None
    form = small.reference.reference_quantize
    return loaded, plain.load(folder / REFERENCE, None, scores, device, form, ())


def _resumed(values: Mapping[str, Any], small: Spec, layout: Layout, folder: Path) -> dict[str, Any]:
    """Return the keys of the run that is resumed: in one process or, where the first run has one, at another
    ZeRO stage without offload."""
    parallel: dict[str, Any] = {"pipeline_stages": 1, "sequence_parallel": 1, "zero_hpz_partition_size": 1}
    if layout.world_size == 1:
        parallel |= {"offload_parameters": {}, "offload_optimizer": {}}
        parallel |= {"zero_stage": 2 if small.parallel.zero_stage == 1 else 1}
    checkpoint = values["checkpoint"] | {"resume": str(step_folder(folder / "run", SAVED))}
    return {"name": "again", "parallel": values["parallel"] | parallel, "checkpoint": checkpoint}


def _loaded(folder: Path, values: Mapping[str, Any]) -> Spec:
    path = folder / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return load_spec(path)


def _trained(spec: Spec, folder: Path, layout: Layout) -> plain.Outcome:
    """Train a spec of the folder. Raises DsftError if the ranks fail, which have printed why."""
    name = spec.name
    argv = [sys.executable, str(SCRIPT), str(folder / f"{name}.yaml"), "--any_ranks"]
    if spec.parallel.zero_stage == 3:
        keys = {"zero_optimization": zero3(spec.parallel)}
        (folder / "zero3.json").write_text(json.dumps(keys), encoding="utf-8")
        argv += ["--deepspeed_config", str(folder / "zero3.json")]
    with (folder / f"{name}.log").open("wb") as log:
        code = run(argv, without_rank_variables(os.environ), layout.world_size, log.fileno())
    if code:
        error = DsftError("the small run failed, so nothing is proved")
        error.exit_code = code
        raise error
    records, final = read_metrics(folder / name / "metrics.jsonl"), step_folder(folder / name, STEPS)
    found, reader = plain.Outcome(), CheckpointReader.open(final)
    for one in records:
        found.held_out = one.get("eval/loss", found.held_out)
        if "train/loss" in one:
            found.losses.append(one["train/loss"])
            found.norms.append(one["train/grad_norm"])
    for name, shape in reader.shapes.items():
        value = reader.read(name, "value", 0, torch.Size(shape).numel()).view(shape)
        found.weights[name] = to_peft(name, value)
    return found


def run(argv: Sequence[str], environ: Mapping[str, str], ranks: int, stdout: int) -> int:
    print(f"training on {ranks} process{'es' * (ranks > 1)} …", file=sys.stderr, flush=True)
    return run_ranks(argv, environ, ranks, "nothing is proved.", stdout)


def _examples(
    small: Spec, data: Dataset, ids: Sequence[int], others: Sequence[int]
) -> Iterator[plain.Example]:
    """Yield each segment as an example of its own, but whole answers as they are compared. others: for KTO,
    the examples whose answers the prompts get."""
    column = next(iter(data.values.values()), None)
    for id, other in zip(ids, others, strict=True):
        rows = rows_of(data[id])
        if not data.whole:
            yield from (plain.Example([row]) for row in rows)
            continue
        value = 0.0 if column is None else float(column[id])
        mixed = None
        if small.task == "kto":
            (prompt, begins), (answer, trained) = rows[0], rows_of(data[other])[0]
            stop, start, end = begins.index(True), trained.index(True), small.data.max_length
            mixed = (prompt[:stop] + answer[start:])[:end], (begins[:stop] + trained[start:])[:end]
        yield plain.Example(rows, value, mixed)


def _recipe(small: Spec) -> plain.Recipe:
    keys = small.of_task.model_dump(mode="json") if small.of_task else {}
    optim, rate, train = small.optim.model_dump(mode="json"), small.optim.learning_rate, small.train
    rates = [rate * (1 - step / STEPS) for step in range(STEPS)]
    loss = keys["loss_type"] if small.task in ("dpo", "kto") else small.task
    patterns = small.model.trainable or ("*",)
    experts = small.model.experts.model_dump(mode="json")
    return plain.Recipe(
        loss, keys, train.label_smoothing, optim, experts, train.max_grad_norm, rates, patterns
    )
