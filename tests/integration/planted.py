"""`dsft/train.py`, with a fault: planted.py FAULT SPEC [key=value …]"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dsft.checkpoint.read import CheckpointReader
from dsft.data.render import masks
from dsft.data.steps import collate, steps
from dsft.data.steps.batch import NO_TARGET, MicroBatch, Segments
from dsft.engine import optimizer, zero
from dsft.objective import preference
from dsft.run import trainer
from dsft.train import main


def mean_of_micro_batches() -> None:
    """Divide each micro-batch's loss by its own count, and take the mean over them."""
    step, sums = zero.ZeroEngine.step, zero.ZeroEngine._sums

    def stepped(
        self: zero.ZeroEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], rate: float
    ) -> Any:
        self.whole = counts["tokens"] / len(batches) / self._world.layout.data_parallel  # type: ignore[attr-defined]
        return step(self, batches, counts, rate)

    def summed(self: zero.ZeroEngine, batch: MicroBatch) -> torch.Tensor:
        own = int((batch.tokens.targets != NO_TARGET).sum())
        return sums(self, batch) * self.whole / max(1, own)  # type: ignore[attr-defined]

    zero.ZeroEngine.step, zero.ZeroEngine._sums = stepped, summed  # type: ignore[assignment]


def mask_off_by_one() -> None:
    targets_of = collate.targets_of
    collate.targets_of = lambda example: targets_of(  # type: ignore[assignment]
        replace(example, trained=np.roll(example.trained, 1))
    )


def packing_leak() -> None:
    """Let all examples of a packed row attend to those before them."""
    packed = steps.collate_packed

    def leaking(*args: Any) -> MicroBatch:
        batch = packed(*args)
        return replace(batch, segments=batch.segments and Segments((sum(batch.segments.lengths),)))

    steps.collate_packed = leaking  # type: ignore[assignment]


def rate_one_step_early() -> None:
    rate = trainer.learning_rate
    trainer.learning_rate = lambda optim, step, total: rate(optim, step + 1, total)  # type: ignore[assignment]


def beta_squared() -> None:
    margin = preference.margin
    preference.margin = lambda scores, dpo: dpo.beta * margin(scores, dpo)  # type: ignore[assignment]


def decay_of_norms() -> None:
    optimizer.is_matrix = lambda name, shape: True  # type: ignore[assignment]


def no_end_of_turn() -> None:
    """Train on answers without the token that ends them, in the run and in what the loop is given."""
    builder: Any = masks.MaskBuilder
    ends = builder.mask

    def without(self: Any, conversation: Any) -> Any:
        found = ends(self, conversation)
        spans = [span._replace(stop=span.stop - len("<|im_end|>")) for span in found.spans]
        return found._replace(spans=spans)

    builder.mask = without


def moments_are_lost() -> None:
    """Begin again with moments of 0 after a resume."""
    read = CheckpointReader.read

    def forgetful(self: CheckpointReader, name: str, kind: Any, start: int, stop: int) -> torch.Tensor:
        found = read(self, name, kind, start, stop)
        return found if kind == "value" else torch.zeros_like(found)

    CheckpointReader.read = forgetful  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        mean_of_micro_batches, mask_off_by_one, packing_leak, rate_one_step_early, beta_squared,
        decay_of_norms, no_end_of_turn, moments_are_lost,
    )
}  # fmt: skip

if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    FAULTS[fault]()
    sys.exit(main(arguments))
