"""KTO (kto): single answers, each labeled desirable or undesirable.

The loss compares each answer with an estimate of how far the policy is from its reference, to which all
examples of a step contribute. Before a step all ranks score their share of its mismatched answers without
gradients, the sums are added up over all ranks, and the mean goes into each micro-batch as a constant. So the
loss does not depend on how the step is divided into micro-batches, ranks and pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dsft.data.sets.dataset import Dataset
from dsft.data.sets.mismatched import of_set, of_steps
from dsft.data.steps.batch import Annotate, GlobalStep, LazyMicroBatches, MicroBatch
from dsft.data.steps.steps import micro_batches_of
from dsft.dist.world import World
from dsft.engine.api import Engine
from dsft.objective.answers import answer_logps
from dsft.setup.inputs import Inputs
from dsft.setup.run import Run
from dsft.spec.schema import Kto, Spec
from dsft.tasks.api import Annotator, section
from dsft.tasks.referenced import Referenced, References


class LabeledAnswers(Referenced):
    def beta(self, spec: Spec) -> float:
        return section(spec, Kto).beta

    def also_scored(self, spec: Spec, inputs: Inputs, global_batch_size: int) -> Sequence[Dataset]:
        """Return the mismatched answers of all steps, then of each held-out set."""
        if not section(spec, Kto).has_baseline:
            return ()
        length, steps = spec.data.max_length, inputs.total_steps
        trained = of_steps(inputs.train, global_batch_size, spec.train.seed, steps, length)
        return trained, *(of_set(one.data, length) for one in inputs.held_out)

    def annotator_of(self, found: References, run: Run, inputs: Inputs, engine: Engine) -> Annotator:
        """Fill in the estimate beside the reference's values."""
        if not inputs.also_scored:
            return super().annotator_of(found, run, inputs, engine)
        base, world, pairs, refer = found.annotator(), run.world, inputs.also_scored, found.also

        def batches(which: int, first: int, count: int) -> Sequence[MicroBatch]:
            """Return this rank's share of `count` pairs of a set, from the one with number `first`."""
            ids = np.arange(first, first + count)
            return micro_batches_of(pairs[which], ids, run.batch, world.data_rank, inputs.pad_id)

        def ahead(step: GlobalStep) -> GlobalStep:
            others = batches(0, step.examples_before, len(step.example_ids))
            if found.prefetched:
                others = refer[0](others)
            return replace(base.ahead(step), estimate_batches=tuple(others))

        def now(step: GlobalStep) -> GlobalStep:
            step = base.now(step)
            others = step.estimate_batches if found.prefetched else refer[0](step.estimate_batches)
            kl = divergence(others, len(step.example_ids), engine, world)
            return replace(step, micro_batches=tuple(with_kl(batch, kl) for batch in step.micro_batches))

        def of_held_out(which: int) -> Annotate:
            def annotate(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
                known, count = base.held_out[which](micro_batches), len(pairs[1 + which])
                others = refer[1 + which](batches(1 + which, 0, count))
                kl = divergence(others, count, engine, world)
                return LazyMicroBatches(len(known), lambda number: with_kl(known[number], kl))

            return annotate

        held_out = [of_held_out(which) for which in range(len(inputs.held_out))]
        return Annotator(held_out, ahead, now, found.identity)

    def for_probe(self, spec: Spec, micro_batch: MicroBatch) -> MicroBatch:
        return with_kl(super().for_probe(spec, micro_batch), torch.zeros((), dtype=torch.float64))


def divergence(micro_batches: Sequence[MicroBatch], count: int, engine: Engine, world: World) -> Tensor:
    """Return max(0, Σ (log π - log π_ref) ÷ count) over the mismatched answers of all ranks, () float64 on
    the device. micro_batches: of this rank, with the reference's values. A collective."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    # a rank without the last stage has no scores
    for logps, micro_batch in zip(engine.score(micro_batches, answer_logps), micro_batches, strict=False):
        answers = micro_batch.answers
        assert answers is not None and answers.reference is not None, "mismatched answers with a reference"
        total += (logps - answers.reference.to(world.device)).sum()
    return (world.sum(total if world.sequence_rank == 0 else torch.zeros_like(total)) / count).clamp(min=0)


def with_kl(micro_batch: MicroBatch, kl: Tensor) -> MicroBatch:
    answers = micro_batch.answers
    assert answers is not None, "a micro-batch of labeled answers"
    return replace(micro_batch, answers=replace(answers, kl=kl))
