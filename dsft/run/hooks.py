"""Implement what the training loop asks for: evaluation, report, checkpoints, and the watching of hosts."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsft.checkpoint.save import save
from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import NO_TARGET, GlobalStep, MicroBatch
from dsft.dist.world import Agreement, World
from dsft.engine.api import Scorer
from dsft.engine.comm_timer import CommunicationTimer
from dsft.engine.replicas import Replicas
from dsft.plan.census import Census
from dsft.plan.flops import peak_tflops, work
from dsft.rank.stopping import REASONS
from dsft.report.hosts import HostWatch, RankLocation
from dsft.report.memory import MemoryFile, Phase
from dsft.report.profile import StepTrace
from dsft.report.run import Report
from dsft.run.artifacts import facts_of
from dsft.run.build import Built
from dsft.run.loop import LoopHooks, LoopPhase, Progress, Record
from dsft.setup.identity import Identity
from dsft.setup.inputs import Inputs
from dsft.setup.job import Job, Log
from dsft.system.lock import FolderLock

SHOWN = 8
"""Number of rows that a line names."""


@dataclass(kw_only=True)
class Hooks(LoopHooks):
    """The hooks that a run gives to its training loop.

    compared    what a resumed run compares with its checkpoint, by the field names of `CheckpointState`
    evaluation  step -> metrics; None where nothing is held out
    flops       computes `LoopHooks.mfu`; None where the peak FLOP/s are not known
    profile     records the step that --profile asks for
    latest      the last value of each metric
    """

    job: Job
    inputs: Inputs
    world: World
    built: Built
    last_step: int
    compared: Mapping[str, Identity]
    lock: FolderLock
    memory: MemoryFile
    log: Report
    evaluation: Callable[[int], Record] | None
    flops: Callable[[int, int, float], float] | None
    profile: StepTrace | None
    watch: HostWatch
    replicas: Replicas
    agreement: Agreement
    latest: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluates = self.evaluation is not None
        self.routing = self.built.policy.routing

    def evaluate(self, step: int) -> Record:
        assert self.evaluation is not None, "something is held out"
        with self._during("evaluation"):
            return self.evaluation(step)

    def report(self, record: Record) -> None:
        self.latest.update(record)
        self.log.metrics(record | self.memory.record())

    def save(self, progress: Progress, held_out_loss: float | None) -> None:
        """Save a checkpoint. Raises on all ranks what `lock.check` raises where another job may write into
        the run's folder."""
        self.world.first(self.lock.check)
        with self._during("save"):
            facts = facts_of(
                self.job, self.inputs, self.compared, progress, held_out_loss, self.built.annotator
            )
            engine = self.built.engine
            line = save(
                self.job.folder,
                engine.owned_fragments(),
                engine.shapes(),
                facts,
                self.world,
                model_files=self.built.model_files,
                retention=self.job.spec.checkpoint,
            )
            self.log.line(line)

    def mfu(self, tokens: int, squared: int, seconds: float) -> float | None:
        return None if self.flops is None else self.flops(tokens, squared, seconds)

    def trace(self, step: int) -> AbstractContextManager[object]:
        return nullcontext() if self.profile is None else self.profile(step)

    def annotate(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        annotator = self.built.annotator
        if annotator is None or annotator.prefetched:
            return micro_batches
        return annotator.annotate[0](micro_batches)

    def ask(self) -> Callable[[], str | None]:
        """Begin to agree on a stop over all ranks. The function returned gives the highest of REASONS that
        any rank has, or None."""
        reason = self.job.stopping.reason
        agreed = self.agreement.begin(0 if reason is None else 1 + REASONS.index(reason))

        def answer() -> str | None:
            number = agreed()
            return REASONS[number - 1] if number else None

        return answer

    def mark(self, phase: LoopPhase, step: int) -> None:
        self.job.heartbeat.mark(phase, step)

    def skipped(self, step: int, batch: GlobalStep, micro_batches: Sequence[MicroBatch], loss: float) -> str:
        engine, data = self.built.engine, self.inputs.train
        why, rows = skipped_rows(engine, data, self.world, batch, micro_batches, loss)
        self.log.line(f"warning: step {step} was skipped: {why} {rows}")
        return rows

    @contextmanager
    def _during(self, phase: Phase) -> Iterator[None]:
        """Count memory under `phase` in the block."""
        self.memory.enter(phase)
        yield
        self.memory.enter("steady")


def watch_hosts(world: World, log: Log) -> HostWatch:
    """Gather the host of every rank, to watch for stragglers. A collective."""
    places = world.gather(RankLocation(socket.gethostname(), world.local_rank, world.stage))
    return HostWatch(places, world.rank, CommunicationTimer(world.device), world.device, log)


def mfu_of(
    job: Job, inputs: Inputs, counted: Census, world: World
) -> Callable[[int, int, float], float] | None:
    """Return a function for `Hooks.flops`; None on a CPU. Also None in fp32 and on a GPU that the table
    lacks, unless the spec gives the peak."""
    accelerator = job.spec.accelerator
    peak = accelerator.peak_tflops if accelerator else None
    if peak is None and world.device.type == "cuda" and job.spec.train.precision != "fp32":
        peak = peak_tflops(torch.cuda.get_device_name(world.device))
    if peak is None or world.device.type == "cpu":
        return None
    config: Any = inputs.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return partial(work(counted, width).mfu, peak_tflops=peak * world.world_size)


def skipped_rows(
    engine: Scorer,
    data: Dataset,
    world: World,
    batch: GlobalStep,
    micro_batches: Sequence[MicroBatch],
    loss: float,
) -> tuple[str, str]:
    """Return why a step was skipped, and its rows: those with an infinite or NaN loss, with the rank that
    computed each. Where the loss is finite, or is finite when recomputed without dropout, no single row is to
    blame and all rows of the step are given. A collective; it runs one forward pass where the loss is not
    finite."""
    found: list[list[int]] = []
    if not math.isfinite(loss):
        mine = list(_not_finite(engine, data, batch, micro_batches))
        found = world.gather(mine if world.sequence_rank == 0 else [])  # a group's ranks have the same rows
    if any(found):
        rows = [f"{data.source(id)} (rank {rank})" for rank, ids in enumerate(found) for id in ids]
        return "the loss is not finite on", _listed(rows)
    why = "the gradient is not finite although the loss is; its rows are"
    if not math.isfinite(loss):
        why = "the loss is not finite, but it is when computed again without dropout; its rows are"
    return why, _listed([data.source(id) for id in batch.example_ids])


def _not_finite(
    engine: Scorer, data: Dataset, batch: GlobalStep, micro_batches: Sequence[MicroBatch]
) -> Iterator[int]:
    """Yield the ids of this rank's examples that have a target with an infinite or NaN log-probability; none
    on ranks without the last stage."""
    scored = engine.score(micro_batches, _faults)
    for faults, ids, micro_batch in zip(scored, batch.assigned_ids, micro_batches, strict=False):
        parts: Sequence[Tensor] = ()
        if ids and micro_batch.segments is not None:  # packed: one row
            parts = torch.split(faults[0], data.lengths[list(ids)].tolist())
        elif ids:
            parts = faults.view(len(ids), -1).unbind()  # a pair has two rows
        yield from (id for id, part in zip(ids, parts, strict=True) if bool(part.any()))


def _faults(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return which targets have an infinite or NaN log-probability, as a (B, T) bool tensor."""
    return ~torch.isfinite(logps) & (micro_batch.tokens.targets != NO_TARGET)


def _listed(rows: Sequence[str]) -> str:
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return ", ".join(rows[:SHOWN]) + more
