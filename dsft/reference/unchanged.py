"""The proof that a run's reference is at the end what it was at the start: takes what it is held in.

Of an engine the weights that each rank holds; of a store the files that were scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dsft.data.cache.store import DIGESTS, cache_folder
from dsft.engine.world import World
from dsft.errors import CheckpointError, DsftError
from dsft.plan.reference import reference_model
from dsft.reference.api import Held
from dsft.reference.key import digests, paths_of
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
        """Those of a precomputed reference, wherever its hub id leads later; of a fresh one there are none,
        and it follows from the spec."""
        weights, adapter = paths_of(reference_model(spec))
        memory = cache_folder(spec) / DIGESTS
        what = "files" if weights or adapter else "config and seed"
        return cls(what, lambda: (digests(weights, memory), digests(adapter, memory)))

    def proof(self, world: World) -> str | DsftError:
        """A collective. A line that says so; or the error, the same on every rank, where it is another or its
        files are gone: to be raised once the run's end is saved."""
        try:
            same = world.gather(world.each(self._digest) == self._then)
        except DsftError as error:
            return error
        others = [rank for rank, is_same in enumerate(same) if not is_same]
        if others:
            return CheckpointError(
                f"the reference has changed during the run: its {self._what} are not what they were at the "
                f"start (rank(s) {others}); the last checkpoint is saved, nothing is exported. dsft export "
                "makes a model of it whose card says so; or put the reference back and train again."
            )
        return f"reference: its {self._what} are what they were at the start"


def weights_digest(tensors: Iterable[Tensor]) -> str:
    """sha256 over the bytes of all, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        for piece in torch.split(tensor.detach().reshape(-1), PIECE):
            digest.update(piece.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
