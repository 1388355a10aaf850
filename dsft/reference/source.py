"""Open a run's reference, of whichever of the three kinds, and fill its log-probabilities into
micro-batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsft.checkpoint.read import CheckpointReader
from dsft.engine.api import Engine
from dsft.engine.world import World
from dsft.errors import CheckpointError
from dsft.inputs import Inputs
from dsft.model.policy import Policy
from dsft.plan.reference import dpo_of, reference_line, reference_model
from dsft.reference.check import DriftCheck
from dsft.reference.key import Key, differences, key_of
from dsft.reference.model import open_reference, proven
from dsft.reference.precomputed import PrecomputedReference, precompute
from dsft.reference.refer import Refer, refer_to_engine, refer_to_start, unchanged
from dsft.spec.schema import Spec
from dsft.system.files import atomic_write, write_error

Log = Callable[[str], None]
FILE = "reference.json"
"""File in a run's folder that identifies the run's reference."""


@dataclass(frozen=True)
class RunReference:
    """A run's reference. refers: one Refer per dataset, data.train first, then each held-out set; key: its
    identity; drift_check: checks at the end of the run that it is still the same; is_stored: the values come
    from a store, so they can be looked up ahead of a step, in any thread."""

    refers: Sequence[Refer]
    key: Key
    drift_check: DriftCheck
    is_stored: bool = False

    @property
    def ahead(self) -> Refer:
        """The Refer to apply to training micro-batches while they are prefetched."""
        return self.refers[0] if self.is_stored else unchanged

    @property
    def now(self) -> Refer:
        """The Refer to apply right before a training step; a collective."""
        return unchanged if self.is_stored else self.refers[0]


@dataclass(frozen=True)
class RunStart:
    """The starting point of a run: its folder, and the checkpoint that it resumes from."""

    folder: Path
    checkpoint: CheckpointReader | None
    log: Log

    def check(self, key: Key) -> None:
        """Raise CheckpointError where the checkpoint was trained against another reference, naming what
        differs."""
        if self.checkpoint is None:
            return
        then = self.checkpoint.state.get("reference") or key.as_json()
        if then.get("digest") == key.digest:
            return
        changes = differences(then.get("components", {}), json.loads(json.dumps(key.components)))
        if changes:
            raise CheckpointError(
                f"{self.checkpoint.path} was trained against another reference: {'; '.join(changes)}. Put it "
                "back, or choose another name for a new run."
            )

    def record(self, key: Key, store: Path | None = None) -> None:
        """Write the run's reference.json. Raises StorageError."""
        content = ({"store": str(store)} if store is not None else {}) | key.as_json()
        try:
            with atomic_write(self.folder / FILE) as out:
                out.write(json.dumps(content, indent=1).encode())
        except OSError as error:
            raise write_error(self.folder / FILE, error) from None


def store_of(
    spec: Spec, inputs: Inputs, world: World, micro_batch_size: int, start: RunStart
) -> PrecomputedReference:
    """Return the values of the store, after scoring those that it lacks. A collective, before the policy is
    built. Some stored values are scored once more, unless `check_start` compares them with the policy."""
    recheck = start.checkpoint is not None or dpo_of(spec).reference_model is not None
    found = precompute(
        spec, micro_batch_size, inputs, world, start.log, recheck=recheck, check_key=start.check
    )
    world.first(lambda: start.record(found.key, found.folder))
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
        drift_check = world.each(lambda: DriftCheck.of_files(spec, stored.key))
        return RunReference(stored.refers, stored.key, drift_check, is_stored=True)
    start.log(reference_line(spec))

    def checked_key() -> Key:
        key = key_of(spec, reference_model(spec), inputs)
        start.check(key)
        start.record(key)
        return key

    key = world.first(checked_key)
    sets = 1 + len(inputs.held_out)
    if dpo_of(spec).reference == "adapter":
        live = refer_to_start(policy, engine, spec)
    else:
        opened = open_reference(spec, inputs.facts, world)
        for line in proven(opened, spec, inputs, world):
            start.log(f"reference: {line}")
        live = refer_to_engine(opened.engine)
    return RunReference([live.refer] * sets, key, DriftCheck.of_weights(live))
