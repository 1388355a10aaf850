"""Decide by the lengths of a micro-batch's segments, which the host knows, how attention is called: with
which bound of their lengths, and whether as rows of one length. Never waits for a device."""

from __future__ import annotations

from dsft.data.steps.batch import Segments

SHORTEST = 128
"""The least bound of a segment's length: FlashAttention computes blocks of 64 to 128 queries."""
BOUNDS = 6
"""The largest number of different bounds."""
MULTIPLE = 256
"""Rows of one length go through cuDNN where it is a multiple of this, or data.max_length: cuDNN builds a plan
for each shape, and shapes of any other length would hardly occur twice."""
PLANS = 16
"""The largest number of shapes (rows, tokens) for which cuDNN builds plans, 20 to 70 ms each."""


class SegmentShapes:
    """How attention is called for the segments of a micro-batch. with_cudnn: rows of one length go through
    cuDNN."""

    def __init__(self, max_length: int, with_cudnn: bool = False) -> None:
        """max_length: the most tokens of a segment, with those of the prompt that it continues."""
        self._max_length, self._with_cudnn = max_length, with_cudnn
        self._lowest = max(SHORTEST, _power_of_two(max_length) >> BOUNDS - 1)
        self._planned = set[tuple[int, int]]()

    def bound(self, longest: int) -> int:
        """Return the bound for a micro-batch whose longest segment has `longest` tokens: that rounded up to a
        power of two of at least SHORTEST, at most max_length. There are at most BOUNDS of them."""
        return max(longest, min(max(self._lowest, _power_of_two(longest)), self._max_length))

    def planned(self, rows: int, length: int) -> bool:
        """Return whether `rows` rows of `length` tokens go through cuDNN: the first PLANS shapes do, whenever
        they occur."""
        if not self._with_cudnn or length % MULTIPLE and length != self._max_length:
            return False
        if len(self._planned) < PLANS:
            self._planned.add((rows, length))
        return (rows, length) in self._planned

    def is_rows(self, segments: Segments) -> bool:
        """Return whether segments are rows for cuDNN: of one length, and none continues a prompt."""
        lengths = segments.lengths
        same = len(set(lengths)) == 1 and not any(segments.starts or ())
        return same and self.planned(len(lengths), lengths[0])


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
