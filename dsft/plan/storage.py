"""Describe how a parameter is stored in memory: for the census, the plan and the reader of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dsft.spec.schema import QuantizedForm

FP32 = 4  # bytes of an element

Form = Literal["plain"] | QuantizedForm
"""How a parameter is stored: plain, in the type that the model computes in; else in 4 bits (model.quantize).
"""

BLOCK, SCALES = 64, 256
"""Elements that share a scale in 4 bits, and scales that share one of their own: bitsandbytes' defaults."""

DEQUANTIZED_AT_ONCE = 1 << 26
"""Most elements of experts in 4 bits that are dequantized by one call; their bytes are copied for it."""

MOMENT_BLOCK, MOMENT_LEAST = 256, 4096
"""Elements that share a scale in moments of 8 bits (optim.name: adamw_8bit), and the fewest elements of a
parameter whose moments have 8 bits; those of smaller ones have 32: bitsandbytes' defaults."""


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
    """What a parameter is stored as. precision: a value of train.precision, in which the model computes;
    matrices: number of matrices that are quantized separately, such as the experts of a mixture."""

    precision: str
    form: Form = "plain"
    matrices: int = 1

    def tensors(self, numel: int) -> tuple[Stored, ...]:
        """Return the tensors that hold a parameter of `numel` elements."""
        size = width(self.precision)
        if self.form != "plain":
            numel = self.matrices * sum(packed_bytes(numel // self.matrices)) // size
        return (Stored(numel, size),)


def packed_bytes(numel: int) -> tuple[int, int, int, int]:
    """Return the bytes of `numel` elements in 4 bits: of their values, 4 bits each; of their scales, 8 bits
    each, padded so that the rest is aligned; of the scales' scales, and of their offset, in float32."""
    values, scales = -(-numel // 2), -(-numel // BLOCK)
    return values, scales + -(values + scales) % FP32, FP32 * -(-scales // SCALES), FP32


def width(precision: str) -> int:
    """Return the bytes of an element in this train.precision."""
    return FP32 if precision == "fp32" else 2
