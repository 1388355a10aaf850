"""Choose the checkpoint that a run resumes from, and read and compare its inputs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from dsft.checkpoint.compare import (
    changed_since,
    check_same_base,
    check_same_model,
    check_same_rows,
    check_same_run,
)
from dsft.checkpoint.read import CheckpointReader, find
from dsft.plan.schedule import total_steps
from dsft.setup.identity import build_identity, file_digests, input_identity, software_identity
from dsft.setup.inputs import Inputs, read_inputs
from dsft.setup.run import Run


def resume_point(run: Run) -> CheckpointReader | None:
    """Return the checkpoint that checkpoint.resume selects, verified by rank 0; None to start at step 0. A
    collective. Raises CheckpointError where it is of another run."""

    def choose() -> Path | None:
        found = find(run.folder, run.spec.checkpoint.resume)
        for note in found.notes:
            run.log(f"warning: {note}")
        if found.path is not None:
            check_same_run(CheckpointReader.open(found.path), run.spec, run.batch, None)
        return found.path

    path = run.world.first(choose)
    return run.world.each(lambda: CheckpointReader.open(path)) if path else None


def read(run: Run) -> Inputs:
    """Read the inputs, and compare everything that decides the numbers between ranks and with what it was
    when the run's start was saved. A collective. Raises CheckpointError for what must be the same, and logs a
    warning for what may differ."""
    spec, world, start = run.spec, run.world, run.start
    inputs = world.each(lambda: read_inputs(spec, run.log, first=world.rank == 0))
    files, built_from = file_digests(spec, world, run.log), build_identity(inputs)
    software = software_identity() | {"device": world.device.type}
    world.check_same(world.each(lambda: input_identity(spec, inputs, built_from, files)))
    if start is not None:
        check_same_run(start, spec, run.batch, inputs.loaded.identity)
        check_same_model(start, built_from, software)
        world.each(lambda: check_same_base(start, spec.model.name_or_path, files.get("weights", {})))
        check_same_rows(start, asdict(inputs.rows) if inputs.rows else None)
        for line in changed_since(start, software):
            run.log(line)
    steps = total_steps(spec.train, len(inputs.train), run.batch.global_batch_size)
    return replace(inputs, files=files, built_from=built_from, software=software, total_steps=steps)
