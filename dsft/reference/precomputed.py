"""Precompute the reference's log-probabilities: read them from a store, after a pass that scores the examples
that it lacks, in the ranks' own processes and process group.

The reference's engine is closed afterwards, so that the policy is built in the memory that it frees. Longest
examples come first, so that a micro-batch that does not fit in memory fails within the first minute. The
shares of ranks (of groups, where these split rows) are equal; each is written twice a minute, so a pass that
is killed loses at most that. When several jobs need the same store at once, one computes it and the others
wait for its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import Annotate
from dsft.data.steps.steps import micro_batches_of
from dsft.dist.world import World
from dsft.engine.frozen import FrozenEngine
from dsft.errors import LockedError, NonFiniteError, OutOfMemoryError, StorageError
from dsft.objective.answers import answer_logps
from dsft.plan.reference import reference_layout, reference_line, reference_model
from dsft.plan.storage import FP32
from dsft.reference.check import check_rescored, check_weights, random_ids
from dsft.reference.key import Key, key_of
from dsft.reference.model import open_reference, proven
from dsft.reference.refer import look_up
from dsft.reference.store import LOCK, Shape, Store, StoreContents, Values, is_missing
from dsft.reference.teacher import ask_for_top, rows_of_targets
from dsft.report.console import task_progress
from dsft.report.memory import is_out_of_memory
from dsft.setup.inputs import Inputs
from dsft.spec.batch import BatchSizes, batch_sizes
from dsft.spec.schema import Spec
from dsft.system.disk import size_text
from dsft.system.lock import holder, lock_folder

SHARD_SECONDS = 30.0
SHARD_BYTES = 1 << 28
_ROUND = 8  # micro-batches per rank in one round
_WAIT = 1.0  # seconds between two attempts to take a lock that another job has

Ids = NDArray[np.int64]
Scores = tuple[Ids, NDArray[Any]]
"""Numbers of k examples, (k,), and the log-probabilities of their answers, (k, answers), or a teacher's rows
of their targets, (N, columns)."""
Log = Callable[[str], None]


@dataclass(frozen=True)
class PrecomputedReference:
    """Log-probabilities from a store. key: their identity; logps: those of each dataset, that of training
    first, as in `StoreContents`."""

    key: Key
    folder: Path
    logps: Sequence[Values]

    @property
    def annotate(self) -> tuple[Annotate, ...]:
        return tuple(look_up(one) for one in self.logps)


@dataclass(frozen=True)
class ScoringProgress:
    """Progress of all ranks, in examples (each a `unit`) and their tokens."""

    done: int
    total: int
    tokens: int
    total_tokens: int
    unit: str
    name: str = "reference"

    def text(self, seconds: float) -> str:
        if not self.tokens or seconds <= 0:
            return f"{self.name}: scoring {self.total:,} {self.unit}s of {self.total_tokens:,} tokens"
        rate = self.tokens / seconds
        left = (self.total_tokens - self.tokens) / rate
        time_left = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        return f"{self.name}: {rate:,.0f} tokens/s, {time_left} left"

    def count(self) -> str:
        return f"{self.done:,} of {self.total:,} {self.unit}s scored"


def precompute(
    spec: Spec,
    micro_batch_size: int,
    inputs: Inputs,
    world: World,
    log: Log,
    *,
    recheck: bool,
    check_key: Callable[[Key], None] = lambda key: None,
) -> PrecomputedReference:
    """Return the log-probabilities of all answers, scoring those that the store lacks. A collective, before
    the policy is built. recheck: score some of the stored examples once more, to check them; check_key:
    called with the key before anything is scored, may raise to reject it.

    Raises CheckpointError where the named store has values of another reference, or stored values differ from
    new ones; StorageError where the store cannot be written or read; and what `score` raises.
    """
    log(reference_line(spec))
    key = world.first(lambda: key_of(spec, reference_model(spec), inputs))
    world.first(lambda: check_key(key))
    store, unit = Store.of(spec, key), spec.task_kind.example
    datasets = (inputs.train, *(one.data for one in inputs.held_out), *inputs.also_scored)
    firsts = first_places(datasets)
    shapes, total = [shape_of(spec, one) for one in datasets], sum(len(datasets[n]) for n in {*firsts})
    count = spec.reference.recheck_rows if recheck and spec.reference is not None else 0

    def read(log: Log = lambda text: None) -> StoreContents:
        store.check()
        return store.read(shapes, log).of(firsts)

    with ExitStack() as lock:
        stored = world.first(read)
        if stored.num_missing:
            _take_lock(store, world, lock, log)
            stored = world.first(lambda: read(log))
        if stored.num_missing:
            world.first(store.prepare)
            if each := spec.reference.teacher_values * FP32 if spec.reference is not None else 0:
                counts = [one.target_counts[ids] for one, ids in zip(datasets, stored.missing, strict=True)]
                size = sum(int(of_one.sum()) for of_one in counts) * each
                log(f"reference: the store grows by {size_text(size)}, {each:,} bytes for each target")
        chosen = world.first(lambda: random_stored(stored, count))
        again = sum(map(len, chosen))
        if stored.num_missing or again:
            began = time.monotonic()
            with task_progress(log, first=world.rank == 0) as progress:
                plan = ScoringPass(spec, store, micro_batch_size, datasets, stored, chosen)
                score(plan, inputs, world, log, progress)
            parts = [(f"{unit}s scored in {time.monotonic() - began:.1f} s", stored.num_missing)]
            parts += [(f"{unit}s already stored", total - stored.num_missing)]
            parts += [("of these scored again, with the same result", again)]
            log(f"reference: {', '.join(f'{number:,} {what}' for what, number in parts if number)}")
            stored = world.first(read)
    if stored.num_missing:
        raise StorageError(
            f"{store.folder} lacks {stored.num_missing:,} of {total:,} {unit}s that were just written; set "
            f"{store.setting} to a folder on a reliable disk that all hosts share."
        )
    log(f"reference: the log-probabilities of {total:,} {unit}s are in {store.folder}")
    return PrecomputedReference(key, store.folder, stored.logps)


def first_places(datasets: Sequence[Dataset]) -> list[int]:
    """Return for each dataset the number of the first with the same examples, whose values it has: `dsft eval
    --data` gives a run the same rows as data.train and data.eval."""
    digests = [one.fingerprint for one in datasets]
    return [digests.index(one) for one in digests]


def shape_of(spec: Spec, dataset: Dataset) -> Shape:
    """Return the shape of what the reference gives for a dataset."""
    columns = spec.reference and spec.reference.teacher_values
    return (dataset.target_counts, columns) if columns else (len(dataset), dataset.answers)


def _take_lock(store: Store, world: World, lock: ExitStack, log: Log) -> None:
    """Take the lock of the store; while another job has it, wait."""

    def attempt() -> str | None:
        try:
            lock.enter_context(lock_folder(store.folder, LOCK, store.setting))
        except LockedError:
            time.sleep(_WAIT)
            return holder(store.folder, LOCK)
        return None

    is_waiting = False
    while (other := world.first(attempt)) is not None:
        if not is_waiting:
            log(f"reference: waiting for {other}, which is scoring the same rows")
        is_waiting = True


def random_stored(stored: StoreContents, count: int) -> tuple[Ids, ...]:
    """Choose up to `count` random stored examples, other ones at each start. Return their numbers per
    dataset."""
    sets = [np.flatnonzero(~is_missing(one)) for one in stored.logps]
    borders = np.cumsum([0, *map(len, sets)])
    chosen = random_ids(int(borders[-1]), count)
    return tuple(
        ids[chosen[(first <= chosen) & (chosen < last)] - first]
        for ids, first, last in zip(sets, borders[:-1], borders[1:], strict=True)
    )


# --- the pass ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringPass:
    """A scoring pass, the same on every rank. datasets: data.train, then each held-out set; stored: the
    values that the store has; recheck: stored examples (k,) of each dataset to score once more, before all
    others."""

    spec: Spec
    store: Store
    micro_batch_size: int
    datasets: Sequence[Dataset]
    stored: StoreContents
    recheck: Sequence[Ids]


def score(
    plan: ScoringPass, inputs: Inputs, world: World, log: Log, progress: Callable[[ScoringProgress], None]
) -> None:
    """Score the examples that the store lacks. A collective. `log` is called on every rank, `progress` on
    rank 0.

    Raises CheckpointError where stored values differ from new ones, NonFiniteError where the reference gives
    an infinite or NaN value, WorldError where its files have changed since the key was computed;
    OutOfMemoryError on the rank that runs out of memory.
    """
    spec = plan.spec
    world = replace(world, layout=reference_layout(spec, world.world_size))
    with explain_out_of_memory(spec, "the reference does not fit into memory"):
        reference = open_reference(spec, inputs.facts, world)
        world.each(lambda: check_weights(spec, plan.store.key))
        for line in proven(reference, spec, inputs, world):
            log(f"reference: {line}")
        if spec.reference is not None and spec.reference.teacher_keys:
            world.each(lambda: ask_for_top(reference.policy, spec, inputs.facts))
    scorer = AnswerScorer(plan, inputs.pad_id, world, reference.engine)
    scorer.check()
    scorer.score(progress if world.rank == 0 else lambda _: None)
    reference.engine.close()


class AnswerScorer:
    """Scores examples with the engine of an open reference. Every method is a collective."""

    def __init__(self, plan: ScoringPass, pad_id: int, world: World, engine: FrozenEngine) -> None:
        self._plan, self._pad_id, self._world, self._engine = plan, pad_id, world, engine
        self._batch = scoring_batch(plan.spec, plan.micro_batch_size, world.layout.data_parallel)

    def check(self) -> None:
        """Score some stored examples once more. Raises CheckpointError where the values differ from those in
        the store."""
        plan = self._plan
        for dataset, ids in enumerate(plan.recheck):
            ranks = self._world.gather(list(self._scored(dataset, ids))) if len(ids) else []
            found = [part for parts in ranks for part in parts]
            if found:
                numbers, values = map(np.concatenate, zip(*found, strict=True))
                old, data = plan.stored.logps[dataset][numbers], plan.datasets[dataset]
                if plan.store.of_targets:
                    old, values = (largest_of_targets(data, numbers, one) for one in (old, values))
                check_rescored(plan.store.folder, data, numbers, old, values, plan.spec.train.precision)

    def score(self, progress: Callable[[ScoringProgress], None]) -> None:
        """Score the missing examples of each dataset and add them to the store."""
        plan, unit = self._plan, self._plan.spec.task_kind.example
        rounds = [(n, ids) for n, of_it in enumerate(plan.stored.missing) for ids in self._rounds(n, of_it)]
        done = list(accumulate((len(ids) for _, ids in rounds), initial=0))
        lengths = (plan.datasets[dataset].lengths[ids] for dataset, ids in rounds)
        tokens = list(accumulate((int(one.sum(dtype=np.int64)) for one in lengths), initial=0))
        waiting, written = list[Scores](), time.monotonic()

        def add(dataset: int, scored: Sequence[Scores], *, is_last: bool) -> None:
            nonlocal written
            self._check_finite(dataset, scored)
            waiting.extend(scored)
            is_due = is_last or time.monotonic() - written >= SHARD_SECONDS
            if waiting and (is_due or sum(values.nbytes for _, values in waiting) >= SHARD_BYTES):
                ids, logps = map(np.concatenate, zip(*waiting, strict=True))
                plan.store.write(dataset, ids, logps)
                waiting.clear()
                written = time.monotonic()

        for number, (dataset, ids) in enumerate(rounds):
            progress(ScoringProgress(done[number], done[-1], tokens[number], tokens[-1], unit))
            mine = list(self._scored(dataset, ids))
            is_last = number + 1 == len(rounds) or rounds[number + 1][0] != dataset
            self._world.each(partial(add, dataset, mine, is_last=is_last))
        if rounds:
            progress(ScoringProgress(done[-1], done[-1], tokens[-1], tokens[-1], unit))

    def _check_finite(self, dataset: int, scored: Sequence[Scores]) -> None:
        data = self._plan.datasets[dataset]
        for ids, logps in scored:
            if self._plan.store.of_targets:  # the rest has none where the k tokens are the whole vocabulary
                ids = np.repeat(ids, data.target_counts[ids])
                logps = logps[:, [logps.shape[1] // 2, -2]]  # the largest and the smallest
            bad = np.flatnonzero(~np.isfinite(logps).all(axis=1))
            if len(bad):
                values = ", ".join(f"{value:g}" for value in logps[bad[0]])
                raise NonFiniteError(
                    f"{data.source(int(ids[bad[0]]))}: the reference gives this row the "
                    f"log-probabilities {values}, from which no loss can be computed; look at the row and at "
                    "the reference's weights, or set train.precision to fp32 or bf16."
                )

    def _rounds(self, dataset: int, ids: Ids) -> Iterator[Ids]:
        """Yield the examples, longest first, in rounds that fill _ROUND micro-batches of each rank."""
        order = ids[np.argsort(-self._plan.datasets[dataset].lengths[ids], kind="stable")]
        size = self._batch.micro_batch_size * self._batch.data_parallel * _ROUND
        yield from (order[i : i + size] for i in range(0, len(order), size))

    def _scored(self, dataset: int, ids: Ids) -> Iterator[Scores]:
        """Yield this rank's share of the examples; nothing on a rank without the last stage, and on all ranks
        of a group but the first, which has the same examples."""
        plan, world = self._plan, self._world
        parts = micro_batches_of(plan.datasets[dataset], ids, self._batch, world.data_rank, self._pad_id)
        parts = list(parts)
        largest = max((one.shape.numel() for one in parts), default=0)
        what = f"the reference does not fit beside a micro-batch of {largest:,} tokens"
        with explain_out_of_memory(plan.spec, what):
            scored = self._engine.score(parts, rows_of_targets if plan.store.of_targets else answer_logps)
        if world.sequence_rank:
            return
        for logps, part in zip(scored, parts, strict=False):
            yield np.array(part.ids, np.int64), logps.cpu().numpy()


def largest_of_targets(dataset: Dataset, ids: Ids, rows: NDArray[np.float32]) -> NDArray[Any]:
    """Return the sum of the largest log-probabilities of each example's targets, (n, 1), from their rows (N,
    2 k + 1)."""
    example = np.repeat(np.arange(len(ids)), dataset.target_counts[ids])
    return np.bincount(example, rows[:, rows.shape[1] // 2], minlength=len(ids))[:, None]


@contextmanager
def explain_out_of_memory(spec: Spec, what: str) -> Iterator[None]:
    """Turn a failed allocation in the block into an OutOfMemoryError that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"{what} ({str(error).splitlines()[0]}); set {spec.own_key('reference_zero_stage')} to 3, "
            f"{spec.own_key('reference_offload')} to cpu, or a smaller train.micro_batch_size."
        ) from error


def micro_batch_size(spec: Spec, data_parallel: int) -> int:
    """Return train.micro_batch_size, or what follows from the other two sizes for `data_parallel` ranks."""
    train = spec.train
    if train.micro_batch_size is not None:
        return train.micro_batch_size
    assert train.global_batch_size and train.accumulation_steps, "two of the three sizes are given"
    return max(1, train.global_batch_size // (train.accumulation_steps * data_parallel))


def scoring_batch(spec: Spec, micro_batch_size: int, data_parallel: int) -> BatchSizes:
    """Return batch sizes with one micro-batch per rank and no accumulation."""
    sizes = {"micro_batch_size": micro_batch_size, "accumulation_steps": 1, "global_batch_size": None}
    return batch_sizes(spec.train.model_copy(update=sizes), data_parallel, spec.data, spec.task)
