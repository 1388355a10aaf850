"""Count the logits that the output layer has in memory at once, by the sizes with which
dsft/model/head.py divides them."""

from __future__ import annotations

from dsft.plan.census import Census
from dsft.plan.memory.sizes import (
    BYTES_PER_LOGIT,
    PLAIN_BYTES_PER_LOGIT,
    SCORED_PARTS,
    compute_bytes,
    fuses,
    gpu_bytes,
    head_chunk,
    in_chunks,
    kept_rows,
    several_tokens,
)
from dsft.plan.memory.tensors import Tensors, each, one
from dsft.plan.storage import FP32
from dsft.spec.schema import Spec


def embedding(census: Census) -> tuple[int, int]:
    """Return the vocabulary size and the hidden size."""
    found = next((p for p in census.parameters if p.embedding), None)
    vocabulary, hidden = found.shape if found is not None else (0, 0)
    return vocabulary, hidden


def logits_of(census: Census, spec: Spec, tokens: int) -> tuple[int, int, int]:
    """Return the bytes of the logits, of the sum of the chunks' gradients of the weight (0 for fp16,
    preference pairs and distillation, which do not need it), and of the logits in a forward without backward.
    Every token counts as a target. The values of a teacher and a student count as logits."""
    vocabulary, hidden = embedding(census)
    chunk = head_chunk("cpu" if spec.is_on_cpu else "cuda", gpu_bytes(spec))
    if spec.reference is not None and spec.reference.teacher_values:
        return several_tokens(spec, tokens, vocabulary, chunk)
    if not in_chunks(tokens * vocabulary, chunk):
        plain = tokens * vocabulary * PLAIN_BYTES_PER_LOGIT
        return plain, 0, plain
    scored = min(tokens * vocabulary * BYTES_PER_LOGIT, chunk // SCORED_PARTS)
    if not spec.is_on_cpu:
        scored //= 2  # softmax_kernel.py reads the product, and derives no other values
    outside = [p for p in census.parameters if p.layer is None and p.shape == (vocabulary, hidden)]
    weights = [p for p in outside if not p.embedding] or outside  # tied: the embedding's
    at_once = min(tokens * vocabulary * BYTES_PER_LOGIT, chunk)
    if not spec.is_on_cpu:  # the product, and the gradient where it has another type
        at_once = at_once * (FP32 + compute_bytes(spec) % FP32) // BYTES_PER_LOGIT
    if spec.train.precision == "fp16" or not any(p.trained for p in weights):
        return at_once, 0, scored
    if not spec.task_kind.whole:
        return at_once, vocabulary * hidden * FP32, scored
    row = vocabulary * compute_bytes(spec)
    stored = kept_rows(tokens, row, chunk)
    at_once = min(tokens * vocabulary * BYTES_PER_LOGIT, chunk // SCORED_PARTS if stored == tokens else chunk)
    return stored * row + at_once, 0, scored


def normed(hidden: int, tokens: int, spec: Spec) -> Tensors:
    """Return what is beside the logits: the last layer's output and its norm, which computes in fp32."""
    widens = compute_bytes(spec) < FP32 and not fuses(spec)
    return each([hidden] * 2, tokens * compute_bytes(spec)) + one(tokens * hidden * FP32 * widens)
