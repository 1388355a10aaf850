"""Values of parameters as they are now, to be put in their place for a while: takes DeepSpeed's engine and
some of its parameters.

Under ZeRO 3 what is remembered is this rank's share, and whatever was gathered from other values is released
on the way in and on the way out. Nothing here changes what the optimizer holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Remembered:
    """values: what this rank holds of each parameter, as it was."""

    def __init__(self, engine: Any, parameters: Iterable[nn.Parameter]) -> None:
        self._homes = [home_of(parameter) for parameter in parameters]
        self.values = [home.detach().clone() for home in self._homes]
        self._sharded = engine if engine.zero_optimization_stage() == 3 else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters have the remembered values meanwhile. Without gradients, and no step inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """The memory of one for that of the other; no element is copied."""
        if self._sharded:
            self._sharded.optimizer.empty_partition_cache()
        for index, home in enumerate(self._homes):
            home.data, self.values[index] = self.values[index], home.data


def home_of(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of it, whatever is gathered."""
    home: Tensor = getattr(parameter, "ds_tensor", parameter)
    return home
