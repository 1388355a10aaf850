"""Open a run's reference, of whichever of the three kinds, and fill its log-probabilities into
micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.checkpoint.read import CheckpointReader
from dsft.engine.api import Engine
from dsft.engine.world import World
from dsft.inputs import Inputs
from dsft.model.policy import Policy
from dsft.plan.reference import dpo_of, reference_line, reference_model
from dsft.reference.check import DriftCheck
from dsft.reference.key import Key, key_of
from dsft.reference.model import open_reference, proven
from dsft.reference.precomputed import (
    PrecomputedReference,
    check_same_reference,
    memory_of,
    precompute,
    remember,
)
from dsft.reference.refer import Refer, as_it_is, refer_to_engine, refer_to_start
from dsft.spec.schema import Spec

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunReference:
    """A run's reference. refers: one Refer per dataset, data.train first, then each held-out set; key: its
    identity; unchanged: checks at the end of the run that it is still the same; is_stored: the values come
    from a store, so they can be looked up ahead of a step, in any thread."""

    refers: Sequence[Refer]
    key: Key
    unchanged: DriftCheck
    is_stored: bool = False

    @property
    def memory(self) -> Mapping[str, Any]:
        """The identity of the reference, as a checkpoint stores it."""
        return memory_of(self.key)

    @property
    def ahead(self) -> Refer:
        """The Refer to apply to training micro-batches while they are prefetched."""
        return self.refers[0] if self.is_stored else as_it_is

    @property
    def now(self) -> Refer:
        """The Refer to apply right before a training step; a collective."""
        return as_it_is if self.is_stored else self.refers[0]


@dataclass(frozen=True)
class RunStart:
    """The starting point of a run: its folder, and the checkpoint that it resumes from."""

    folder: Path
    checkpoint: CheckpointReader | None
    say: Say

    def check(self, key: Key) -> None:
        """Raise CheckpointError where the run began with another reference."""
        held = self.checkpoint.state.get("reference") if self.checkpoint is not None else None
        where = self.checkpoint.path if self.checkpoint is not None else self.folder
        check_same_reference(where, held, key, self.folder, self.say)

    def checked(self, spec: Spec, inputs: Inputs) -> Key:
        """Return the key of a reference without a store, checked and written to the run's folder. Raises as
        `check` and `key_of`."""
        key = key_of(spec, reference_model(spec), inputs)
        self.check(key)
        remember(self.folder, key)
        return key


def store_of(
    spec: Spec, inputs: Inputs, world: World, micro_batch_size: int, start: RunStart
) -> PrecomputedReference:
    """Return the values of the store, after scoring those that it lacks. A collective, before the policy is
    built."""
    again = start.checkpoint is not None or dpo_of(spec).reference_model is not None  # else the policy scores
    found = precompute(spec, micro_batch_size, inputs, world, start.say, again=again, known=start.check)
    world.first(lambda: remember(start.folder, found.key, found.folder))
    return found


def source_of(
    spec: Spec,
    inputs: Inputs,
    world: World,
    policy: Policy,
    engine: Engine,
    stored: PrecomputedReference | None,
    start: RunStart,
) -> RunReference:
    """Open the reference. A collective, before any step or checkpoint has changed the policy. Raises
    CheckpointError where the run began with another reference."""
    if stored is not None:
        unchanged = world.each(lambda: DriftCheck.of_files(spec, stored.key))
        return RunReference(stored.refers, stored.key, unchanged, is_stored=True)
    start.say(reference_line(spec))
    key = world.first(lambda: start.checked(spec, inputs))
    sets = 1 + len(inputs.held_out)
    if dpo_of(spec).reference == "adapter":
        held = refer_to_start(policy, engine, spec)
    else:
        live = open_reference(spec, inputs.facts, world)
        for line in proven(live, spec, inputs, world):
            start.say(f"reference: {line}")
        held = refer_to_engine(live.engine)
    return RunReference([held.refer] * sets, key, DriftCheck.of_weights(held))
