"""Score the pairs that a store lacks with the reference, in the ranks' own processes and process group, and
add them to the store as shards.

The reference's engine is closed afterwards, so that the policy is built in the memory that it frees. Longest
pairs come first, so that a micro-batch that does not fit in memory fails within the first minute. The shares
of ranks (of groups, where these split rows) are equal; each is written twice a minute, so a pass that is
killed loses at most that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.steps import micro_batches_of
from dsft.dist.world import World
from dsft.errors import NonFiniteError, OutOfMemoryError
from dsft.objective.answers import answer_logps
from dsft.plan.reference import reference_layout
from dsft.reference import store
from dsft.reference.check import check_rescored, check_weights
from dsft.reference.key import Key
from dsft.reference.model import OpenReference, open_reference, proven
from dsft.reference.store import StoreContents
from dsft.report.memory import is_out_of_memory, resident
from dsft.setup.inputs import Inputs
from dsft.spec.batch import BatchSizes, batch_sizes
from dsft.spec.schema import Spec
from dsft.system.disk import size_text

SHARD_SECONDS = 30.0
_ROUND = 8  # micro-batches per rank in one round

Ids = NDArray[np.int64]
Log = Callable[[str], None]


@dataclass(frozen=True)
class ScoringPass:
    """A scoring pass, the same on every rank. datasets: data.train, then each held-out set; stored: the
    values that `folder` has; recheck: stored pairs (k,) of each dataset to score once more, before all
    others."""

    spec: Spec
    key: Key
    folder: Path
    micro_batch_size: int
    datasets: Sequence[Dataset]
    stored: StoreContents
    recheck: Sequence[Ids]


@dataclass(frozen=True)
class ScoringProgress:
    """Progress of all ranks, in pairs and their tokens."""

    done: int
    total: int
    tokens: int
    total_tokens: int
    name: str = "reference"

    def text(self, seconds: float) -> str:
        if not self.tokens or seconds <= 0:
            return f"{self.name}: scoring {self.total:,} pairs of {self.total_tokens:,} tokens"
        rate = self.tokens / seconds
        left = (self.total_tokens - self.tokens) / rate
        time_left = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        return f"{self.name}: {rate:,.0f} tokens/s, {time_left} left"

    def count(self) -> str:
        return f"{self.done:,} of {self.total:,} pairs scored"


def score(
    plan: ScoringPass, inputs: Inputs, world: World, log: Log, progress: Callable[[ScoringProgress], None]
) -> None:
    """Score the pairs that the store lacks. A collective, before the policy is built. `log` is called on
    every rank, `progress` on rank 0.

    Raises CheckpointError where stored values differ from new ones, NonFiniteError where the reference gives
    an infinite or NaN value for a pair, WorldError where its files have changed since the key was computed;
    OutOfMemoryError on the rank that runs out of memory.
    """
    spec = plan.spec
    world = replace(world, layout=reference_layout(spec, world.world_size))
    before = in_use(world.device)
    with explain_out_of_memory("the reference does not fit into memory"):
        reference = open_reference(spec, inputs.facts, world)
        world.each(lambda: check_weights(spec, plan.key))
        for line in proven(reference, spec, inputs, world):
            log(f"reference: {line}")
    scorer = PairScorer(plan, inputs.pad_id, world, reference)
    scorer.check()
    scorer.score(progress if world.rank == 0 else lambda _: None)
    while_open = in_use(world.device)
    reference.engine.close()
    del scorer, reference
    log(memory_line(world.gather((before, while_open, in_use(world.device)))))


def in_use(device: torch.device) -> int:
    """Return the bytes in use: on a GPU those allocated by torch, else this process's resident memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident()


def memory_line(ranks: Sequence[tuple[int, int, int]]) -> str:
    """Describe the memory of the rank that has got back the least. ranks: bytes in use on each, before the
    reference was built, while it was open, and after it was closed."""
    worst = max(ranks, key=lambda rank: rank[2] - rank[0])
    before, while_open, after = (size_text(size) for size in worst)
    return f"reference: closed; memory in use was {before} before, {while_open} while open, {after} after"


@contextmanager
def explain_out_of_memory(what: str) -> Iterator[None]:
    """Turn a failed allocation in the block into an OutOfMemoryError that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"{what} ({str(error).splitlines()[0]}); set dpo.reference_zero_stage to 3, "
            "dpo.reference_offload to cpu, or a smaller train.micro_batch_size."
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


class PairScorer:
    """An open reference that scores pairs. Every method is a collective."""

    def __init__(self, plan: ScoringPass, pad_id: int, world: World, reference: OpenReference) -> None:
        self._plan, self._pad_id, self._world, self._reference = plan, pad_id, world, reference
        self._batch = scoring_batch(plan.spec, plan.micro_batch_size, world.layout.data_parallel)

    def check(self) -> None:
        """Score some stored pairs once more. Raises CheckpointError where the values differ from those in the
        store."""
        plan = self._plan
        for dataset, ids in enumerate(plan.recheck):
            ranks = self._world.gather(list(self._scored(dataset, ids))) if len(ids) else []
            found = {
                int(pair): value
                for parts in ranks
                for pairs, logps in parts
                for pair, value in zip(pairs, logps, strict=True)
            }
            if found:
                values, stored = np.array([found[int(pair)] for pair in ids]), plan.stored.logps[dataset][ids]
                check_rescored(
                    plan.folder, plan.datasets[dataset], ids, stored, values, plan.spec.train.precision
                )

    def score(self, progress: Callable[[ScoringProgress], None]) -> None:
        """Score the missing pairs of each dataset and add them to the store."""
        missing = self._plan.stored.missing
        rounds = [(n, ids) for n, of_it in enumerate(missing) for ids in self._rounds(n, of_it)]
        done = list(accumulate((len(ids) for _, ids in rounds), initial=0))
        lengths = (self._plan.datasets[dataset].lengths[ids] for dataset, ids in rounds)
        tokens = list(accumulate((int(one.sum(dtype=np.int64)) for one in lengths), initial=0))
        writer = ShardWriter(self._plan.folder, self._plan.key)
        for number, (dataset, ids) in enumerate(rounds):
            progress(ScoringProgress(done[number], done[-1], tokens[number], tokens[-1]))
            mine = list(self._scored(dataset, ids))
            self._world.each(partial(self._add, writer, dataset, mine))
        self._world.each(writer.close)
        if rounds:
            progress(ScoringProgress(done[-1], done[-1], tokens[-1], tokens[-1]))

    def _add(
        self, writer: ShardWriter, dataset: int, scored: Sequence[tuple[Ids, NDArray[np.float64]]]
    ) -> None:
        """Write scored pairs. Raises NonFiniteError where a value is infinite or NaN."""
        for pairs, logps in scored:
            bad = np.flatnonzero(~np.isfinite(logps).all(axis=1))
            if len(bad):
                where = self._plan.datasets[dataset].source(int(pairs[bad[0]]))
                values = ", ".join(f"{value:g}" for value in logps[bad[0]])
                raise NonFiniteError(
                    f"{where}: the reference gives this pair's answers the log-probabilities {values}, from "
                    "which no loss can be computed; look at the row and at the reference's weights, or set "
                    "train.precision to fp32 or bf16."
                )
            writer.add(dataset, pairs, logps)

    def _rounds(self, dataset: int, ids: Ids) -> Iterator[Ids]:
        """Yield the pairs, longest first, in rounds that fill _ROUND micro-batches of each rank."""
        order = ids[np.argsort(-self._plan.datasets[dataset].lengths[ids], kind="stable")]
        size = self._batch.micro_batch_size * self._batch.data_parallel * _ROUND
        yield from (order[i : i + size] for i in range(0, len(order), size))

    def _scored(self, dataset: int, ids: Ids) -> Iterator[tuple[Ids, NDArray[np.float64]]]:
        """Yield this rank's share of the pairs, numbers (k,) and log-probabilities (k, 2); nothing on a rank
        without the last stage, and on all ranks of a group but the first, which has the same pairs."""
        rank, rows = self._world.data_rank, self._plan.datasets[dataset]
        micro_batches = list(micro_batches_of(rows, ids, self._batch, rank, self._pad_id))
        scored = self._score(micro_batches)
        if self._world.sequence_rank:
            return
        for logps, micro_batch in zip(scored, micro_batches, strict=False):
            assert micro_batch.answers is not None, "the task is dpo"
            yield micro_batch.answers.ids.numpy(), logps.double().cpu().numpy()

    def _score(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, ...]:
        largest = max((one.shape.numel() for one in micro_batches), default=0)
        with explain_out_of_memory(f"the reference does not fit beside a micro-batch of {largest:,} tokens"):
            return self._reference.engine.score(micro_batches, answer_logps)


class ShardWriter:
    """A buffer for one rank's shards, written whenever the dataset changes, and when the oldest waiting pair
    has waited for SHARD_SECONDS."""

    def __init__(self, folder: Path, key: Key) -> None:
        self._folder, self._key = folder, key
        self._dataset = 0
        self._waiting: list[tuple[Ids, NDArray[np.float64]]] = []
        self._since = 0.0

    def add(self, dataset: int, pairs: Ids, logps: NDArray[np.float64]) -> None:
        if dataset != self._dataset:
            self.close()
            self._dataset = dataset
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((pairs, logps))
        if time.monotonic() - self._since >= SHARD_SECONDS:
            self.close()

    def close(self) -> None:
        """Write the waiting pairs. Raises StorageError."""
        waiting, self._waiting = self._waiting, []
        pairs = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in waiting)])
        if len(pairs):
            logps = np.concatenate([values for _, values in waiting])
            store.write(self._folder, self._key, self._dataset, pairs, logps)
