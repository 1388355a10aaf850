"""Carry out one run on one rank, from the process group to the exported model.

All ranks run the same code. Work for one alone (the run's folder, printed lines, the export) is done by rank
0, and all ranks learn whether it succeeded.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from dsft.checkpoint.read import CheckpointReader
from dsft.dist.world import Ring, World
from dsft.engine.api import LossScale
from dsft.engine.initialize import check_precision, set_tf32
from dsft.engine.join import join
from dsft.engine.ops import prepare_ops
from dsft.engine.self_check import check_around, check_rows
from dsft.errors import DsftError, StoppedError, WorldError
from dsft.plan.ds_entries import HostFacts
from dsft.plan.reference import reference_layout
from dsft.plan.schedule import total_steps
from dsft.rank.heartbeat import Heartbeat
from dsft.rank.launched import Launched, counted
from dsft.rank.places import RANKS, check_places, devices_lines, rank_map, rank_map_json
from dsft.rank.promise import check_groups
from dsft.rank.stopping import Stopping
from dsft.reference.precomputed import micro_batch_size, precompute
from dsft.report.folder import check_folder
from dsft.report.jsonl import STEP, read_metrics
from dsft.report.packages import check_installed
from dsft.report.profile import traced_step
from dsft.run.build import build, describe
from dsft.run.finish import finish
from dsft.run.loop import Progress
from dsft.run.trainer import Trainer, schedule
from dsft.setup.identity import build_identity, file_digests, input_identity, process_identity
from dsft.setup.inputs import Inputs, longest, read_inputs
from dsft.setup.memory_probe import explain_out_of_memory, open_memory, probe_memory
from dsft.setup.read import read, resume_point
from dsft.setup.resolve import resolve, swap_folders
from dsft.setup.run import Job, Log, Run
from dsft.spec.schema import Spec
from dsft.system.files import write_error
from dsft.system.lock import lock_folder
from dsft.system.process import is_verbose
from dsft.system.software import versions_line
from dsft.tasks.api import Model, Task
from dsft.tasks.registry import task_of

GRACE = 2.0
"""Seconds that a process has, after another has ended, to end by itself and report its own error."""
_MOMENT = 0.5  # seconds by which a failed collective may be noticed earlier than the ring notices a dead rank


@contextmanager
def joined(job: Job) -> Iterator[tuple[Run, Ring]]:
    """Join the process group, lock the run's folder and watch the other ranks during the block. A collective.
    Raises DsftError."""
    spec, folder, log = job.spec, job.folder, log_of(job.launched)
    job.heartbeat.mark("load")
    values, notes = (job.file.values, job.file.notes) if job.file else ({}, ())
    world = join(job.launched, job.layout, log, process_identity(spec, values), spec.accelerator)
    log_places(job, world, log)
    with watch_ranks(job.stopping, world) as ranks, ExitStack() as locks:
        world.each(lambda: check_precision(spec.train.precision))
        set_tf32(spec.train.tf32, world.device)
        world.first(lambda: check_installed(spec))
        world.first(lambda: check_folder(folder))
        lock = world.first(lambda: locks.enter_context(lock_folder(folder)))
        check_shared_folder(folder, world)
        world.first(lambda: _written(folder / RANKS, rank_map_json(world.places)))
        batch = job.batch.equation()
        for line in (*notes, f"batch: {batch if is_verbose() else batch.partition(';')[0]}"):
            log(line)
        yield Run(**vars(job), world=world, log=log, lock=lock), ranks


def run(job: Job) -> None:
    """Train, from the newest whole checkpoint if there is one, and export the model. Raises DsftError."""
    with joined(job) as (run, ranks):
        spec, log, world = run.spec, run.log, run.world
        run = replace(run, start=resume_point(run))
        progress = progress_at(run.start)
        progress = replace(progress, owes_evaluation=is_evaluation_missing(progress, run))
        # If the spec gives the number of steps, no rows need to be read to see that all are done.
        done = progress.step >= (spec.train.max_steps or math.inf)
        saved = None if done else train(run, progress)
        job.stopping.stage = "end"
        if saved is None:
            assert run.start is not None, "a run has at least one step"
            saved = run.start.path
            log(
                f"{spec.name} is finished at step {progress.step}; raise train.max_steps or "
                "train.num_train_epochs to train further."
            )
        ranks.leave()
        world.close()
        job.heartbeat.mark("export")
        if world.rank == 0:  # alone, after the group is closed: a large model takes long
            finish(run, saved)


def train(run: Run, progress: Progress) -> Path | None:
    """Read the data, build the engine, load the run's start into it, and train to the last step. Return the
    checkpoint that the last step wrote, or None where no step is left. A collective. Raises what `lock.check`
    does where another job may write into the run's folder."""
    with swap_folders(run) as swap:
        facts = HostFacts(swap=swap, cpu_adam=prepare_ops(run.spec, run.world, run.log))
        inputs = read(run)
        if progress.step >= inputs.total_steps:
            return None
        if run.profile is not None:
            traced = traced_step(run.profile or None, progress.step + 1, inputs.total_steps)
            run = replace(run, profile=traced)
        largest, held_out = longest(run, inputs)
        inputs, model, task = prepared(run, inputs, facts, largest.shape.numel())
        held_out = held_out and task.for_probe(run.spec, held_out)
        probe_memory(model.engine, task.for_probe(run.spec, largest), held_out, model.memory.meter)
        model.memory.enter("load")
        if run.start is None:
            run.log(f"starting at step 0: {run.folder} has no checkpoint")
        else:
            load(run, model, run.start)
            run.log(f"going on from step {progress.step}: {run.start.path}")
        for line in (*resume_warnings(run, inputs, progress), *checks(run, inputs, model, task)):
            run.log(line)
        return Trainer(run, inputs, model, task, progress).fit()


def prepared(run: Run, inputs: Inputs, facts: HostFacts, tokens: int) -> tuple[Inputs, Model, Task]:
    """Write down how the run is made, and build its model and engine. Return the inputs with what a reference
    scores beside the rows too. tokens: of the largest micro-batch. A collective."""
    plan = resolve(run, inputs, facts)
    for line in run.world.first(lambda: describe(run, inputs, plan.keys)):
        run.log(line)
    task = task_of(run.spec)
    also = task.also_scored(run.spec, inputs, run.batch.global_batch_size)
    inputs = replace(inputs, also_scored=also)
    memory = open_memory(run, plan, tokens)
    with explain_out_of_memory(memory.meter):
        return inputs, build(run, inputs, plan, memory, task), task


def progress_at(start: CheckpointReader | None) -> Progress:
    return Progress(**start.state["progress"]) if start else Progress()


def load(run: Run, model: Model, start: CheckpointReader, *, trains: bool = True) -> None:
    """Load a checkpoint into the model: all that changes in training, and without `trains` all of it but the
    optimizer's moments. A collective."""
    progress = progress_at(start)
    run.world.each(lambda: model.engine.load(start.read, progress.applied_steps if trains else 0))
    if trains and progress.loss_scale is not None:
        model.engine.set_loss_scale(LossScale(progress.loss_scale, progress.loss_scale_steps))
    if (carried := start.state.get("carried")) is not None:
        model.annotator.restore(carried)


def checks(run: Run, inputs: Inputs, model: Model, task: Task) -> Iterator[str]:
    """Run the checks on real rows that must pass before training, and yield a line for each. A collective."""
    around, world = inputs.around, run.world
    if around is not None:
        yield world.first(lambda: check_around(around, inputs.train))
    yield from check_rows(model.engine, model.policy, model.plan.spec, inputs.train, world, inputs.pad_id)
    if run.start is None:
        yield from task.start_check(run, inputs, model)


def resume_warnings(run: Run, inputs: Inputs, progress: Progress) -> Iterator[str]:
    """Yield a warning where the learning rate does not go on as it was scheduled when the run's start was
    saved, or where a run that has trained before has no checkpoint."""
    spec, batch = run.spec, run.batch
    if run.start is None:
        if read_metrics(run.folder / "metrics.jsonl"):
            yield (
                f"warning: {run.folder} has the metrics of an earlier start but no checkpoint, so training "
                "starts again at step 0 and these metrics are replaced"
            )
        return
    train = run.start.state["spec"]["train"]
    lengths = {key: train[key] for key in ("max_steps", "num_train_epochs")}
    then = total_steps(spec.train.model_copy(update=lengths), len(inputs.train), batch.global_batch_size)
    was, now = (
        schedule(spec, batch, steps).learning_rate(progress.applied_steps)
        for steps in (then, inputs.total_steps)
    )
    if was != now:
        yield (
            f"warning: the run now has {inputs.total_steps} steps instead of {then}, so the learning rate "
            f"goes on at {now:.3g} instead of {was:.3g}"
        )


def score_only(spec: Spec, launched: Launched, stopping: Stopping, heartbeat: Heartbeat, way_on: str) -> None:
    """Carry out `--reference_only`: score all pairs into the store, then print where it is and what to type
    next. A collective of all launched ranks, of any world size that the reference's pipeline stages divide.
    way_on: what to type next.

    Raises SpecError where the stages do not divide the ranks, and whatever a training run would raise at its
    start for the same data and reference.
    """
    log = log_of(launched)
    places = reference_layout(spec, launched.world_size)
    heartbeat.mark("load")
    world = join(launched, places, log, process_identity(spec, {}), spec.accelerator)
    check_groups(spec.parallel, [place.machine for place in world.places])
    with watch_ranks(stopping, world) as ranks:
        world.each(lambda: check_precision(spec.train.precision))
        set_tf32(spec.train.tf32, world.device)
        inputs = world.each(lambda: read_inputs(spec, log, first=world.rank == 0))
        files = file_digests(spec, world, log)
        world.check_same(world.each(lambda: input_identity(spec, inputs, build_identity(inputs), files)))
        total = spec.train.global_batch_size
        if total is not None:  # always, where the task scores more than its rows
            steps = total_steps(spec.train, len(inputs.train), total)
            also = task_of(spec).also_scored(spec, replace(inputs, total_steps=steps), total)
            inputs = replace(inputs, also_scored=also)
        precompute(spec, micro_batch_size(spec, places.data_parallel), inputs, world, log, recheck=True)
        log(f"next: {way_on}")
        ranks.leave()
        world.close()


def log_of(launched: Launched) -> Log:
    """Return a function that prints a line on rank 0 and does nothing on other ranks."""
    return (lambda text: print(text, flush=True)) if launched.rank == 0 else (lambda text: None)


def log_places(job: Job, world: World, log: Log) -> None:
    """Print the host and device of every rank, and check that they are as cluster promises."""
    places = world.places
    if is_verbose() or len({place.machine for place in places}) > 1:
        log(rank_map(places))
    for line in devices_lines(places, versions_line(torch.__version__)):
        log(line)
    check_groups(job.spec.parallel, [place.machine for place in places])
    if job.promise is not None:
        check_places(job.promise, places, job.launched)
        missing = len(job.promise.hosts or ()) - len({place.machine for place in places})
        if missing > 0:
            are = "is" if missing == 1 else "are"
            hosts = counted(missing, "host")
            log(f"warning: {hosts} of cluster.hosts {are} missing, as cluster.min_hosts allows")


def is_evaluation_missing(progress: Progress, run: Run) -> bool:
    """Return whether an evaluation that a stop postponed is still missing, i.e. no later start reported it. A
    collective."""

    def is_reported() -> bool:
        records = read_metrics(run.folder / "metrics.jsonl")
        return any(record[STEP] == progress.step and "eval/loss" in record for record in records)

    return progress.owes_evaluation and not run.world.first(is_reported)


def check_shared_folder(folder: Path, world: World) -> None:
    """Raise WorldError where a rank cannot see the file that rank 0 writes: all ranks write their share of a
    checkpoint into one folder."""
    path = folder / ".shared"
    nonce = world.first(lambda: _written(path, secrets.token_hex(8)))
    blind = [rank for rank, text in enumerate(world.gather(_read(path))) if text != nonce]
    if blind:
        raise WorldError(
            f"output_dir: {folder} is not the same folder on rank(s) {blind} as on rank 0; put output_dir "
            "on a disk that all hosts share."
        )


def _written(path: Path, text: str) -> str:
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise write_error(path, error) from None
    return text


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


@contextmanager
def watch_ranks(stopping: Stopping, world: World) -> Iterator[Ring]:
    """Watch the other ranks during the block: when another rank's process ends too early, end this one soon
    after with exit code 69; one rank prints why. A collective. On a stop, all ranks wait for each other, so
    that the launcher does not kill one that is still writing."""
    lost: tuple[int, bool] | None = None  # the rank, and whether this process itself noticed its end
    over = False

    def end(rank: int, noticed: bool) -> NoReturn:
        message = f"rank {world.rank}: rank {rank} has ended too early, so this one ends too"
        stopping.end_now(WorldError.exit_code, message, prints=noticed)

    def on_end(rank: int, noticed: bool) -> None:
        nonlocal lost
        lost = rank, noticed
        time.sleep(GRACE)
        if not over:
            end(rank, noticed)

    ring = Ring(world, on_end)
    try:
        yield ring
    except StoppedError:
        world.gather(None)
        over = True
        raise
    except DsftError:
        over = True
        raise
    except Exception:
        time.sleep(_MOMENT)
        if lost is not None:  # the failure here is a consequence of that
            end(*lost)
        raise
