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

from dsft.checkpoint.compare import check_same_run
from dsft.checkpoint.read import CheckpointReader, find
from dsft.dist.world import Ring, World
from dsft.engine.initialize import check_precision, set_tf32
from dsft.engine.join import join
from dsft.engine.ops import prepare_ops
from dsft.errors import DsftError, StoppedError, WorldError
from dsft.plan.ds_entries import HostFacts
from dsft.plan.reference import reference_layout
from dsft.rank.heartbeat import Heartbeat
from dsft.rank.launched import Launched, counted
from dsft.rank.places import RANKS, check_places, devices_lines, rank_map, rank_map_json
from dsft.rank.promise import check_groups
from dsft.rank.software import versions_line
from dsft.rank.stopping import Stopping
from dsft.reference.precomputed import precompute
from dsft.reference.score import micro_batch_size
from dsft.report.folder import check_folder
from dsft.report.jsonl import STEP, read_metrics
from dsft.report.sinks import check_installed
from dsft.run.finish import finish
from dsft.run.loop import Progress
from dsft.run.train import train
from dsft.setup.identity import build_identity, file_digests, input_identity, process_identity
from dsft.setup.inputs import read_inputs
from dsft.setup.job import Job, Log
from dsft.setup.resolve import swap_folders
from dsft.spec.schema import Spec
from dsft.system.files import write_error
from dsft.system.lock import lock_folder
from dsft.system.process import is_verbose

GRACE = 2.0
"""Seconds that a process has, after another has ended, to end by itself and report its own error."""
_MOMENT = 0.5  # seconds by which a failed collective may be noticed earlier than the ring notices a dead rank


def run(job: Job) -> None:
    """Train, from the newest whole checkpoint if there is one, and export the model. Raises DsftError."""
    spec = job.spec
    log = log_of(job.launched)
    job.heartbeat.mark("load")
    values, notes = (job.file.values, job.file.notes) if job.file else ({}, ())
    world = join(job.launched, job.layout, log, process_identity(spec, values), spec.accelerator)
    log_places(job, world, log)
    with watch_ranks(job.stopping, world) as ranks, ExitStack() as locks:
        world.each(lambda: check_precision(spec.train.precision))
        set_tf32(spec.train.tf32, world.device)
        world.first(lambda: check_installed(spec))
        world.first(lambda: check_folder(job.folder))
        lock = world.first(lambda: locks.enter_context(lock_folder(job.folder)))
        check_shared_folder(job.folder, world)
        world.first(lambda: _written(job.folder / RANKS, rank_map_json(world.places)))
        batch = job.batch.equation()
        for line in (*notes, f"batch: {batch if is_verbose() else batch.partition(';')[0]}"):
            log(line)
        start = resume_point(job, world, log)
        progress = Progress(**start.state["progress"]) if start else Progress()
        progress = replace(progress, owes_evaluation=is_evaluation_missing(progress, job.folder, world))
        # If the spec gives the number of steps, no rows need to be read to see that all are done.
        done = progress.step >= (spec.train.max_steps or math.inf)
        saved = None
        if not done:
            with swap_folders(job, world, log) as swap:
                found = HostFacts(swap=swap, cpu_adam=prepare_ops(spec, world, log))
                saved = train(job, world, start, progress, log, lock, found)
        job.stopping.stage = "end"
        if saved is None:
            assert start is not None, "a run has at least one step"
            saved = start.path
            log(
                f"{spec.name} is finished at step {progress.step}; raise train.max_steps or "
                "train.num_train_epochs to train further."
            )
        ranks.leave()
        world.close()
        job.heartbeat.mark("export")
        if world.rank == 0:  # alone, after the group is closed: a large model takes long
            finish(spec, job.folder, saved, log)


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


def is_evaluation_missing(progress: Progress, folder: Path, world: World) -> bool:
    """Return whether an evaluation that a stop postponed is still missing, i.e. no later start reported it. A
    collective."""

    def is_reported() -> bool:
        records = read_metrics(folder / "metrics.jsonl")
        return any(record[STEP] == progress.step and "eval/loss" in record for record in records)

    return progress.owes_evaluation and not world.first(is_reported)


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


def resume_point(job: Job, world: World, log: Log) -> CheckpointReader | None:
    """Return the checkpoint that checkpoint.resume selects, verified by rank 0; None to start at step 0.
    Raises CheckpointError where it is of another run."""

    def choose() -> Path | None:
        found = find(job.folder, job.spec.checkpoint.resume)
        for note in found.notes:
            log(f"warning: {note}")
        if found.path is not None:
            check_same_run(CheckpointReader.open(found.path), job.spec, job.batch, None)
        return found.path

    path = world.first(choose)
    return world.each(lambda: CheckpointReader.open(path)) if path else None


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
