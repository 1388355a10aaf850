"""What a run sees of its reference, whichever of the three ways it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsft.data.steps.batch import MicroBatch

Refer = Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]
"""Micro-batches of pairs -> the same with `pairs.reference`. Of a store it only looks them up; of an engine
it is a collective, and ranks without the last stage get theirs back as they were."""
