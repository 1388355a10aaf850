"""Values of parameters as they are now, to be put in their place for a while: takes DeepSpeed's engine and
some of its parameters.

Under ZeRO 3 what is remembered is this rank's share, and whatever was gathered from other values is released
on the way in and on the way out. Nothing here changes what the optimizer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsft.errors import Problem, SpecError

Remembered = Callable[[], AbstractContextManager[None]]
"""A context in which the parameters have the remembered values. Without gradients, and no step inside; a
collective under ZeRO 3 in so far as what was gathered is gathered again."""


def remember(engine: Any, parameters: Iterable[nn.Parameter]) -> Remembered:
    """Raises SpecError where ZeRO 3 computes with other copies than those that it is said to hold."""
    homes = [_home(parameter) for parameter in parameters]
    copies = [home.detach().clone() for home in homes]
    sharded = engine.zero_optimization_stage() == 3
    if sharded and (engine.zero_hpz_partition_size() > 1 or engine.zero_quantized_weights()):
        message = (
            "'adapter' does not go with zero_hpz_partition_size over 1 or zero_quantized_weights, which keep "
            "copies of their own; use live or precomputed"
        )
        raise SpecError("The reference cannot be computed.", [Problem("dpo.reference", message)])

    @contextmanager
    def in_place() -> Iterator[None]:
        if sharded:
            engine.optimizer.empty_partition_cache()
        _exchange(homes, copies)
        try:
            yield
        finally:
            if sharded:
                engine.optimizer.empty_partition_cache()
            _exchange(homes, copies)

    return in_place


def _home(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of it, whatever is gathered."""
    home: Tensor = getattr(parameter, "ds_tensor", parameter)
    return home


@torch.no_grad()
def _exchange(homes: list[Tensor], copies: list[Tensor]) -> None:
    """The memory of one for that of the other; no element is copied."""
    for index, home in enumerate(homes):
        home.data, copies[index] = copies[index], home.data
