"""Evaluate the held-out rows of a spec with a checkpoint or with the model that the spec names, without
training: what the ranks of `dsft eval` do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsft.checkpoint.compare import check_same_base, check_same_rows
from dsft.checkpoint.read import CheckpointReader
from dsft.engine.ops import prepare_ops
from dsft.plan.ds_entries import HostFacts
from dsft.run.main import checks, load, prepared
from dsft.setup.inputs import Inputs, longest
from dsft.setup.read import read
from dsft.setup.resolve import swap_folders
from dsft.setup.run import Run


def evaluated(run: Run, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics, and {examples, targets} of each held-out set. The engine is that of a training run,
    so the numbers are those that it would report. asked: the names of target and checkpoint. A collective.
    Raises DsftError."""
    checkpoint = asked["checkpoint"]
    with swap_folders(run) as swap:
        facts = HostFacts(swap=swap, cpu_adam=prepare_ops(run.spec, run.world, run.log))
        inputs = read(run)
        start = opened(run, inputs, Path(checkpoint)) if checkpoint is not None else None
        inputs, model, task = prepared(run, inputs, facts, longest(run, inputs)[0].shape.numel())
        for line in checks(run, inputs, model, task):
            run.log(line)
        if start is not None:
            load(run, model, start, trains=False)
        metrics = task.evaluation(run, inputs, model)(0)
        named = {"target": asked["target"], "checkpoint": checkpoint, "task": run.spec.task}
        return {**named, "rows": _rows(inputs), "metrics": metrics}


def opened(run: Run, inputs: Inputs, path: Path) -> CheckpointReader:
    """Open a checkpoint, and check it and the base below it as a resume does. A collective. Raises
    CheckpointError."""
    start = run.world.each(lambda: CheckpointReader.open(path))
    run.world.first(start.verify)
    weights = inputs.files.get("weights", {})
    run.world.each(lambda: check_same_base(start, run.spec.model.name_or_path, weights))
    check_same_rows(start, asdict(inputs.rows) if inputs.rows else None)
    return start


def _rows(inputs: Inputs) -> dict[str, Any]:
    return {one.name or "held out": one.data.count() for one in inputs.held_out}
