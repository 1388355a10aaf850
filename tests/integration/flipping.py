"""`dsft/train.py`, but on one rank one bit of one tensor of the policy is flipped before a step.

flipping.py RANK TENSOR STEP SPEC [key=value …]    TENSOR "-": nothing is flipped
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import dsft.run.trainer
from dsft.engine.api import Engine
from dsft.run.loop import fit
from dsft.train import main

rank, name, at, *arguments = sys.argv[1:]


class Flipping:
    """An engine in whose policy a bit is flipped before step `at`."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._steps = engine, 0

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._engine, attribute)

    def step(self, *given: Any) -> Any:
        self._flip()
        return self._engine.step(*given)

    def first_step(self, *given: Any) -> Any:
        self._flip()
        return self._engine.first_step(*given)

    def _flip(self) -> None:
        self._steps += 1
        if self._steps == int(at) and os.environ["RANK"] == rank:
            tensor = self._engine.replicated()[name].data.view(-1)
            words = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
            words[len(words) // 2] ^= 1 << 12


def flipping_fit(engine: Engine, *given: Any) -> Any:
    return fit(Flipping(engine), *given)  # type: ignore[arg-type]


if __name__ == "__main__":
    if name != "-":
        dsft.run.trainer.fit = flipping_fit
    sys.exit(main(arguments))
