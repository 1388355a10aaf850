"""Build what a run needs before its first step: this rank's part of the model, its engine and the reference,
checked on real rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dsft.checkpoint.export import read_model_files
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.tensors import write_beside, write_names
from dsft.data.steps.steps import TrainSteps, evaluation, micro_batches_of
from dsft.engine.api import Engine, LossScale
from dsft.engine.build import build_engine
from dsft.engine.partition import sharding_for, share_buffers
from dsft.engine.self_check import check_around, check_rows
from dsft.engine.split import exchange_of
from dsft.engine.world import World
from dsft.inputs import Inputs
from dsft.model.attention import attend_padded, attend_per_segment, check_can_compile
from dsft.model.build import build_model, switch_off_dropout
from dsft.model.conversion import persistent_buffers, renames
from dsft.model.experts import described
from dsft.model.files import tensor_names
from dsft.model.lora_experts import left_out
from dsft.model.policy import Policy
from dsft.model.weights import DTYPES
from dsft.objective.api import Objective, evaluation_record
from dsft.objective.next_token import next_token
from dsft.objective.preference import preference
from dsft.plan.reference import dpo_of
from dsft.reference.check import NUM_BATCHES, StartCheck, check_start, random_pairs
from dsft.reference.evaluate import PairSet, pair_evaluation
from dsft.reference.precomputed import PrecomputedReference
from dsft.reference.refer import adapter_off
from dsft.reference.source import RunReference, RunStart, source_of, store_of
from dsft.report.memory import MemoryFile
from dsft.run.job import Job
from dsft.run.loop import Progress, Record
from dsft.run.resolve import Resolved
from dsft.spec.rules import warnings
from dsft.spec.schema import Spec
from dsft.system.process import is_verbose


def objective_of(spec: Spec) -> Objective:
    """Return the objective of the task; sft and pretraining differ in their data only."""
    return preference(dpo_of(spec)) if spec.task_kind.preference else next_token(spec.train.label_smoothing)


@dataclass(frozen=True)
class Built:
    """This rank's part of the model, its engine, its objective, and the reference where the objective needs
    one.

    model_files: the contents of the run's model folder on rank 0, read when the folder was written. Every
    checkpoint gets these, even if the files in the folder are overwritten during the run.
    """

    policy: Policy
    engine: Engine
    objective: Objective
    model_files: Mapping[str, bytes]
    reference: RunReference | None = None


def stored_values(
    job: Job, inputs: Inputs, world: World, start: RunStart, memory: MemoryFile
) -> PrecomputedReference | None:
    """Return the log-probabilities of a precomputed reference, scoring the pairs that the store lacks; None
    for any other reference. Then begin the "load" phase of `memory`."""
    stored = None
    if objective_of(job.spec).needs_reference and dpo_of(job.spec).reference == "precomputed":
        memory.enter("reference")
        stored = store_of(job.spec, inputs, world, job.batch.micro_batch_size, start)
    memory.enter("load")
    return stored


def build(
    job: Job,
    resolved: Resolved,
    inputs: Inputs,
    world: World,
    start: RunStart,
    stored: PrecomputedReference | None,
) -> Built:
    """Build the model from fresh or pretrained weights, then its engine and reference. A collective. stored:
    the precomputed log-probabilities of the reference, None where an engine computes them."""
    spec, config, objective = resolved.spec, resolved.config, objective_of(job.spec)
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
        start.log(
            f"dropout: {' and '.join(switched_off)} set to 0, since policy and reference are compared "
            "without dropout"
        )
    for line in sorted({line for lines in world.gather(notes) for line in lines}, reverse=True):
        start.log(line)
    for line in sorted({line for lines in world.gather(attention) for line in lines}):
        if is_verbose():
            start.log(line)
    files = _model_files(job, policy, world)
    engine = build_engine(policy, spec, config, world, objective)
    if not objective.needs_reference:
        return Built(policy, engine, objective, files)
    return Built(
        policy, engine, objective, files, source_of(spec, inputs, world, policy, engine, stored, start)
    )


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


def prove(job: Job, inputs: Inputs, world: World, built: Built, *, fresh: bool) -> Iterator[str]:
    """Run the checks on real rows that must pass before training, and yield a line for each. fresh: no step
    has been done yet."""
    if inputs.around is not None:
        yield world.first(partial(check_around, inputs.around, inputs.train))
    yield from check_rows(built.engine, built.policy, job.spec, inputs.train, world, inputs.pad_id)
    if built.reference and fresh and dpo_of(job.spec).reference_model is None:
        yield prove_start(job, inputs, world, built, built.reference)


def prove_start(job: Job, inputs: Inputs, world: World, built: Built, reference: RunReference) -> str:
    """Check on pairs of the first step that the untrained policy equals its reference. For a precomputed
    reference, check random pairs too, different ones at each start."""
    spec, policy, pad = job.spec, built.policy, inputs.pad_id
    checked = train_steps(job, inputs, world).step(0).micro_batches[:NUM_BATCHES]
    if reference.is_stored:
        ids = world.broadcast(random_pairs(len(inputs.train), dpo_of(spec).recheck_rows))
        if len(ids):
            checked += tuple(micro_batches_of(inputs.train, ids, job.batch, world.data_rank, pad))
    micro_batches = reference.refers[0](checked)
    # Not under ZeRO 3, where every pass must use the same modules as the one before.
    bare = partial(adapter_off, policy) if spec.model.lora and spec.parallel.zero_stage < 3 else None
    first = StartCheck(dpo_of(spec), inputs.train, micro_batches, pad, bare)
    return check_start(first, built.engine, policy, world)


def train_steps(job: Job, inputs: Inputs, world: World) -> TrainSteps:
    train = job.spec.train
    return TrainSteps(
        inputs.train, job.batch, world.data_rank, train.seed, inputs.pad_id, train.neftune_alpha
    )


def held_out_evaluation(
    job: Job, inputs: Inputs, world: World, built: Built
) -> Callable[[int], Record] | None:
    """Return a function step -> metrics, or None where nothing is held out."""
    engine, objective, reference = built.engine, built.objective, built.reference
    if not inputs.held_out:
        return None
    if objective.of_answers is not None:
        refers = reference.refers[1:] if reference else [None] * len(inputs.held_out)
        sets = [
            PairSet(one, *evaluation(one.data, job.batch, world.data_rank, inputs.pad_id), refer)
            for one, refer in zip(inputs.held_out, refers, strict=True)
        ]
        return pair_evaluation(sets, objective, dpo_of(job.spec), engine, world, job.folder)
    names = [held_out.name for held_out in inputs.held_out]
    assigned = [evaluation(one.data, job.batch, world.data_rank, inputs.pad_id) for one in inputs.held_out]
    counts = [count for _, count in assigned]

    def evaluate(step: int) -> Record:
        sums = [engine.evaluate(micro_batches) for micro_batches, _ in assigned]
        return evaluation_record(objective, world.sum(torch.stack(sums)), counts, names)

    return evaluate
