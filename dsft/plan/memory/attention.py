"""Count what attention needs beside the activations of its matrices: scores, and what split rows send."""

from __future__ import annotations

from dsft.plan.census import Census
from dsft.plan.memory.sizes import compute_bytes
from dsft.plan.storage import FP32
from dsft.spec.schema import Spec

BACKWARD = 0.55
"""Approximate share of a layer's activations that have gradients at once; measured with Llama models and
torch's allocator."""

BYTES_PER_SCORE = 8
"""Bytes that the backward needs of a soft-capped score: its tanh, and the softmax in float32 and, in 16 bits,
in the type of the values."""


def moved_by_split_rows(census: Census, spec: Spec) -> tuple[list[int], int]:
    """Return the elements per token that split rows need in addition: for the backward the output of
    attention as it was computed, for a share of the heads, and repeated keys and values; and the largest
    tensor that attention copies to send it to other ranks."""
    ranks, heads = spec.parallel.sequence_parallel, census.heads
    if ranks == 1 or heads is None:
        return [], 0
    output, added = heads.queries * heads.values, heads.repeated(ranks) - heads.keys
    sent = heads.queries * max(heads.width, heads.values)
    return [output, added * heads.width, added * heads.values], sent


def scores_of(census: Census, spec: Spec, tokens: int) -> tuple[int, int, int]:
    """Return the bytes of attention's scores that the backward of a layer needs, those of their gradients at
    once, and those of a forward without a backward.

    No kernel of torch computes soft-capped ones (attention_loop.py, _attend_softcapped); on a CPU queries are
    in blocks, which see half of the keys. eager has all scores of a row: the softmax in float32, and in 16
    bits a copy of it and of what it is of. tokens: of the rank, which has its share of the heads for all
    tokens of the rows."""
    heads, attention = census.heads, spec.model.attention
    if heads is None or attention.startswith("flash"):
        return 0, 0, 0
    if attention == "eager":
        scores = heads.queries * tokens * (tokens if spec.data.packing else spec.data.max_length)
        width = compute_bytes(spec)
        return scores * (FP32 + width % FP32), scores * 2 * FP32, scores * (2 * FP32 + width)
    if not heads.softcap:
        return 0, 0, 0
    scores = heads.queries * tokens * spec.data.max_length * BYTES_PER_SCORE
    scores //= 2 if spec.is_on_cpu else 1
    return scores, int(scores * BACKWARD), scores
