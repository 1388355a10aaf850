"""That every rank has read the same: takes what each has, raises where they differ."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dsft.engine.world import World
from dsft.errors import WorldError


def prove_same(what: str, mine: Any, world: World) -> None:
    """Every rank must have read the same from its host's disk: else each would train another run, and hang
    where they count other micro-batches. `mine`: JSON values."""
    digests = world.gather(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise WorldError(
            f"{what} is not the same on rank(s) {others} as on rank 0; give all hosts the same files, or put "
            "them on a disk that all hosts share."
        )
