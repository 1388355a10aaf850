"""The training of a run: takes what it is and where it stands, gives the checkpoint of its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, TypeVar

from dsft.checkpoint.compare import (
    changed_since,
    check_same_base,
    check_same_model,
    check_same_rows,
    check_same_run,
)
from dsft.checkpoint.read import Checkpoint, step_folder
from dsft.checkpoint.retain import Retention
from dsft.checkpoint.save import save
from dsft.data.steps.ahead import ahead
from dsft.engine.replicas import Replicas
from dsft.engine.world import World
from dsft.errors import DsftError
from dsft.identity import Identity, built_from, of_inputs, software
from dsft.inputs import Inputs, longest, read_inputs
from dsft.job.api import Job, Say
from dsft.job.build import bring_to, build, held_out_evaluation, objective_of, prove, train_steps
from dsft.job.host import on_hosts
from dsft.job.measure import counted_model, mfu_of, planned, sized_job
from dsft.job.skipped import skipped_rows
from dsft.job.tell import describe, facts_of, open_report
from dsft.job.together import ask_all
from dsft.job.watch import watch_hosts
from dsft.loop import Progress, Record, Run, Schedule, fit
from dsft.plan.batch import BatchSizes
from dsft.plan.schedule import batch_scale, learning_rate, total_steps
from dsft.reference.source import Start, as_it_is, of_zeros
from dsft.rehearsal import rehearse, told_when_full
from dsft.report.memory import MemoryMeter, Phase
from dsft.report.memory_file import MemoryFile
from dsft.report.profile import StepTrace, traced_step
from dsft.spec.schema import Spec
from dsft.system.lock import Held

Trace = Callable[[int], AbstractContextManager[object]]
P = ParamSpec("P")
T = TypeVar("T")


def train(
    job: Job, world: World, start: Checkpoint | None, progress: Progress, say: Say, lock: Held
) -> Path | None:
    """Build the engine, bring it to `progress`, and go on to the last step. The checkpoint of its end; None
    where no step is left. Raises what `lock.check` does where another job may write into the run's folder."""
    spec, folder = job.spec, job.folder
    inputs = world.each(lambda: read_inputs(spec, say, first=world.rank == 0))
    compared = {"built_from": built_from(inputs), "software": software() | {"device": world.device.type}}
    world.prove_same(world.each(lambda: of_inputs(spec, inputs, compared["built_from"])))
    last_step = total_steps(spec.train, len(inputs.train), job.batch.global_batch_size)
    if start is not None:
        for line in compare_with(start, job, inputs, compared):
            say(line)
    if progress.step >= last_step:
        return None
    traced = None if job.profile is None else traced_step(job.profile or None, progress.step + 1, last_step)
    counted = counted_model(job, inputs, world, say)
    largest = longest(inputs, job.batch, spec.train, last_step)
    job = on_hosts(sized_job(job, counted, say), counted, world, say)
    for line in world.first(lambda: describe(job, inputs, start)):
        say(line)
    figures = planned(job, counted, largest[0].input_ids.numel(), on_gpu=world.device.type != "cpu")
    memory = MemoryFile(folder if world.rank == 0 else None, MemoryMeter(world.device), world.gather, figures)
    memory.enter("load")
    objective = objective_of(spec)
    with told_when_full(memory.meter):
        built = build(job, inputs, world, objective, Start(folder, start, say))
    engine, reference = built.engine, built.reference
    rehearse(engine, of_zeros(largest[0]), largest[1] and of_zeros(largest[1]), memory.meter)
    memory.enter("load")
    say(
        bring_to(engine, start, progress, world)
        if start
        else f"starting at step 0: {folder} has no checkpoint"
    )
    for line in prove(job, inputs, world, built, fresh=start is None):
        say(line)
    report = open_report(job, inputs.loaded, world, last_step, progress.step)
    latest: Record = {}

    def tell(record: Record) -> None:
        latest.update(record)
        report.metrics(record | memory.record())

    retention = Retention(spec.checkpoint.keep_last, spec.checkpoint.keep_best)

    def keep(progress: Progress, held_out_loss: float | None) -> None:
        proof = reference.unchanged.proof(world) if reference and progress.step == last_step else None
        unchanged = None if proof is None else isinstance(proof, str)
        facts = facts_of(job, inputs, compared, progress, held_out_loss, reference, unchanged=unchanged)
        fragments, shapes = engine.owned(), engine.shapes()
        report.line(
            save(folder, fragments, shapes, facts, world, model_files=built.model_files, retention=retention)
        )
        tell_proof(proof, report.line)

    steps = train_steps(job, inputs, world)
    evaluate = held_out_evaluation(job, inputs, world, engine, objective, reference)
    hooks = Run(
        world.sum,
        during("evaluation", evaluate, memory) if evaluate else None,
        tell,
        if_held(lock, world, during("save", keep, memory)),
        world.world_size,
        world.rank,
        mfu_of(job, inputs, counted, world),
        trace_of(job, traced, world, report.line),
        reference.now if reference else as_it_is,
        watch_hosts(world, report.line),
        Replicas(engine.replicated, world, spec.train.compare_ranks_every),
        ask_all(job, world),
        job.pulse.mark,
        skipped_rows(engine, inputs.train, world, report.line),
    )
    memory.enter("steady")
    try:
        coming = ahead(steps, last_step, world.device, reference.ahead if reference else as_it_is)
        with told_when_full(memory.meter), coming as soon:
            end = fit(engine, objective, soon, schedule(spec, last_step, job.batch), hooks, progress)
    finally:
        report.close(latest | memory.record() | inputs.loaded.summary)
    return step_folder(folder, end.step)


def compare_with(
    start: Checkpoint, job: Job, inputs: Inputs, compared: Mapping[str, Identity]
) -> Iterator[str]:
    """Compare everything that decides the numbers with what it was when `start` was saved. Raises
    CheckpointError for what must be the same, and yields a warning for what may differ."""
    check_same_run(start, job.spec, job.batch, inputs.loaded.identity)
    check_same_model(start, compared["built_from"], compared["software"])
    check_same_base(start, inputs.files)
    check_same_rows(start, asdict(inputs.rows) if inputs.rows else None)
    yield from changed_since(start, compared["software"])


def tell_proof(proof: str | DsftError | None, say: Say) -> None:
    """Raises it where it is an error."""
    if isinstance(proof, DsftError):
        raise proof
    if proof is not None:
        say(proof)


def if_held(lock: Held, world: World, work: Callable[P, T]) -> Callable[P, T]:
    """`work`, which writes into the run's folder, once rank 0 has seen that the lock is still held; a
    collective. Raises on all ranks what `lock.check` does."""

    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        world.first(lock.check)
        return work(*args, **kwargs)

    return checked


def during(phase: Phase, work: Callable[P, T], memory: MemoryFile) -> Callable[P, T]:
    """`work`, whose memory counts under `phase`."""

    def measured(*args: P.args, **kwargs: P.kwargs) -> T:
        memory.enter(phase)
        result = work(*args, **kwargs)
        memory.enter("steady")
        return result

    return measured


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


def trace_of(job: Job, traced: int | None, world: World, say: Say) -> Trace:
    """Of the step that `--profile` asks for, on rank 0."""
    if traced is None or world.rank != 0:
        return lambda step: nullcontext()
    return StepTrace(job.folder, traced, say)
