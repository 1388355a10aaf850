"""Read the reference's log-probabilities from a store, after a pass that scores those that it lacks.

When several jobs need the same store at once, one computes it and the others wait for its lock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.engine.world import World
from dsft.errors import CheckpointError, LockedError, StorageError
from dsft.inputs import Inputs
from dsft.plan.reference import dpo_of, reference_line, reference_model
from dsft.reference import store
from dsft.reference.check import choose_again
from dsft.reference.key import Components, Key, differences, key_of
from dsft.reference.refer import Refer, look_up
from dsft.reference.score import ScoringPass, score
from dsft.reference.store import StoreContents
from dsft.report.console import task_progress
from dsft.spec.schema import Spec
from dsft.system.files import atomic_write, cached_json, write_error
from dsft.system.lock import holder, lock_folder

Say = Callable[[str], None]
MEMORY = "reference.json"
"""File in a run's folder that identifies the run's reference."""
_WAIT = 1.0  # seconds between two attempts to take a lock that another job has


@dataclass(frozen=True)
class PrecomputedReference:
    """Log-probabilities from a store. key: their identity; logps: (n, 2) of each dataset, that of training
    first."""

    key: Key
    folder: Path
    logps: Sequence[NDArray[np.float64]]

    @property
    def refers(self) -> tuple[Refer, ...]:
        return tuple(look_up(one) for one in self.logps)


def precompute(
    spec: Spec,
    micro_batch_size: int,
    inputs: Inputs,
    world: World,
    say: Say,
    *,
    again: bool,
    known: Callable[[Key], None] = lambda key: None,
) -> PrecomputedReference:
    """Return the log-probabilities of all pairs, scoring those that the store lacks. A collective, before the
    policy is built. again: score some of the stored pairs once more, to check them; known: called with the
    key before anything is scored, may raise to reject it.

    Raises CheckpointError where dpo.reference_store has values of another reference, or stored values differ
    from new ones; StorageError where the store cannot be written or read; and what `score` raises.
    """
    say(reference_line(spec))
    key = world.first(lambda: key_of(spec, reference_model(spec), inputs))
    world.first(lambda: known(key))
    folder = store.store_folder(spec, key)
    datasets = (inputs.train, *(one.data for one in inputs.held_out))
    total = sum(map(len, datasets))

    def look(tell: Say = lambda text: None) -> StoreContents:
        store.check(folder, key, tell)
        return store.read(folder, key, [len(one) for one in datasets], tell)

    with ExitStack() as held:
        stored = world.first(look)
        if stored.num_missing:
            _take(folder, world, held, say)
            stored = world.first(lambda: look(say))
        if stored.num_missing:
            world.first(lambda: store.prepare(folder, key))
        pairs = world.first(lambda: choose_again(stored, dpo_of(spec).recheck_rows if again else 0))
        chosen = sum(map(len, pairs))
        if stored.num_missing or chosen:
            began = time.monotonic()
            with task_progress(say, first=world.rank == 0) as tell:
                asked = ScoringPass(spec, key, folder, micro_batch_size, datasets, stored, pairs)
                score(asked, inputs, world, say, tell)
            say(_done(stored.num_missing, total - stored.num_missing, chosen, time.monotonic() - began))
    stored = world.first(lambda: look(say))
    if stored.num_missing:
        raise StorageError(
            f"{folder} lacks {stored.num_missing:,} of {total:,} pairs that were written just now; set "
            "dpo.reference_store to a sound disk that all hosts share."
        )
    say(f"reference: the log-probabilities of {total:,} pairs are in {folder}")
    return PrecomputedReference(key, folder, stored.logps)


def _take(folder: Path, world: World, held: ExitStack, say: Say) -> None:
    """Take the lock of the store; while another job has it, wait."""

    def attempt() -> str | None:
        try:
            held.enter_context(lock_folder(folder, store.LOCK, "dpo.reference_store"))
        except LockedError:
            time.sleep(_WAIT)
            return holder(folder, store.LOCK)
        return None

    waiting = False
    while (who := world.first(attempt)) is not None:
        if not waiting:
            say(f"reference: {who} scores the same pairs; waiting for it")
        waiting = True


def _done(scored: int, there: int, again: int, seconds: float) -> str:
    said = [f"{scored:,} pairs scored in {seconds:.1f} s"] if scored else []
    if there:
        said += [f"{there:,} were there"]
    if there and again:
        said += [f"{again} of these scored again, with the same result"]
    return f"reference: {', '.join(said)}"


# --- what a run remembers ---------------------------------------------------------------------------------


def memory_of(key: Key) -> dict[str, Any]:
    """Return the identity of the reference as a checkpoint stores it."""
    return {"digest": key.digest, "components": key.components}


def check_same_reference(
    where: Path, held: Mapping[str, Any] | None, key: Key, folder: Path, say: Say
) -> None:
    """Check that the reference is the one that training began with. held: what the checkpoint `where` stores
    about it, None at a fresh start; then a difference from the last start in the run's folder is only
    reported. Raises CheckpointError where the reference is another than the checkpoint's, naming what
    differs."""
    if held is not None:
        others = _others(held, key)
        if others:
            raise CheckpointError(
                f"{where} was trained against another reference: {'; '.join(others)}. Put it back, or choose "
                "another name for a new run."
            )
        return
    last = _read(folder / MEMORY)
    others = _others(last, key) if last is not None else []
    if others:
        say(f"reference: another than at the last start in {folder}: {'; '.join(others)}")


def remember(folder: Path, key: Key, store: Path | None = None) -> None:
    """Write the run's reference.json. Raises StorageError."""
    path = folder / MEMORY
    try:
        with atomic_write(path) as out:
            where = {"store": str(store)} if store is not None else {}
            out.write(json.dumps(where | memory_of(key), indent=1).encode())
    except OSError as error:
        raise write_error(path, error) from None


def _others(held: Mapping[str, Any], key: Key) -> list[str]:
    then: Components = held.get("components", {})
    return (
        differences(then, json.loads(json.dumps(key.components))) if held.get("digest") != key.digest else []
    )


def _read(path: Path) -> Mapping[str, Any] | None:
    found = cached_json(path)
    return found if isinstance(found, dict) else None
