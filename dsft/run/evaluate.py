"""Evaluate the held-out rows of a spec with a checkpoint or with the model that the spec names, without
training: the job of the ranks that `dsft eval` starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsft.checkpoint.compare import check_same_base, check_same_rows
from dsft.checkpoint.read import CheckpointReader
from dsft.engine.ops import prepare_ops
from dsft.plan.ds_entries import HostFacts
from dsft.run.main import checks, joined, prepared
from dsft.setup.inputs import Inputs, longest
from dsft.setup.read import read
from dsft.setup.resolve import swap_folders
from dsft.setup.run import Job, Run
from dsft.system.files import atomic_write, write_error


def evaluate(job: Job, asked: Path) -> None:
    """Evaluate, and write the result into the run's folder. asked: a JSON with the names of both, see
    `dsft.commands.evaluate`. Raises DsftError."""
    names = json.loads(asked.read_text(encoding="utf-8"))
    with joined(job) as (run, ranks):
        record, rows = evaluated(run, names["checkpoint"])
        result = {**names, "task": run.spec.task, "rows": rows, "metrics": record}
        run.world.first(lambda: _write(run.folder / names["result"], result))
        ranks.leave()
        run.world.close()


def evaluated(run: Run, checkpoint: str | None) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics, and name -> {examples, targets} of each held-out set. The engine is that of a
    training run, so the numbers are those that it would report. A collective."""
    with swap_folders(run) as swap:
        facts = HostFacts(swap=swap, cpu_adam=prepare_ops(run.spec, run.world, run.log))
        inputs = read(run)
        start = opened(run, inputs, Path(checkpoint)) if checkpoint is not None else None
        inputs, model, task = prepared(run, inputs, facts, longest(run, inputs)[0].shape.numel())
        for line in checks(run, inputs, model, task):
            run.log(line)
        if start is not None:
            run.world.each(lambda: model.engine.load(start.read, 0))
        return task.evaluation(run, inputs, model)(0), _rows(inputs)


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
    return {
        one.name or "held out": {count: int(each.sum()) for count, each in one.data.counts.items()}
        for one in inputs.held_out
    }


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        with atomic_write(path) as out:
            out.write(json.dumps(result, indent=1).encode())
    except OSError as error:
        raise write_error(path, error) from None
