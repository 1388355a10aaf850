"""The reference out of a store: takes the log-probabilities of a dataset's pairs, gives a Refer that looks
them up. On the host, for any thread."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dsft.reference.api import Refer, WithReference


def look_up(logps: NDArray[np.float64]) -> Refer:
    """logps: (n, 2) of all pairs of one dataset. Its micro-batches are filled when they are asked for."""
    held = torch.from_numpy(logps)
    return lambda micro_batches: WithReference(micro_batches, lambda _, pairs: held[pairs.ids])
