"""Train: run the optimizer steps, report their records, evaluate and save on schedule.

The loop knows no ZeRO stage, no pipeline and no file: what differs is behind `Engine`, `StepSource` and
`Trainer`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from dsft.data.steps.batch import GlobalStep
from dsft.dist.world import World
from dsft.engine.api import Engine, StepResult
from dsft.engine.replicas import Replicas
from dsft.errors import NonFiniteError, StoppedError
from dsft.objective.api import Objective, means
from dsft.report.hosts import HostWatch

Record = dict[str, float]


class StepSource(Protocol):
    def step(self, index: int) -> GlobalStep:
        """Return the batch of optimizer step `index` (from 0), whatever steps were asked for before."""


@dataclass(frozen=True)
class Progress:
    """How far a run is: all state of the loop that a resume needs.

    step                planned steps done
    applied_steps       steps whose gradient was finite
    num_tokens          input tokens read
    nonfinite_in_a_row  steps skipped since the last applied one; in fp16 those at the lowest loss scale
    loss_scale          the next step's LossScale.scale, in fp16
    loss_scale_steps    the next step's LossScale.good_steps, in fp16
    owes_evaluation     whether a stop has put off the evaluation of this step
    """

    step: int = 0
    applied_steps: int = 0
    num_tokens: int = 0
    epoch: float = 0.0
    nonfinite_in_a_row: int = 0
    loss_scale: float | None = None
    loss_scale_steps: int = 0
    owes_evaluation: bool = False

    def after(self, batch: GlobalStep, result: StepResult) -> Progress:
        applied, used = result.applied, result.loss_scale
        # In fp16 an overflow only lowers the loss scale, unless that is at its lowest.
        counts = not applied and (used is None or not used.can_fall)
        scale = used.after(applied) if used is not None else None
        return Progress(
            step=self.step + 1,
            applied_steps=self.applied_steps + applied,
            num_tokens=self.num_tokens + batch.num_tokens,
            epoch=batch.epoch,
            nonfinite_in_a_row=0 if applied else self.nonfinite_in_a_row + counts,
            loss_scale=None if scale is None else scale.scale,
            loss_scale_steps=0 if scale is None else scale.good_steps,
        )


@dataclass(frozen=True)
class Schedule:
    """When to log, evaluate and save, in optimizer steps; None: never. learning_rate: the rate by the number
    of applied steps; evaluates: whether rows are held out."""

    total_steps: int
    log_every: int
    eval_every: int | None
    save_every: int | None
    learning_rate: Callable[[int], float]
    max_nonfinite_in_a_row: int
    seed: int
    evaluates: bool = True
    evaluate_saved: bool = False  # evaluate at each checkpoint's step, whatever eval_every is
    evaluate_first: bool = False  # before step 1


class Trainer(Protocol):
    """What the loop needs of a run beside its engine and its steps. All methods are collectives."""

    @property
    def rank(self) -> int: ...
    @property
    def recorder(self) -> Recorder: ...

    def step(self, done: int) -> AbstractContextManager[Callable[[], str | None]]:
        """Return the context of the step after `done` steps, with the fetching of its data. It begins to
        agree, over all ranks, on whether the run should stop; the function that it gives waits for the
        reason, or None."""

    def annotate(self, step: GlobalStep) -> GlobalStep:
        """Return the step, and in its micro-batches what the objective needs beside the policy's
        log-probabilities."""

    def after(self, step: GlobalStep, result: StepResult) -> None:
        """Take what the task carries from an annotated step to later ones."""

    def checkpoint(self, progress: Progress, *, evaluates: bool, saves: bool) -> str | None:
        """Evaluate the held-out rows if `evaluates`, then commit a checkpoint, with their loss, if `saves`.
        Return the reason for which a rank has been asked to stop by the end of a save, or None."""


@dataclass
class Window:
    """What has happened since the last log record.

    last      the last step's result, and its learning rate
    skipped   a step that was not applied
    squared_lengths  as in `GlobalStep`
    computed  this rank's positions, padding included
    sources   figures by metric name, where the data has several sources
    """

    last: tuple[StepResult, float] | None = None
    skipped: GlobalStep | None = None
    sums: Tensor | None = None
    figures: dict[str, Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    squared_lengths: int = 0
    computed: int = 0
    steps: int = 0
    data_wait: float = 0.0
    sources: Record = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def add(self, batch: GlobalStep, result: StepResult, learning_rate: float, waited: float) -> None:
        """Add a step. waited: seconds for its data."""
        self.last = result, learning_rate
        self.sums = result.sums if self.sums is None else self.sums + result.sums
        for name, figure in result.figures.items():
            self.figures[name] = self.figures[name] + figure if name in self.figures else figure
        self.counts.update(batch.counts)
        self.num_tokens += batch.num_tokens
        self.squared_lengths += batch.squared_lengths
        self.computed += sum(one.tokens.input_ids.numel() for one in batch.micro_batches)
        self.steps += 1
        self.data_wait += waited
        for name, share in batch.sources.items():
            for what, count in (("tokens", share.tokens), ("examples", share.examples)):
                key = f"data/{name}/{what}"
                self.sources[key] = self.sources.get(key, 0) + count
            self.sources[f"data/{name}/epoch"] = share.epoch


def fit(
    engine: Engine, steps: StepSource, schedule: Schedule, trainer: Trainer, progress: Progress
) -> Progress:
    """Train from `progress` to the schedule's last step, which is always evaluated and saved.

    Raises NonFiniteError after max_nonfinite_in_a_row steps in a row whose gradient was not finite;
    StoppedError after saving a checkpoint of the step at which the run was asked to stop.
    """
    owed = progress.owes_evaluation or (schedule.evaluate_first and progress.step == 0)
    if schedule.evaluates and owed:
        trainer.checkpoint(progress, evaluates=True, saves=False)
    progress = replace(progress, owes_evaluation=False)
    window, is_checked = Window(), False
    while progress.step < schedule.total_steps:
        with trainer.step(progress.step) as agree_on_stop:
            fetched = time.perf_counter()
            batch = steps.step(progress.step)
            waited = time.perf_counter() - fetched

            batch = trainer.annotate(batch)
            given = engine, batch, schedule, progress, trainer.rank, trainer.after
            result, learning_rate = train_step(*given, is_checked=is_checked)
            is_checked = is_checked or (result.applied and learning_rate > 0)
            stop = agree_on_stop()
        progress = progress.after(batch, result)
        window.add(batch, result, learning_rate, waited)

        last, evaluates, saves = plan(schedule, progress.step)
        saves = saves or stop is not None
        # A window never spans a checkpoint, so that a resumed run reports the same windows.
        if saves or due(progress.step, schedule.log_every) or not result.applied:
            if not result.applied:
                window.skipped = batch
            pauses = saves or evaluates or not result.applied
            rows = trainer.recorder.record(window, progress, saves=saves, pauses=pauses)
            window = Window()
            if progress.nonfinite_in_a_row >= schedule.max_nonfinite_in_a_row:
                raise NonFiniteError(
                    f"step {progress.step}: the gradient was not finite in {progress.nonfinite_in_a_row} "
                    f"steps in a row, the last on {rows}; nothing was applied. Lower optim.learning_rate, "
                    "look at those rows, or move the checkpoints after step "
                    f"{progress.step - progress.nonfinite_in_a_row} away, to resume from an older one."
                )

        if not (evaluates or saves):
            continue
        paused = time.perf_counter()
        # On a stop the evaluation is put off until the run is resumed, except after the last step.
        owes = evaluates and stop is not None and not last
        saved = replace(progress, owes_evaluation=owes)
        came = trainer.checkpoint(saved, evaluates=evaluates and not owes, saves=saves)
        if stop := stop or came:
            raise StoppedError(
                f"stopped at step {progress.step} of {schedule.total_steps} by {stop}, and saved; the same "
                "command continues from there."
            )
        window.began += time.perf_counter() - paused  # evaluation and save are no part of the step time
    return progress


def train_step(
    engine: Engine,
    batch: GlobalStep,
    schedule: Schedule,
    progress: Progress,
    rank: int,
    after: Callable[[GlobalStep, StepResult], None],
    *,
    is_checked: bool = True,
) -> tuple[StepResult, float]:
    """Make the step after `progress` on annotated micro-batches. Return its result and learning rate.
    after: `Trainer.after`; is_checked: an earlier step has been checked, so this one is not."""
    learning_rate = schedule.learning_rate(progress.applied_steps)
    seed_step(schedule.seed, progress.step, rank)
    given = batch.micro_batches, batch.counts, learning_rate
    result = engine.step(*given) if is_checked else engine.first_step(*given, progress.applied_steps)
    after(batch, result)
    return result, learning_rate


def plan(schedule: Schedule, step: int) -> tuple[bool, bool, bool]:
    """Return whether `step` is the last, and whether an evaluation and a checkpoint follow it."""
    last = step == schedule.total_steps
    saves = last or due(step, schedule.save_every)
    evaluates = last or due(step, schedule.eval_every) or (saves and schedule.evaluate_saved)
    return last, schedule.evaluates and evaluates, saves


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the random numbers (dropout) by a pure function of seed, step and rank, so that a resumed run
    draws the same ones and no generator's state is saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


# --- records ----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Recorder:
    """Makes a record of each window, and reports it before it makes the next one. On a GPU a record is read
    once the next step is launched, so that the device is not idle while the host writes.

    skipped   names, by the ranks that computed them, the rows of a step that was not applied; called with the
              step, its batch and the loss of its window. A collective
    watch     watches for stragglers
    replicas  compares replicated weights between ranks
    figures   by name of `StepResult.figures`, what makes metrics of their sum over all ranks and steps and
              of the number of steps
    mfu       computes the model FLOPs utilization from Σ lengths and Σ lengths² of the examples and from
              seconds; None where the peak of the device is not known
    """

    objective: Objective
    world: World
    report: Callable[[Record], None]
    skipped: Callable[[int, GlobalStep, float], str]
    watch: HostWatch | None = None
    replicas: Replicas | None = None
    figures: Mapping[str, Callable[[Tensor, int], Record]] = field(default_factory=dict)
    mfu: Callable[[int, int, float], float] | None = None
    _unread: Callable[[], Record] | None = None  # waits for sums that are being copied to the host

    def record(self, window: Window, progress: Progress, *, saves: bool, pauses: bool) -> str:
        """Begin the record of a window, by one collective, and report it, or leave that to the next call of
        `read`. Return the rows of a step that was not applied, as messages name them; "" if all were applied,
        or if in fp16 only the loss scale was too high. saves: a checkpoint follows; pauses: the next step
        does not follow at once."""
        self._unread, can_wait = self._begin(window, progress, saves=saves, pauses=pauses)
        if can_wait:
            return ""
        loss = self.read()["train/loss"]
        # In fp16 overflows with a finite loss are normal: the loss scale is found by them.
        if window.skipped is None or (math.isfinite(loss) and not progress.nonfinite_in_a_row):
            return ""
        return self.skipped(progress.step, window.skipped, loss)

    def read(self) -> Record:
        """Report the record that has begun and return it; return {} if there is none."""
        if self._unread is None:
            return {}
        read, self._unread = self._unread, None
        record = read()
        self.report(record)
        return record

    def _begin(
        self, window: Window, progress: Progress, *, saves: bool, pauses: bool
    ) -> tuple[Callable[[], Record], bool]:
        """Begin the one collective of a record. Return a function that waits for it and returns the record:
        the window's loss and metrics (its sums ÷ its counts) and its speed, the last step's gradient norm and
        learning rate; and whether nothing before the next step depends on it. The function raises WorldError
        if replicated weights differ between ranks."""
        assert window.sums is not None and window.last is not None, "a record is made after a step"
        watch, replicas, none = self.watch, self.replicas, window.sums.new_zeros(0)
        parts = (
            window.sums,
            watch.mine(window.steps, window.began, window.data_wait, window.computed) if watch else none,
            replicas.mine(progress.step, saves=saves) if replicas else none,
            *(figure.flatten() for figure in window.figures.values()),
        )
        summed = to_host(self.world.sum(torch.cat(parts)))
        result, learning_rate = window.last
        norm = to_host(torch.as_tensor(result.grad_norm, dtype=torch.float64))
        can_wait = on_gpu(window.sums) and not pauses and not len(parts[2])
        launched = time.perf_counter() if can_wait else None

        def read() -> Record:
            sums, spent, digests, *rest = torch.split(summed(), [len(part) for part in parts])
            if replicas:
                replicas.check(digests, progress.step)
            record = means(self.objective, sums, window.counts, "train")
            record |= watch.record(spent) if watch else {}
            for (name, figure), total in zip(window.figures.items(), rest, strict=True):
                record |= self.figures[name](total.view_as(figure), window.steps)
            seconds = (launched or time.perf_counter()) - window.began
            tokens_per_second = window.num_tokens / seconds
            mfu = None if self.mfu is None else self.mfu(window.num_tokens, window.squared_lengths, seconds)
            return (
                position(progress)
                | ({} if mfu is None else {"perf/mfu": mfu})
                | window.sources
                | record
                | {
                    "perf/step_time": seconds / window.steps,
                    "perf/tokens_per_second": tokens_per_second,
                    "perf/tokens_per_second_per_gpu": tokens_per_second / self.world.world_size,
                    "perf/data_wait_fraction": window.data_wait / seconds,
                    "train/grad_norm": float(norm()),
                    "train/learning_rate": learning_rate,
                }
                | loss_scale_record(result)
            )

        return read, can_wait


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy `tensor` to pinned memory of the host. Return a function that waits for the
    copy and then returns it."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    copy = tensor.to("cpu", non_blocking=True)
    is_there = torch.Event(tensor.device)
    is_there.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        is_there.synchronize()
        return copy

    return wait


def on_gpu(sums: Tensor) -> bool:
    """Whether the sums are computed on a GPU, so that the host runs ahead of them."""
    return sums.is_cuda


def position(progress: Progress) -> Record:
    return {
        "train/global_step": progress.step,
        "train/epoch": progress.epoch,
        "train/num_tokens": progress.num_tokens,
    }


def loss_scale_record(result: StepResult) -> Record:
    return {} if result.loss_scale is None else {"train/loss_scale": result.loss_scale.scale}
