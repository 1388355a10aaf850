"""Build what a run needs before its first step: this rank's part of the model, its engine and the reference,
checked on real rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsft.checkpoint.export import read_model_files
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.tensors import write_beside, write_names
from dsft.data.steps.steps import TrainSteps
from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine.api import Engine, LossScale
from dsft.engine.build import build_engine
from dsft.engine.partition import sharding_for, share_buffers
from dsft.engine.self_check import check_around, check_rows
from dsft.model.attention import attend_padded, attend_per_segment, check_can_compile
from dsft.model.build import build_model, switch_off_dropout
from dsft.model.conversion import persistent_buffers, renames
from dsft.model.experts import described
from dsft.model.files import tensor_names
from dsft.model.lora_experts import left_out
from dsft.model.policy import Policy
from dsft.model.weights import DTYPES
from dsft.objective.api import Objective
from dsft.run.loop import Progress
from dsft.setup.job import Job
from dsft.setup.resolve import Resolved
from dsft.spec.rules import warnings
from dsft.system.process import is_verbose
from dsft.tasks.api import Annotator, Run, Task


@dataclass(frozen=True)
class Built:
    """This rank's part of the model, its engine, its objective, and what annotates its micro-batches.

    model_files: the contents of the run's model folder on rank 0, read when the folder was written. Every
    checkpoint gets these, even if the files in the folder are overwritten during the run.
    """

    policy: Policy
    engine: Engine
    objective: Objective
    model_files: Mapping[str, bytes]
    annotator: Annotator | None = None


def build(job: Job, resolved: Resolved, run: Run, task: Task) -> Built:
    """Build the model from fresh or pretrained weights, its engine and its annotator. A collective."""
    spec, config, inputs, world = run.spec, resolved.config, run.inputs, run.world
    objective = task.objective(spec)
    prepared = task.before_policy(run)
    run.memory.enter("load")
    dtype = DTYPES[spec.train.precision]
    keep, exchange = sharding_for(config, world), exchange_of(world)

    switched_off: list[str] = []
    notes: list[str] = []
    attention: list[str] = []

    def part() -> Policy:
        policy = build_model(
            spec.model, inputs.facts, spec.train.seed, dtype, world.stage, resolved.cut, keep, resolved.tokens
        )
        known = warnings(spec)  # printed before the imports
        lines = [*described(policy.causal_lm), *filter(None, [policy.kernels])]
        notes.extend(line for line in lines if line not in known)
        if spec.model.lora is not None:
            notes.extend(left_out(policy.causal_lm))
        if spec.task_kind.preference:
            switched_off.extend(switch_off_dropout(policy.causal_lm))
        if spec.data.packing or exchange is not None:
            max_length, kind = spec.data.max_length, spec.model.attention
            attention.append(attend_per_segment(policy.causal_lm, kind, max_length, world.device, exchange))
            if spec.model.compile:
                check_can_compile(policy.causal_lm, attention[-1])
        elif spec.model.attention == "auto" and not spec.model.compile:
            line = attend_padded(policy.causal_lm, spec.data.max_length, world.device)
            attention.extend([line] if line else [])
        return policy

    policy = world.each(part)
    share_buffers(policy.causal_lm, world)
    if switched_off:
        run.log(
            f"dropout: {' and '.join(switched_off)} set to 0, since policy and reference are compared "
            "without dropout"
        )
    for line in sorted({line for lines in world.gather(notes) for line in lines}, reverse=True):
        run.log(line)
    for line in sorted({line for lines in world.gather(attention) for line in lines}):
        if is_verbose():
            run.log(line)
    files = _model_files(job, policy, world)
    engine = build_engine(policy, spec, config, world, objective)
    return Built(policy, engine, objective, files, task.annotator(run, policy, engine, prepared))


def _model_files(job: Job, policy: Policy, world: World) -> dict[str, bytes]:
    """Write what an export needs of the model beside its parameters into the run's model folder: tensors of
    all stages, and the names in the files that it was read from. Return the folder's files on rank 0. A
    collective."""
    files: dict[str, bytes] = {}
    buffers = {n: b for stage in world.gather(persistent_buffers(policy.causal_lm)) for n, b in stage.items()}

    def write() -> None:
        write_beside(job.model_folder, buffers)
        if job.spec.model.name_or_path is not None and renames(policy.causal_lm):
            if names := tensor_names(job.spec.model.name_or_path):  # none where the files are pickled
                write_names(job.model_folder, names)
        files.update(read_model_files(job.model_folder))

    world.first(write)
    return files


def bring_to(
    engine: Engine, start: CheckpointReader | None, progress: Progress, world: World, folder: Path
) -> str:
    """Load the checkpoint `start` into the engine, if there is one. Return a line that says where the run
    starts. folder: the run's. A collective."""
    if start is None:
        return f"starting at step 0: {folder} has no checkpoint"
    world.each(lambda: engine.load(start.read, progress.applied_steps))
    if progress.loss_scale is not None:
        engine.set_loss_scale(LossScale(progress.loss_scale, progress.loss_scale_steps))
    return f"going on from step {progress.step}: {start.path}"


def prove(run: Run, task: Task, built: Built) -> Iterator[str]:
    """Run the checks on real rows that must pass before training, and yield a line for each."""
    inputs, world = run.inputs, run.world
    if inputs.around is not None:
        yield world.first(partial(check_around, inputs.around, inputs.train))
    yield from check_rows(built.engine, built.policy, run.spec, inputs.train, world, inputs.pad_id)
    if run.checkpoint is None:
        yield from task.start_check(run, built.policy, built.engine, built.annotator)


def train_steps(run: Run) -> TrainSteps:
    train, inputs = run.spec.train, run.inputs
    return TrainSteps(
        inputs.train, run.batch, run.world.data_rank, train.seed, inputs.pad_id, train.neftune_alpha
    )
