"""A micro-batch cut short: takes one, gives its first positions."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from dsft.data.steps.batch import MicroBatch, Pairs


def first_part(micro_batch: MicroBatch, length: int) -> MicroBatch:
    """Its first `length` positions. Packed, with the pairs of which both answers have some."""
    lengths, starts, pairs = micro_batch.lengths, micro_batch.starts, micro_batch.pairs
    if lengths is not None:
        lengths = _cut(lengths, length)
        starts = starts and starts[: len(lengths)]
        pairs = pairs and _first_pairs(pairs, len(lengths) // 2)
    return replace(
        micro_batch,
        input_ids=micro_batch.input_ids[:, :length],
        position_ids=micro_batch.position_ids[:, :length],
        targets=micro_batch.targets[:, :length],
        lengths=lengths,
        noise_scale=None if micro_batch.noise_scale is None else micro_batch.noise_scale[:, :length],
        starts=starts,
        pairs=pairs,
    )


def _cut(lengths: tuple[int, ...], total: int) -> tuple[int, ...]:
    """The first segments, the last of them shortened, that make `total` tokens."""
    starts = accumulate(lengths, initial=0)
    return tuple(min(n, total - start) for n, start in zip(lengths, starts, strict=False) if start < total)


def _first_pairs(pairs: Pairs, number: int) -> Pairs:
    reference = pairs.reference if pairs.reference is None else pairs.reference[:number]
    return Pairs(pairs.ids[:number], pairs.num_tokens[:number], reference)
