"""Implement the loop's `Trainer` for a run: report, evaluate, save, agree on a stop, and name the rows of a
step that was skipped."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsft.checkpoint.card import origin_of
from dsft.checkpoint.save import CheckpointState, save
from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import NO_TARGET, GlobalStep, MicroBatch
from dsft.data.steps.prefetch import Prefetcher
from dsft.data.steps.steps import TrainSteps
from dsft.dist.world import Agreement, World
from dsft.engine.api import Scorer, StepResult
from dsft.engine.comm_timer import CommunicationTimer
from dsft.engine.replicas import Replicas
from dsft.model.build import has_frozen
from dsft.plan.census import Census
from dsft.plan.flops import peak_tflops, work
from dsft.plan.reference import reference_facts
from dsft.plan.schedule import batch_scale, learning_rate, scaling_equation
from dsft.rank.stopping import REASONS
from dsft.report.experts import expert_record
from dsft.report.folder import versions
from dsft.report.hosts import HostWatch, RankLocation
from dsft.report.profile import StepTrace
from dsft.report.sinks import Report
from dsft.run.loop import Progress, Record, Recorder, Schedule, fit, position
from dsft.setup.inputs import Inputs
from dsft.setup.memory_probe import explain_out_of_memory
from dsft.setup.run import Log, Run
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Spec
from dsft.system.run_folder import step_folder
from dsft.tasks.api import Model, Task

SHOWN = 8
"""Number of rows that a line names."""


class Trainer:
    """A `dsft.run.loop.Trainer`. Its constructor and its methods are collectives."""

    def __init__(self, run: Run, inputs: Inputs, model: Model, task: Task, progress: Progress) -> None:
        self.run, self.inputs, self.model, self.progress = run, inputs, model, progress
        spec, world, routing = run.spec, run.world, model.policy.routing
        self.rank = world.rank
        self.report = self._open_report()
        self.evaluation = task.evaluation(run, inputs, model) if inputs.held_out else None
        traces = run.profile is not None and world.rank == 0
        self.trace = StepTrace(run.folder, run.profile or 0, self.report.line) if traces else None
        self.waits = CommunicationTimer(world.device)
        self.recorder = Recorder(
            objective=model.objective,
            world=world,
            report=self._report,
            skipped=self._skipped,
            watch=watch_hosts(world, self.waits, self.report.line),
            replicas=Replicas(model.engine.replicated, world, spec.train.compare_ranks_every),
            figures={"experts": partial(expert_record, routing)} if routing else {},
            mfu=mfu_of(run, inputs, model.plan.counted),
        )
        self.agreement = Agreement(world)
        self.latest: Record = {}  # the last value of each metric

    def fit(self) -> Path:
        """Train to the last step. Return the checkpoint that it has saved."""
        run, inputs, model = self.run, self.inputs, self.model
        when = schedule(run.spec, run.batch, inputs.total_steps, evaluates=self.evaluation is not None)
        run.stopping.stage = "train"  # from here on the loop handles a stop, and saves
        model.memory.enter("steady")
        try:
            build, ahead = steps_of(run, inputs).step, model.annotator.ahead
            prefetcher = Prefetcher(build, inputs.total_steps, run.world.device, ahead)
            with explain_out_of_memory(model.memory.meter), prefetcher:
                end = fit(model.engine, prefetcher, when, self, self.progress)
        finally:
            self.report.close(self.latest | model.memory.record() | inputs.loaded.summary)
        return step_folder(run.folder, end.step)

    # --- what the loop asks for -----------------------------------------------------------------------------

    @contextmanager
    def step(self, done: int) -> Iterator[Callable[[], str | None]]:
        """See `dsft.run.loop.Trainer.step`. At its end the record of the step before is reported."""
        agree_on_stop = self._agree_on_stop()
        try:
            with self.trace(done + 1) if self.trace else nullcontext(), self.waits.timing():
                self.run.heartbeat.mark("data", done)
                yield agree_on_stop
        finally:
            self.recorder.read()

    def annotate(self, step: GlobalStep) -> GlobalStep:
        self.run.heartbeat.mark("step")
        return self.model.annotator.now(step)

    def after(self, step: GlobalStep, result: StepResult) -> None:
        self.model.annotator.after(step, result)

    def checkpoint(self, progress: Progress, *, evaluates: bool, saves: bool) -> str | None:
        """See `dsft.run.loop.Trainer.checkpoint`. Raises on all ranks what `FolderLock.check` raises where
        another job may write into the run's folder."""
        run, model, held_out_loss = self.run, self.model, None
        if evaluates:
            assert self.evaluation is not None, "something is held out"
            run.heartbeat.mark("evaluate", progress.step)
            model.memory.enter("evaluation")
            record = self.evaluation(progress.step)
            model.memory.enter("steady")
            self._report(record | position(progress))
            held_out_loss = record["eval/loss"]
        if not saves:
            return None
        run.heartbeat.mark("save", progress.step)
        run.world.first(run.lock.check)
        model.memory.enter("save")
        line = save(
            run.folder,
            model.engine.owned_fragments(),
            model.engine.shapes(),
            self._state(progress, held_out_loss),
            run.world,
            model_files=model.files,
            retention=run.spec.checkpoint,
        )
        self.report.line(line)
        model.memory.enter("steady")
        return self._agree_on_stop()()

    # --- its parts ------------------------------------------------------------------------------------------

    def _open_report(self) -> Report:
        run, inputs, plan = self.run, self.inputs, self.model.plan
        spec, size, first = run.spec, run.batch.global_batch_size, self.progress.step
        values = spec.model_dump(mode="json")
        # What Weights & Biases shows: the spec, with the ledger of the rows under `data`, and what follows.
        shown = values | {
            "data": values["data"] | {"ledger": inputs.loaded.account},
            "deepspeed": dict(plan.config),
            "versions": versions(),
            "batch": asdict(run.batch),
            "batch_scale": batch_scale(spec.optim, size),
        }
        enabled = run.world.rank == 0
        report = run.world.each(
            lambda: Report.open(run.folder, inputs.total_steps, first, spec, shown, enabled=enabled)
        )
        scaling = scaling_equation(spec.optim, size)
        if scaling is not None:
            report.line(scaling)
        return report

    def _report(self, record: Record) -> None:
        self.latest.update(record)
        self.report.metrics(record | self.model.memory.record())

    def _skipped(self, step: int, batch: GlobalStep, loss: float) -> str:
        why, rows = skipped_rows(self.model.engine, self.inputs.train, self.run.world, batch, loss)
        self.report.line(f"warning: step {step} was skipped: {why} {rows}")
        return rows

    def _agree_on_stop(self) -> Callable[[], str | None]:
        """Begin to agree on a stop over all ranks. The function returned waits for the answer: of the reasons
        that ranks have, the last one in REASONS, or None."""
        reason = self.run.stopping.reason
        agreed = self.agreement.begin(0 if reason is None else 1 + REASONS.index(reason))

        def answer() -> str | None:
            number = agreed()
            return REASONS[number - 1] if number else None

        return answer

    def _state(self, progress: Progress, held_out_loss: float | None) -> CheckpointState:
        run, inputs = self.run, self.inputs
        spec, files = run.spec, inputs.files.get("weights")
        is_known = held_out_loss is not None and math.isfinite(held_out_loss)
        return CheckpointState(
            progress=asdict(progress),
            spec=spec.model_dump(mode="json"),
            batch=asdict(run.batch),
            data=inputs.loaded.identity,
            layout=asdict(run.layout) | {"zero_stage": spec.parallel.zero_stage},
            versions=versions(),
            held_out_loss=held_out_loss if is_known else None,
            base=files if has_frozen(spec.model) or inputs.around else None,
            built_from=inputs.built_from,
            software=inputs.software,
            new_rows=asdict(inputs.rows) if inputs.rows else None,
            reference=self.model.annotator.identity,
            carried=self.model.annotator.state(),
            origin=origin_of(spec.model.name_or_path, files, reference_facts(spec)),
        )


def steps_of(run: Run, inputs: Inputs) -> TrainSteps:
    """Return the steps of a run, for training and for `dsft replay`."""
    train, rank = run.spec.train, run.world.data_rank
    return TrainSteps(inputs.train, run.batch, rank, train.seed, inputs.pad_id, train.neftune_alpha)


def schedule(spec: Spec, batch: BatchSizes, total_steps: int, *, evaluates: bool = True) -> Schedule:
    scale = batch_scale(spec.optim, batch.global_batch_size)
    return Schedule(
        total_steps=total_steps,
        log_every=spec.train.log_every,
        eval_every=spec.train.eval_every,
        save_every=spec.checkpoint.every,
        learning_rate=lambda step: scale * learning_rate(spec.optim, step, total_steps),
        max_nonfinite_in_a_row=spec.train.max_consecutive_nonfinite,
        seed=spec.train.seed,
        evaluates=evaluates,
        evaluate_saved=spec.checkpoint.keep_best is not None,
        evaluate_first=spec.train.eval_on_start,
    )


def watch_hosts(world: World, waits: CommunicationTimer, log: Log) -> HostWatch:
    """Gather the host of every rank, to watch for stragglers. A collective."""
    places = world.gather(RankLocation(socket.gethostname(), world.local_rank, world.stage))
    return HostWatch(places, world.rank, waits.pop_seconds, world.device, log)


def mfu_of(run: Run, inputs: Inputs, counted: Census) -> Callable[[int, int, float], float] | None:
    """Return a function for `Recorder.mfu`; None on a CPU. Also None in fp32 and on a GPU that the table
    lacks, unless the spec gives the peak."""
    world, accelerator = run.world, run.spec.accelerator
    peak = accelerator.peak_tflops if accelerator else None
    if peak is None and world.device.type == "cuda" and run.spec.train.precision != "fp32":
        peak = peak_tflops(torch.cuda.get_device_name(world.device))
    if peak is None or world.device.type == "cpu":
        return None
    config: Any = inputs.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return partial(work(counted, width).mfu, peak_tflops=peak * world.world_size)


def skipped_rows(
    engine: Scorer, data: Dataset, world: World, batch: GlobalStep, loss: float
) -> tuple[str, str]:
    """Return why a step was skipped, and its rows: those with an infinite or NaN loss, with the rank that
    computed each. Where the loss is finite, or is finite when recomputed without dropout, no single row is to
    blame and all rows of the step are given. A collective; it runs one forward pass where the loss is not
    finite."""
    found: list[list[int]] = []
    if not math.isfinite(loss):
        mine = list(_not_finite(engine, data, batch))
        found = world.gather(mine if world.sequence_rank == 0 else [])  # a group's ranks have the same rows
    if any(found):
        rows = [f"{data.source(id)} (rank {rank})" for rank, ids in enumerate(found) for id in ids]
        return "the loss is not finite on", _listed(rows)
    why = "the gradient is not finite although the loss is; its rows are"
    if not math.isfinite(loss):
        why = "the loss is not finite, but it is when computed again without dropout; its rows are"
    return why, _listed([data.source(id) for id in batch.example_ids])


def _not_finite(engine: Scorer, data: Dataset, batch: GlobalStep) -> Iterator[int]:
    """Yield the ids of this rank's examples that have a target with an infinite or NaN log-probability; none
    on ranks without the last stage."""
    scored = engine.score(batch.micro_batches, _faults)
    for faults, ids, micro_batch in zip(scored, batch.assigned_ids, batch.micro_batches, strict=False):
        parts: Sequence[Tensor] = ()
        if ids and micro_batch.segments is not None:  # packed: one row
            parts = torch.split(faults[0], data.lengths[list(ids)].tolist())
        elif ids:
            parts = faults.view(len(ids), -1).unbind()  # a pair has two rows
        yield from (id for id, part in zip(ids, parts, strict=True) if bool(part.any()))


def _faults(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return which targets have an infinite or NaN log-probability, as a (B, T) bool tensor."""
    of_targets = logps if logps.ndim == 2 else logps[..., 0]  # the first of several tokens
    return ~torch.isfinite(of_targets) & (micro_batch.tokens.targets != NO_TARGET)


def _listed(rows: Sequence[str]) -> str:
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return ", ".join(rows[:SHOWN]) + more
