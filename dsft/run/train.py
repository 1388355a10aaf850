"""Train a run from its resume point to its last step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from dsft.checkpoint.compare import (
    changed_since,
    check_same_base,
    check_same_model,
    check_same_rows,
    check_same_run,
)
from dsft.checkpoint.read import CheckpointReader
from dsft.data.steps.prefetch import Prefetcher
from dsft.dist.world import Agreement, World
from dsft.engine.replicas import Replicas
from dsft.plan.ds_entries import HostFacts
from dsft.plan.schedule import batch_scale, learning_rate, total_steps
from dsft.reference.refer import with_zeros
from dsft.report.jsonl import read_metrics
from dsft.report.profile import StepTrace, traced_step
from dsft.run.artifacts import describe, open_memory, open_report
from dsft.run.build import bring_to, build, prove, train_steps
from dsft.run.hooks import Hooks, mfu_of, watch_hosts
from dsft.run.loop import Progress, Schedule, fit
from dsft.setup.identity import Identity, build_identity, file_digests, input_identity, software_identity
from dsft.setup.inputs import Inputs, longest, read_inputs
from dsft.setup.job import Job, Log
from dsft.setup.memory_probe import explain_out_of_memory, probe_memory
from dsft.setup.resolve import resolve
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Spec
from dsft.system.lock import FolderLock
from dsft.system.run_folder import step_folder
from dsft.tasks.api import Run, unchanged
from dsft.tasks.registry import task_of

Start = CheckpointReader | None
"""The checkpoint that a run resumes from; None at step 0."""


def train(
    job: Job, world: World, start: Start, progress: Progress, log: Log, lock: FolderLock, found: HostFacts
) -> Path | None:
    """Read the data, build the engine, load `start` into it, and train to the last step. found: the facts
    that are known before the model is counted. Return the checkpoint that the last step wrote, or None where
    no step is left. Raises what `lock.check` does where another job may write into the run's folder."""
    spec, folder = job.spec, job.folder
    inputs, compared = read(job, world, start, log)
    last_step = total_steps(spec.train, len(inputs.train), job.batch.global_batch_size)
    if progress.step >= last_step:
        return None
    traced = None if job.profile is None else traced_step(job.profile or None, progress.step + 1, last_step)

    resolved = resolve(job, inputs, world, log, found)
    for line in world.first(lambda: describe(job, resolved.keys, inputs, start)):
        log(line)
    largest = longest(inputs, job.batch, spec.train, last_step)
    memory = open_memory(resolved, job, largest[0].shape.numel(), world)
    task = task_of(spec)
    run = Run(resolved.spec, job.batch, world, inputs, start, memory, log)
    with explain_out_of_memory(memory.meter):
        built = build(job, resolved, run, task)
    engine, annotator = built.engine, built.annotator
    probe_memory(engine, with_zeros(largest[0]), largest[1] and with_zeros(largest[1]), memory.meter)
    memory.enter("load")
    log(bring_to(built.engine, start, progress, world, folder))
    warnings = resume_warnings(job, start, progress, len(inputs.train), last_step)
    for line in (*warnings, *prove(run, task, built)):
        log(line)

    report = open_report(job, resolved.config, inputs.loaded, world, last_step, progress.step)
    hooks = Hooks(
        job=job,
        inputs=inputs,
        world=world,
        built=built,
        last_step=last_step,
        compared=compared,
        lock=lock,
        memory=memory,
        log=report,
        evaluation=task.evaluation(run, engine, built.objective, annotator) if inputs.held_out else None,
        flops=mfu_of(job, inputs, resolved.counted, world),
        profile=StepTrace(folder, traced, report.line) if traced is not None and world.rank == 0 else None,
        watch=watch_hosts(world, report.line),
        replicas=Replicas(engine.replicated, world, spec.train.compare_ranks_every),
        agreement=Agreement(world),
    )
    job.stopping.stage = "train"  # from here on the loop handles a stop, and saves
    memory.enter("steady")
    steps = train_steps(run)
    try:
        plan = schedule(spec, last_step, job.batch)
        ahead = annotator.annotate[0] if annotator and annotator.prefetched else unchanged
        prefetcher = Prefetcher(steps.step, last_step, world.device, ahead)
        with explain_out_of_memory(memory.meter), prefetcher:
            end = fit(engine, built.objective, prefetcher, plan, hooks, progress)
    finally:
        report.close(hooks.latest | memory.record() | inputs.loaded.summary)
    return step_folder(folder, end.step)


def read(job: Job, world: World, start: Start, log: Log) -> tuple[Inputs, Mapping[str, Identity]]:
    """Read the inputs, and compare everything that decides the numbers between ranks and with what it was
    when `start` was saved. Return the inputs, and the identities that a later start will compare. A
    collective. Raises CheckpointError for what must be the same, and logs a warning for what may differ."""
    inputs = world.each(lambda: read_inputs(job.spec, log, first=world.rank == 0))
    compared = {
        "files": file_digests(job.spec, world, log),
        "built_from": build_identity(inputs),
        "software": software_identity() | {"device": world.device.type},
    }
    mine = world.each(lambda: input_identity(job.spec, inputs, compared["built_from"], compared["files"]))
    world.check_same(mine)
    if start is not None:
        check_same_run(start, job.spec, job.batch, inputs.loaded.identity)
        check_same_model(start, compared["built_from"], compared["software"])
        name = job.spec.model.name_or_path
        world.each(lambda: check_same_base(start, name, compared["files"].get("weights", {})))
        check_same_rows(start, asdict(inputs.rows) if inputs.rows else None)
        for line in changed_since(start, compared["software"]):
            log(line)
    return inputs, compared


def resume_warnings(
    job: Job, start: Start, progress: Progress, examples: int, last_step: int
) -> Iterator[str]:
    """Yield a warning where the learning rate does not go on as it was scheduled when `start` was saved, or
    where a run that has trained before has no checkpoint. examples: in data.train."""
    if start is None:
        if read_metrics(job.folder / "metrics.jsonl"):
            yield (
                f"warning: {job.folder} has the metrics of an earlier start but no checkpoint, so training "
                "starts again at step 0 and these metrics are replaced"
            )
        return
    train = start.state["spec"]["train"]
    lengths = {key: train[key] for key in ("max_steps", "num_train_epochs")}
    then = total_steps(job.spec.train.model_copy(update=lengths), examples, job.batch.global_batch_size)
    was, now = (
        schedule(job.spec, steps, job.batch).learning_rate(progress.applied_steps)
        for steps in (then, last_step)
    )
    if was != now:
        yield (
            f"warning: the run now has {last_step} steps instead of {then}, so the learning rate goes on at "
            f"{now:.3g} instead of {was:.3g}"
        )


def schedule(spec: Spec, last_step: int, batch: BatchSizes) -> Schedule:
    scale = batch_scale(spec.optim, batch.global_batch_size)
    return Schedule(
        total_steps=last_step,
        log_every=spec.train.log_every,
        eval_every=spec.train.eval_every,
        save_every=spec.checkpoint.every,
        learning_rate=lambda step: scale * learning_rate(spec.optim, step, last_step),
        max_nonfinite_in_a_row=spec.train.max_consecutive_nonfinite,
        seed=spec.train.seed,
        evaluate_saved=spec.checkpoint.keep_best is not None,
        evaluate_first=spec.train.eval_on_start,
    )
