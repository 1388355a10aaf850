"""Compute attention of rows whose tokens are split over the ranks of a group (DeepSpeed-Ulysses, Jacobs et
al. 2023, arXiv 2309.14509): before it each rank exchanges its tokens of all heads for all tokens of its share
of the heads, and after it the other way round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

SPLIT = "_split"
"""Suffix of an attention function's name that computes rows split over ranks."""

Attention = Callable[..., tuple[Tensor, None]]


class Exchange(Protocol):
    """Exchanges tensors with the other ranks of a group. size: number of ranks; number: of this rank."""

    @property
    def size(self) -> int: ...
    @property
    def number(self) -> int: ...

    def to_heads(self, *tokens: Tensor) -> list[Tensor]:
        """Each (1, heads, tokens of this rank, D) -> (1, heads ÷ size, tokens of the whole row, D), in one
        collective for all; their heads and D may differ. Differentiable, with one collective back."""
        ...

    def to_tokens(self, heads: Tensor) -> Tensor:
        """(1, tokens of the whole row, heads ÷ size, D) -> (1, tokens of this rank, heads, D);
        differentiable."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors; without gradients."""
        ...


def split_attention(attend: Attention, exchange: Exchange) -> Attention:
    """Return `attend`, a function of FUNCTIONS, for tensors that have only this rank's tokens. The number of
    the query's heads must be a multiple of `exchange.size`; keys and values with fewer heads, or with a
    number that it does not divide, are repeated before they are sent."""

    def attend_split(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        repeats = math.lcm(key.shape[1], exchange.size) // key.shape[1]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        query, key, value = exchange.to_heads(query, key, value)
        output, _ = attend(module, query, key, value, attention_mask, **arguments)
        return exchange.to_tokens(output), None

    return attend_split
