"""The reference out of a store that is made where it is not there: takes a spec and its inputs, gives what
looks it up.

The pass is of other processes (`children`), which end before this one builds anything: it never holds the
reference. Of several jobs that need the same store at once, one makes it and the others wait for its lock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsft.engine.world import World
from dsft.errors import CheckpointError, LockedError, StorageError
from dsft.inputs import Inputs
from dsft.launch.environment import Launched
from dsft.plan.reference import dpo_of, reference_line, reference_model
from dsft.reference import store
from dsft.reference.api import Refer
from dsft.reference.children import End, PortTakenError, run_children
from dsft.reference.key import Components, Key, differences, key_of
from dsft.reference.lookup import look_up
from dsft.reference.passes import Pass
from dsft.reference.store import Stored
from dsft.report.making import shown
from dsft.spec.schema import Spec
from dsft.system.files import atomic_write, cached_json, write_error
from dsft.system.host import free_port
from dsft.system.lock import hold, holder

T = TypeVar("T")
Say = Callable[[str], None]
MEMORY = "reference.json"
"""In a run's folder: what its reference was."""
_PORTS = 3  # that are tried
_WAIT = 1.0  # seconds between two looks at a lock that another job holds


class Processes:
    """Those that start children together: the ranks of a run, or `dsft reference` alone."""

    def __init__(self, world: World | None, launched: Launched, count: int = 1) -> None:
        """world: None: this process starts `count` children on this host."""
        self._world, self._launched, self._count = world, launched, count
        self.is_first = world is None or world.rank == 0

    def first(self, work: Callable[[], T]) -> T:
        return work() if self._world is None else self._world.first(work)

    def gather(self, mine: Sequence[End]) -> Sequence[Sequence[End]]:
        return [mine] if self._world is None else self._world.gather(mine)

    def places(self) -> list[Launched]:
        """Of this process's children, in a group of their own: it meets at a port of rank 0's host that was
        free just now."""
        port = self.first(free_port)
        if self._world is not None:
            return [replace(self._launched, master_port=port)]
        count = self._count
        return [Launched("dsft", rank, count, rank, "127.0.0.1", port) for rank in range(count)]


@dataclass(frozen=True)
class Precomputed:
    """key: what the log-probabilities are of; logps: (n, 2) of each dataset, that of training first."""

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
    processes: Processes,
    say: Say,
    *,
    again: bool,
    known: Callable[[Key], None] = lambda key: None,
) -> Precomputed:
    """A collective of the processes. again: pairs that are there already are scored once more, by children;
    known: is called with the key before anything is scored, and may refuse it.

    Raises CheckpointError where dpo.reference_store holds another reference's, or the store says other than
    the reference does; StorageError where it cannot be written or read; what a child raised.
    """
    say(reference_line(spec))
    key = processes.first(lambda: key_of(spec, reference_model(spec), inputs))
    processes.first(lambda: known(key))
    folder = store.store_folder(spec, key)
    sizes = [len(inputs.train), *(len(one.data) for one in inputs.held_out)]

    def read(tell: Say) -> Stored:
        return store.read(folder, key, sizes, tell)

    def look(tell: Say = lambda text: None) -> tuple[int, int]:
        store.check(folder, key, tell)
        missing = read(tell).num_missing
        return missing, sum(sizes) - missing

    asked = Pass(spec, key, folder, micro_batch_size, dpo_of(spec).recheck_rows if again else 0)
    with ExitStack() as held:
        missing, there = processes.first(look)
        if missing:
            _take(folder, processes, held, say)
            missing, there = processes.first(lambda: look(say))
        if missing:
            processes.first(lambda: store.prepare(folder, key))
        if missing or (there and asked.num_again):
            began = time.monotonic()
            _score(asked, processes, say)
            say(_done(missing, there, asked.num_again, time.monotonic() - began))
    processes.first(lambda: store.check(folder, key, say))
    found = processes.first(lambda: read(lambda text: None))
    if found.num_missing:
        raise StorageError(
            f"{folder} lacks {found.num_missing:,} of {sum(sizes):,} pairs that were written just now; set "
            "dpo.reference_store to a sound disk that all hosts share."
        )
    say(f"reference: the log-probabilities of {sum(sizes):,} pairs are in {folder}")
    return Precomputed(key, folder, found.logps)


def _score(asked: Pass, processes: Processes, say: Say) -> None:
    for left in reversed(range(_PORTS)):
        try:
            with shown(say, first=processes.is_first) as tell:
                run_children(asked, processes.places(), processes.gather, say, tell)
            return
        except PortTakenError:
            if not left:
                raise


def _take(folder: Path, processes: Processes, held: ExitStack, say: Say) -> None:
    """Be the one that makes the store; where another job does, wait for it."""

    def attempt() -> str | None:
        try:
            held.enter_context(hold(folder, store.LOCK, "dpo.reference_store"))
        except LockedError:
            time.sleep(_WAIT)
            return holder(folder, store.LOCK)
        return None

    waiting = False
    while (who := processes.first(attempt)) is not None:
        if not waiting:
            say(f"reference: {who} scores the same pairs; waiting for it")
        waiting = True


def _done(scored: int, there: int, again: int, seconds: float) -> str:
    said = [f"{scored:,} pairs scored in {seconds:.1f} s"] if scored else []
    if there:
        said += [f"{there:,} were there"]
    if there and again:
        said += [f"{min(there, again)} of these scored again, with the same result"]
    return f"reference: {', '.join(said)}"


# --- what a run remembers ---------------------------------------------------------------------------------


def memory_of(key: Key) -> dict[str, Any]:
    """What a checkpoint says of its reference."""
    return {"digest": key.digest, "components": key.components}


def check_same_reference(
    where: Path, held: Mapping[str, Any] | None, key: Key, folder: Path, say: Say
) -> None:
    """held: what the checkpoint `where` says, None at a fresh start, where the run's folder may have its last
    start's. Raises CheckpointError where training would go on against another reference, naming what
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
