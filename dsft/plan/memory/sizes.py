"""Sizes that more than one module counts in: units, bytes of an element, and those of the output layer's
logits, by which dsft/model/head.py cuts them into chunks and the plan counts them. Pure.
"""

from __future__ import annotations

from dsft.spec.schema import Spec

GIB = 2**30  # bytes
FP32 = 4  # bytes of an element

BYTES_PER_LOGIT = 8  # the product, its float32 copy and what is made of it, for weights of 2 or 4 bytes
CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""What the logits of one chunk may take. Every chunk reads and writes the whole float32 gradient of the
weight, so a chunk must have many rows to be worth it: 512 of a vocabulary of 65,536 on a CPU, and on a GPU,
which computes more for each byte that it moves, 1,024 of 131,072."""
SCORED_PARTS = 4  # of a chunk: where no gradient of the weight is added up, fewer rows at once are as fast
PLAIN_BYTES = 1 << 24  # below this, what is saved is not worth computing anything twice
PLAIN_BYTES_PER_LOGIT = 12  # of logits made whole: they, log-probabilities and their gradient, in float32


def chunk_limit(device: str) -> int:
    """Bytes of a chunk. device: "cpu" or "cuda"; another kind counts as the latter."""
    return CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])


def in_chunks(logits: int, chunk: int) -> bool:
    """Whether so many logits are too many to be made at once, where a chunk may take so many bytes."""
    return logits * BYTES_PER_LOGIT > min(PLAIN_BYTES, chunk)


def kept_rows(rows: int, row_bytes: int, chunk: int) -> int:
    """Of how many rows the gradient by the logits, `row_bytes` each, is kept from the forward for a backward
    that cannot be known there: as many as a chunk may take."""
    return min(rows, chunk // row_bytes)


def runs_on_cpu(spec: Spec) -> bool:
    accelerator = spec.accelerator
    return accelerator is not None and accelerator.name.lower() == "cpu"


def weight_bytes(spec: Spec) -> int:
    return FP32 if spec.train.precision == "fp32" else 2


def moment_bytes(spec: Spec) -> int:
    if spec.optim.name == "adamw":
        return 2 * FP32
    return FP32 if spec.optim.momentum else 0
