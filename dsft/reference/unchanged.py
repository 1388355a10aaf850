"""The proof that a run's reference is at the end what it was at the start: takes what it is held in.

Of an engine the weights that each rank holds; of a store the files that were scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dsft.engine.world import World
from dsft.errors import CheckpointError
from dsft.plan.reference import reference_model
from dsft.reference.api import Held
from dsft.reference.key import files_of
from dsft.spec.schema import Spec

PIECE = 2**24  # elements that are copied to the host at a time


class Unchanged:
    """What a digest was when this was made, and what it is whenever that is asked for."""

    def __init__(self, what: str, digest: Callable[[], Any]) -> None:
        """digest: local; raises MissingInputError where files are no longer there."""
        self._what, self._digest, self._then = what, digest, digest()

    @classmethod
    def of_weights(cls, held: Held) -> Unchanged:
        """Before the first step."""
        return cls("weights, on every rank,", lambda: weights_digest(held.weights()))

    @classmethod
    def of_files(cls, spec: Spec) -> Unchanged:
        """Those of a precomputed reference; of a fresh one there are none, and it follows from the spec."""
        return cls("files", lambda: files_of(spec, reference_model(spec)))

    def prove(self, world: World) -> str:
        """A collective. A line that says so. Raises CheckpointError on every rank where it is another, and
        MissingInputError where files are gone."""
        same = world.gather(world.each(self._digest) == self._then)
        others = [rank for rank, is_same in enumerate(same) if not is_same]
        if others:
            raise CheckpointError(
                f"the reference has changed during the run: its {self._what} are not what they were at the "
                f"start (rank(s) {others}), so the policy was held against several models; nothing is "
                "exported. Put the reference back and start again."
            )
        return f"reference: its {self._what} are what they were at the start"


def weights_digest(tensors: Iterable[Tensor]) -> str:
    """sha256 over the bytes of all, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        for piece in torch.split(tensor.detach().reshape(-1), PIECE):
            digest.update(piece.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
