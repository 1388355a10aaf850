"""Describe how a parameter is stored in memory: for the census, the plan and the reader of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FP32 = 4  # bytes of an element

Form = Literal["plain"]
"""How a parameter is stored: plain, one tensor in the type that the model computes in."""


class Stored(NamedTuple):
    """A tensor in memory: its number of elements, and the bytes of each."""

    numel: int
    width: int

    @property
    def bytes(self) -> int:
        return self.numel * self.width

    def shard(self, ranks: int) -> Stored:
        """Return the share of one of `ranks` ranks; all shares are padded to the same size."""
        return Stored(-(-self.numel // ranks), self.width)


@dataclass(frozen=True)
class Storage:
    """What a parameter is stored as. precision: a value of train.precision, in which the model computes."""

    precision: str
    form: Form = "plain"

    def tensors(self, numel: int) -> tuple[Stored, ...]:
        """Return the tensors that hold a parameter of `numel` elements."""
        return (Stored(numel, width(self.precision)),)


def width(precision: str) -> int:
    """Return the bytes of an element in this train.precision."""
    return FP32 if precision == "fp32" else 2
