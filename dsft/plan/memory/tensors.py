"""Bytes of the tensors that are in memory at once, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dsft.plan.storage import Stored

MALLOC_KEEPS = 32 << 20
"""Bytes. glibc takes larger blocks from the kernel and returns them as soon as they are freed; smaller blocks
come from its heap and stay with the process when freed (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX)."""


@dataclass(frozen=True)
class Tensors:
    """Bytes of tensors: of those with at most MALLOC_KEEPS bytes, and of larger ones."""

    small: int = 0
    large: int = 0

    def __add__(self, other: Tensors) -> Tensors:
        return Tensors(self.small + other.small, self.large + other.large)

    @property
    def total(self) -> int:
        return self.small + self.large


NONE = Tensors()


def one(size: int) -> Tensors:
    """Return one tensor of `size` bytes."""
    return Tensors(size, 0) if size <= MALLOC_KEEPS else Tensors(0, size)


def each(elements: Iterable[int], width: int) -> Tensors:
    """Return one tensor for each number of elements, with `width` bytes per element."""
    return sum((one(numel * width) for numel in elements), NONE)


def held(stored: Iterable[Stored]) -> Tensors:
    """Return the tensors that hold parameters."""
    return sum((one(tensor.bytes) for tensor in stored), NONE)


Row = Literal[
    "parameters", "copies", "gradients", "master", "moments", "buffers", "activations", "head", "offloaded"
]  # fmt: skip
Phase = Mapping[Row, Tensors]
"""Tensors of one phase by kind; `offloaded` is in host memory, all others are on the device."""


def merged(*phases: Phase) -> dict[Row, Tensors]:
    """Add up phases: the tensors of all of them are in memory at once."""
    found: dict[Row, Tensors] = {}
    for phase in phases:
        for row, tensors in phase.items():
            found[row] = found.get(row, NONE) + tensors
    return found


def total(phase: Phase) -> int:
    return sum(tensors.total for tensors in phase.values())
