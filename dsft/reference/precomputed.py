"""Read the reference's log-probabilities from a store, after a pass that scores those that it lacks.

When several jobs need the same store at once, one computes it and the others wait for its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsft.dist.world import World
from dsft.errors import LockedError, StorageError
from dsft.plan.reference import dpo_of, reference_line, reference_model
from dsft.reference import store
from dsft.reference.check import random_stored_pairs
from dsft.reference.key import Key, key_of
from dsft.reference.refer import Annotate, look_up
from dsft.reference.score import ScoringPass, score
from dsft.reference.store import StoreContents
from dsft.report.console import task_progress
from dsft.setup.inputs import Inputs
from dsft.spec.schema import Spec
from dsft.system.lock import holder, lock_folder

Log = Callable[[str], None]
_WAIT = 1.0  # seconds between two attempts to take a lock that another job has


@dataclass(frozen=True)
class PrecomputedReference:
    """Log-probabilities from a store. key: their identity; logps: (n, 2) of each dataset, that of training
    first."""

    key: Key
    folder: Path
    logps: Sequence[NDArray[np.float64]]

    @property
    def refers(self) -> tuple[Annotate, ...]:
        return tuple(look_up(one) for one in self.logps)


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
    """Return the log-probabilities of all pairs, scoring those that the store lacks. A collective, before the
    policy is built. recheck: score some of the stored pairs once more, to check them; check_key: called with
    the key before anything is scored, may raise to reject it.

    Raises CheckpointError where dpo.reference_store has values of another reference, or stored values differ
    from new ones; StorageError where the store cannot be written or read; and what `score` raises.
    """
    log(reference_line(spec))
    key = world.first(lambda: key_of(spec, reference_model(spec), inputs))
    world.first(lambda: check_key(key))
    folder = store.store_folder(spec, key)
    datasets = (inputs.train, *(one.data for one in inputs.held_out))
    total = sum(map(len, datasets))

    def read(log: Log = lambda text: None) -> StoreContents:
        store.check(folder, key)
        return store.read(folder, key, [len(one) for one in datasets], log)

    with ExitStack() as lock:
        stored = world.first(read)
        if stored.num_missing:
            _take_lock(folder, world, lock, log)
            stored = world.first(lambda: read(log))
        if stored.num_missing:
            world.first(lambda: store.prepare(folder, key))
        pairs = world.first(lambda: random_stored_pairs(stored, dpo_of(spec).recheck_rows if recheck else 0))
        rechecked = sum(map(len, pairs))
        if stored.num_missing or rechecked:
            began = time.monotonic()
            with task_progress(log, first=world.rank == 0) as progress:
                scoring_pass = ScoringPass(spec, key, folder, micro_batch_size, datasets, stored, pairs)
                score(scoring_pass, inputs, world, log, progress)
            log(_summary(stored.num_missing, total - stored.num_missing, rechecked, time.monotonic() - began))
            stored = world.first(read)
    if stored.num_missing:
        raise StorageError(
            f"{folder} lacks {stored.num_missing:,} of {total:,} pairs that were just written; set "
            "dpo.reference_store to a folder on a reliable disk that all hosts share."
        )
    log(f"reference: the log-probabilities of {total:,} pairs are in {folder}")
    return PrecomputedReference(key, folder, stored.logps)


def _take_lock(folder: Path, world: World, lock: ExitStack, log: Log) -> None:
    """Take the lock of the store; while another job has it, wait."""

    def attempt() -> str | None:
        try:
            lock.enter_context(lock_folder(folder, store.LOCK, "dpo.reference_store"))
        except LockedError:
            time.sleep(_WAIT)
            return holder(folder, store.LOCK)
        return None

    is_waiting = False
    while (other := world.first(attempt)) is not None:
        if not is_waiting:
            log(f"reference: waiting for {other}, which is scoring the same pairs")
        is_waiting = True


def _summary(scored: int, stored: int, rechecked: int, seconds: float) -> str:
    parts = [f"{scored:,} pairs scored in {seconds:.1f} s"] if scored else []
    parts += [f"{stored:,} pairs already stored"] if stored else []
    parts += [f"{rechecked} of these scored again, with the same result"] if rechecked else []
    return f"reference: {', '.join(parts)}"
