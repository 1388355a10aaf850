"""Tasks whose loss compares the policy with a frozen reference: precomputed, live or the policy without its
adapter, as the task's section says (`dsft.spec.schema.Reference`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsft.checkpoint.read import CheckpointReader
from dsft.data.steps.batch import Annotate, GlobalStep, MicroBatch, unchanged_step
from dsft.data.steps.steps import TrainSteps, micro_batches_of
from dsft.dist.world import World
from dsft.engine.api import Engine
from dsft.errors import CheckpointError
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy
from dsft.model.weights import Weights
from dsft.plan.reference import reference_line, reference_model, scores_in_training
from dsft.reference.check import NUM_BATCHES, StartCheck, check_start, check_weights, random_ids
from dsft.reference.key import Key, differences, key_of
from dsft.reference.model import OpenReference, open_reference, proven
from dsft.reference.precomputed import PrecomputedReference, precompute
from dsft.reference.refer import adapter_off, refer_to_engine, refer_to_start
from dsft.reference.teacher import ask_for_top, refer_to_teacher
from dsft.report.memory import MemoryFile
from dsft.setup.inputs import Inputs
from dsft.setup.run import Run
from dsft.spec.schema import Spec
from dsft.system.files import atomic_write, write_error
from dsft.tasks.api import Annotator, Model, Task

FILE = "reference.json"
"""File in a run's folder that identifies the run's reference."""


@dataclass(frozen=True)
class References:
    """What fills in the reference's values of data.train, of each held-out set and of each of
    `Inputs.also_scored`.

    identity    that of the reference
    prefetched  values are only looked up. Otherwise each of the functions is a collective
    """

    train: Annotate
    held_out: Sequence[Annotate]
    also: Sequence[Annotate]
    identity: Mapping[str, Any]
    prefetched: bool = False

    def annotator(self) -> Annotator:
        """Return what fills in the values of data.train and of the held-out sets."""

        def fill(step: GlobalStep) -> GlobalStep:
            return replace(step, micro_batches=tuple(self.train(step.micro_batches)))

        ahead, now = (fill, unchanged_step) if self.prefetched else (unchanged_step, fill)
        return Annotator(self.held_out, ahead, now, self.identity)


class Referenced(Task):
    """A task whose annotator fills in `answers.reference`, or what a teacher gives, if the loss needs it."""

    def beta(self, spec: Spec) -> float:
        """Return β: an answer's reward is β times the log-probability that the policy gives it minus that of
        the reference. `start_check` compares rewards with 0."""
        raise NotImplementedError

    def before_policy(self, run: Run, inputs: Inputs, memory: MemoryFile) -> PrecomputedReference | None:
        """Score the answers that the store of a precomputed reference lacks, and return its values. Some
        stored values are scored once more, unless `check_start` compares them with the policy."""
        own = run.spec.reference
        if own is None or scores_in_training(run.spec):
            return None
        memory.enter("reference")
        found = precompute(
            run.spec,
            run.batch.micro_batch_size,
            inputs,
            run.world,
            run.log,
            recheck=run.start is not None or own.reference_model is not None,
            check_key=partial(check_same_reference, run.start),
        )
        run.world.first(lambda: record_reference(run.folder, found.key, found.folder))
        return found

    def annotator(
        self,
        run: Run,
        inputs: Inputs,
        policy: Policy,
        engine: Engine,
        prepared: PrecomputedReference | None,
    ) -> Annotator:
        """Open the reference. Raises CheckpointError where the run began with another one."""
        spec = run.spec
        if spec.reference is None:
            return super().annotator(run, inputs, policy, engine, prepared)
        if prepared is None:
            return self.annotator_of(self._opened(run, inputs, policy, engine), run, inputs, engine)
        run.world.each(lambda: check_weights(spec, prepared.key))
        train, *others = prepared.annotate
        held_out, also = others[: len(inputs.held_out)], others[len(inputs.held_out) :]
        found = References(train, held_out, also, prepared.key.as_json(), prefetched=True)
        return self.annotator_of(found, run, inputs, engine)

    def annotator_of(self, found: References, run: Run, inputs: Inputs, engine: Engine) -> Annotator:
        """Return what fills in the reference's values, and what else the loss needs."""
        return found.annotator()

    def _opened(self, run: Run, inputs: Inputs, policy: Policy, engine: Engine) -> References:
        """Open a reference that scores during training."""
        spec, world = run.spec, run.world
        assert spec.reference is not None, "the loss needs a reference"
        run.log(reference_line(spec))

        def checked_key() -> Key:
            key = key_of(spec, reference_model(spec), inputs)
            check_same_reference(run.start, key)
            record_reference(run.folder, key)
            return key

        key = world.first(checked_key)

        def prove(opened: OpenReference) -> None:
            for line in proven(opened, spec, inputs, world):
                run.log(f"reference: {line}")

        annotate = live_reference(spec, inputs.facts, world, policy, engine, prove)
        held_out, also = ([annotate] * len(sets) for sets in (inputs.held_out, inputs.also_scored))
        return References(annotate, held_out, also, key.as_json())

    def for_probe(self, spec: Spec, micro_batch: MicroBatch) -> MicroBatch:
        """Fill in zeros as the reference's values."""
        answers = micro_batch.answers
        assert answers is not None, "whole answers are compared"
        zeros = torch.zeros(answers.num_targets.shape, dtype=torch.float64)
        return replace(micro_batch, answers=replace(answers, reference=zeros))

    def start_check(self, run: Run, inputs: Inputs, model: Model) -> Iterator[str]:
        """Check on examples of the first step that the untrained policy equals its reference. For a
        precomputed reference, check random examples too, different ones at each start."""
        spec, data_rank, policy = run.spec, run.world.data_rank, model.policy
        own, annotator = spec.reference, model.annotator
        if own is None or not own.is_initial_policy or own.reference_model is not None:
            return
        steps = TrainSteps(inputs.train, run.batch, data_rank, spec.train.seed, inputs.pad_id)
        first = steps.step(0)
        checked = first.micro_batches[:NUM_BATCHES]
        if own.reference == "precomputed":
            ids = run.world.broadcast(random_ids(len(inputs.train), own.recheck_rows))
            if len(ids):
                checked += tuple(micro_batches_of(inputs.train, ids, run.batch, data_rank, inputs.pad_id))
        # One more pass, if they differ; not under ZeRO 3, whose passes must all use the same modules.
        passes = spec.model.lora is not None and spec.parallel.zero_stage < 3
        without_adapter = partial(adapter_off, policy) if passes else None
        annotated = annotator.now(annotator.ahead(replace(first, micro_batches=checked))).micro_batches
        start = StartCheck(spec, self.beta(spec), inputs.train, annotated, inputs.pad_id, without_adapter)
        yield check_start(start, model.engine, policy, run.world)


def live_reference(  # noqa: PLR0913, PLR0917  what a run knows
    spec: Spec, facts: TokenFacts, world: World, policy: Policy, engine: Engine,
    prove: Callable[[OpenReference], None] = lambda opened: None, source: Weights | None = None,
) -> Annotate:  # fmt: skip
    """Return what scores micro-batches while the run trains. A collective. prove: called with a reference
    that has its own engine; source: of its weights, as in `build_model`."""
    assert spec.reference is not None, "the loss needs a reference"
    if spec.reference.reference == "adapter":
        return refer_to_start(policy, engine, spec)
    opened = open_reference(spec, facts, world, source)
    prove(opened)
    if not spec.reference.teacher_keys:
        return refer_to_engine(opened.engine)
    world.each(lambda: ask_for_top(opened.policy, spec, facts))
    return refer_to_teacher(opened.engine)


def check_same_reference(checkpoint: CheckpointReader | None, key: Key) -> None:
    """Raise CheckpointError where the checkpoint that the run resumes from was trained against another
    reference, naming what differs."""
    if checkpoint is None:
        return
    then = checkpoint.state.get("reference") or key.as_json()
    if then.get("digest") == key.digest:
        return
    changes = differences(then.get("components", {}), json.loads(json.dumps(key.components)))
    if changes:
        raise CheckpointError(
            f"{checkpoint.path} was trained against another reference: {'; '.join(changes)}. Put it "
            "back, or choose another name for a new run."
        )


def record_reference(folder: Path, key: Key, store: Path | None = None) -> None:
    """Write the run's reference.json. Raises StorageError."""
    content = ({"store": str(store)} if store is not None else {}) | key.as_json()
    try:
        with atomic_write(folder / FILE) as out:
            out.write(json.dumps(content, indent=1).encode())
    except OSError as error:
        raise write_error(folder / FILE, error) from None
