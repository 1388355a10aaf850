"""The reference as a second engine beside the policy's: takes a frozen engine."""

from __future__ import annotations

from collections.abc import Sequence

from dsft.data.steps.batch import MicroBatch
from dsft.engine.frozen import Frozen
from dsft.objective.answers import answer_logps
from dsft.reference.api import Held, filled


def refer_to_engine(engine: Frozen) -> Held:
    """Each micro-batch is scored when it is asked about, without gradients and dropout."""

    def refer(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return filled(micro_batches, engine.score(micro_batches, answer_logps))

    return Held(refer, engine.weights)
