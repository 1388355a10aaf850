"""The pass of a reference over all pairs, on one rank of a group of its own: takes what to score, adds shards
to a store.

Longest pairs first, so that a micro-batch that does not fit fails in the first minute. Ranks have equal
shares; each writes what it has scored twice a minute, so a pass that is killed loses no more than that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.steps import Laid
from dsft.engine.start import set_tf32
from dsft.engine.world import World, join
from dsft.errors import NonFiniteError, OutOfMemoryError, WorldError
from dsft.identity import built_from, of_inputs, of_process
from dsft.inputs import Inputs, read_inputs
from dsft.launch.environment import detect
from dsft.objective.answers import answer_logps
from dsft.plan.batch import BatchSizes, batch_sizes
from dsft.plan.reference import reference_layout, reference_model
from dsft.reference import store
from dsft.reference.key import Key, differences, weights_of
from dsft.reference.model import Reference, open_reference, proven
from dsft.reference.recheck import Again, check_again, choose_again
from dsft.rehearsal import ran_out
from dsft.spec.schema import Spec

SHARD_SECONDS = 30.0
_ROUND = 8  # micro-batches of a rank that are dealt together

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Pass:
    """What is asked of the ranks of a pass. num_again: pairs of the store that are scored again first."""

    spec: Spec
    key: Key
    folder: Path
    micro_batch_size: int
    num_again: int = 0
    shard_seconds: float = SHARD_SECONDS


@dataclass(frozen=True)
class Pace:
    """Of all ranks, in pairs and their tokens."""

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
        return f"{self.name}: {rate:,.0f} tokens/s, {_time(left)} left"

    def count(self) -> str:
        return f"{self.done:,} of {self.total:,} pairs are scored"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True)
class _Plan:
    """The same on every rank. missing: of each dataset the pairs to score; again: stored ones."""

    missing: tuple[Ids, ...]
    again: tuple[Again, ...]


def score_pairs(asked: Pass, say: Callable[[str], None], tell: Callable[[Pace], None]) -> None:
    """All of one rank, whose place the environment says. `say` and `tell` are called on the first one.

    Raises DsftError: CheckpointError where the store says other than the reference, NonFiniteError where the
    reference has no finite value for a pair.
    """
    spec, launched = asked.spec, detect(os.environ)
    world = join(
        launched,
        reference_layout(spec, launched.world_size),
        say,
        of_process(spec, {}),
        spec.accelerator,
    )
    set_tf32(spec.train.tf32, world.device)
    inputs = world.each(lambda: _inputs(asked))
    datasets = (inputs.train, *(one.data for one in inputs.held_out))
    world.prove_same(world.each(lambda: of_inputs(spec, inputs, built_from(inputs))))
    batch = scoring_batch(spec, asked.micro_batch_size, world.layout.data_parallel)
    plan = world.first(lambda: _planned(asked, datasets))
    reference = open_reference(spec, inputs.facts, world)
    world.first(lambda: check_weights(asked))
    for line in proven(reference, spec, inputs, world):
        say(f"reference: {line}")
    scorer = Scorer(asked, datasets, batch, inputs.pad_id, world, reference)
    scorer.check(plan.again)
    scorer.score(plan.missing, tell if world.rank == 0 else lambda pace: None)
    reference.engine.close()
    world.gather(None)  # rank 0 holds the group's meeting point
    world.close()


def micro_batch_size(spec: Spec, data_parallel: int) -> int:
    """train.micro_batch_size, or what the other two sizes come to on so many ranks."""
    train = spec.train
    if train.micro_batch_size is not None:
        return train.micro_batch_size
    assert train.global_batch_size and train.accumulation_steps, "two of the three sizes are given"
    return max(1, train.global_batch_size // (train.accumulation_steps * data_parallel))


def scoring_batch(spec: Spec, micro_batch_size: int, data_parallel: int) -> BatchSizes:
    """Of one micro-batch a rank: nothing is accumulated."""
    sizes = {"micro_batch_size": micro_batch_size, "accumulation_steps": 1, "global_batch_size": None}
    return batch_sizes(spec.train.model_copy(update=sizes), data_parallel, spec.data, spec.task)


def _inputs(asked: Pass) -> Inputs:
    inputs = read_inputs(asked.spec, lambda text: None, first=False)
    datasets = (inputs.train, *(one.data for one in inputs.held_out))
    if [one.fingerprint for one in datasets] != asked.key.components["data"]["examples"]:
        raise WorldError(
            "data.train or data.eval does not give the reference's processes the pairs that it gives the "
            "run; leave the files alone while it starts, and give all hosts the same ones."
        )
    return inputs


def check_weights(asked: Pass) -> None:
    """Once they are read: files may be replaced, or a hub id lead elsewhere, after the key was made."""
    now = weights_of(asked.spec, reference_model(asked.spec))
    then = {name: asked.key.components[name] for name in now}
    if now != then:
        raise WorldError(
            f"the reference changed while its processes started: {'; '.join(differences(then, now))}; leave "
            "its files alone, and start again."
        )


def _planned(asked: Pass, datasets: Sequence[Dataset]) -> _Plan:
    held = store.read(asked.folder, asked.key, [len(one) for one in datasets], lambda text: None)
    return _Plan(held.missing, choose_again(held, asked.num_again))


@dataclass(frozen=True)
class Scorer:
    asked: Pass
    datasets: Sequence[Dataset]
    batch: BatchSizes
    pad_id: int
    world: World
    reference: Reference

    def score(self, missing: Sequence[Ids], tell: Callable[[Pace], None]) -> None:
        """Add the missing pairs of each dataset to the store."""
        rounds = [
            (dataset, ids) for dataset, of_it in enumerate(missing) for ids in self._rounds(dataset, of_it)
        ]
        done = list(accumulate((len(ids) for _, ids in rounds), initial=0))
        tokens = list(accumulate((self._tokens(*one) for one in rounds), initial=0))
        writer = Writer(self.asked)
        for number, (dataset, ids) in enumerate(rounds):
            tell(Pace(done[number], done[-1], tokens[number], tokens[-1]))
            for pairs, logps in self._scored(dataset, ids):
                self._check_finite(dataset, pairs, logps)
                writer.add(dataset, pairs, logps)
        writer.close()
        if rounds:
            tell(Pace(done[-1], done[-1], tokens[-1], tokens[-1]))

    def check(self, again: Sequence[Again]) -> None:
        """A collective: score pairs of the store once more. Raises CheckpointError where it says other."""
        for dataset, one in enumerate(again):
            if not len(one.ids):
                continue
            mine = list(self._scored(dataset, one.ids))
            found = {
                int(pair): value
                for part in self.world.gather(mine)
                for pairs, logps in part
                for pair, value in zip(pairs, logps, strict=True)
            }
            values = np.array([found[int(pair)] for pair in one.ids])
            precision = self.asked.spec.train.precision
            check_again(self.asked.folder, self.datasets[dataset], one, values, precision)

    def _rounds(self, dataset: int, ids: Ids) -> Iterator[Ids]:
        """Longest first, as many as fill some micro-batches of each rank."""
        order = ids[np.argsort(-self.datasets[dataset].lengths[ids], kind="stable")]
        size = self.batch.micro_batch_size * self.batch.data_parallel * _ROUND
        yield from (order[i : i + size] for i in range(0, len(order), size))

    def _tokens(self, dataset: int, ids: Ids) -> int:
        return int(self.datasets[dataset].lengths[ids].sum(dtype=np.int64))

    def _scored(self, dataset: int, ids: Ids) -> Iterator[tuple[Ids, NDArray[np.float64]]]:
        """A collective: this rank's share of the pairs, numbers (k,) and log-probabilities (k, 2). None where
        it does not have the last stage."""
        rank, pad = self.world.data_rank, self.pad_id
        micro_batches = list(Laid(self.datasets[dataset], ids, self.batch, rank, pad))
        for logps, micro_batch in zip(self._score(micro_batches), micro_batches, strict=False):
            assert micro_batch.pairs is not None, "the task is dpo"
            yield micro_batch.pairs.ids.numpy(), logps.double().cpu().numpy()

    def _score(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, ...]:
        try:
            return self.reference.engine.score(micro_batches, kept=answer_logps)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            largest = max(one.input_ids.numel() for one in micro_batches)
            raise OutOfMemoryError(
                f"the reference does not fit beside a micro-batch of {largest:,} tokens "
                f"({str(error).splitlines()[0]}); set dpo.reference_zero_stage to 3, dpo.reference_offload "
                "to cpu, or a smaller train.micro_batch_size."
            ) from error

    def _check_finite(self, dataset: int, pairs: Ids, logps: NDArray[np.float64]) -> None:
        bad = np.flatnonzero(~np.isfinite(logps).all(axis=1))
        if len(bad):
            where = self.datasets[dataset].source(int(pairs[bad[0]]))
            values = ", ".join(f"{value:g}" for value in logps[bad[0]])
            raise NonFiniteError(
                f"{where}: the reference gives this pair's answers the log-probabilities {values}, which no "
                "loss can be made of; look at the row and at the reference's weights, or set train.precision "
                "to fp32 or bf16."
            )


class Writer:
    """Shards of one rank: written when a dataset ends, and when the first waiting pair has waited enough."""

    def __init__(self, asked: Pass) -> None:
        self._asked = asked
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
        if time.monotonic() - self._since >= self._asked.shard_seconds:
            self.close()

    def close(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, []
        pairs = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in waiting)])
        if len(pairs):
            logps = np.concatenate([values for _, values in waiting])
            store.write(self._asked.folder, self._asked.key, self._dataset, pairs, logps)
