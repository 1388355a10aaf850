"""Units, bytes per element, and sizes of the output layer's logits.

dsft/model/head.py divides the logits into chunks by these sizes, and the plan counts their memory by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dsft.plan.flops import memory_of
from dsft.plan.storage import FP32, width
from dsft.spec.patterns import is_orthogonalized
from dsft.spec.schema import Accelerator, Cluster, Spec

if TYPE_CHECKING:
    from dsft.plan.census import Census, Parameter

GIB = 2**30  # bytes

BYTES_PER_LOGIT = 8  # the product, its float32 copy and derived values, for weights of 2 or 4 bytes
CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Device -> maximum bytes of the logits of one chunk. Every chunk reads and writes the whole float32 gradient
of the weight, so it needs many rows to be efficient: 512 with a vocabulary of 65,536 on a CPU, and 1,024 with
131,072 on a GPU, which computes more per byte that it moves."""
LARGE = 64 * GIB, 2 << 30
"""Memory of a GPU from which on a chunk of logits may have these bytes. For 8 billion parameters and a
vocabulary of 128,256 each chunk reads and writes 4 GB: computed as 1 % of a step of 8,192 tokens at 1 GiB."""
SCORED_PARTS = 4  # without a gradient of the weight, a quarter of the rows per chunk is as fast
SEVERAL_PARTS = 2  # where several tokens of each target are scored, a logit has twice the derived values
# Bytes for each float32 value of a teacher's row, measured with torch's allocator:
VALUE_BYTES = 45  # of the loss in float64
JSD_BYTES = 62  # of jsd's
SCORED_VALUE_BYTES = 43  # of the loss without a backward
LEARNED_VALUE_BYTES = 19  # beside the logits, in the backward
PLAIN_BYTES = 1 << 24  # below this size, the memory saved is not worth computing the logits twice
PLAIN_BYTES_PER_LOGIT = 12  # without chunks: logits, log-probabilities and their gradient, in float32


SPARE = 1 / 10
"""Share of a planned size that a host must have in addition, since most plans were slightly below the
measured peaks (docs/internals/memory.md)."""


def needed(size: int) -> int:
    """Return the bytes that a host must have if the plan counts `size` bytes."""
    return size + int(size * SPARE)


def chunk_limit(device: str) -> int:
    """Return the maximum bytes of a chunk. device: "cpu" or "cuda"; others count as "cuda"."""
    return CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])


def head_chunk(device: str, memory: int | None) -> int:
    """Return the maximum bytes of the logits of a chunk. memory: the device's, in bytes; None: unknown."""
    least, large = LARGE
    return large if device != "cpu" and memory is not None and memory >= least else chunk_limit(device)


def in_chunks(logits: int, chunk: int) -> bool:
    """Return whether this number of logits must be computed in chunks. chunk: maximum bytes of a chunk."""
    return logits * BYTES_PER_LOGIT > min(PLAIN_BYTES, chunk)


def kept_rows(rows: int, row_bytes: int, chunk: int) -> int:
    """Return the number of rows whose gradient with respect to the logits is stored in the forward, for a
    backward that the forward cannot know: as many as fit into a chunk. row_bytes: bytes of one row's
    gradient; chunk: maximum bytes of a chunk."""
    return min(rows, chunk // row_bytes)


def several_tokens(spec: Spec, tokens: int, vocabulary: int, chunk: int) -> tuple[int, int, int]:
    """Return what `logits_of` does where a teacher gives several values for each target, which the loss and
    then the backward read. Of a logit the backward has the product, its float32 copy, the gradient and, at
    another temperature than 1, what is divided by it; there is no sum of gradients."""
    assert spec.reference is not None, "there is a teacher"
    width, values = compute_bytes(spec), tokens * spec.reference.teacher_values
    each = (width if width < FP32 else 0) + FP32 * (2 + (spec.reference.teacher_keys["temperature"] != 1))
    logits = min(tokens * vocabulary, chunk // (BYTES_PER_LOGIT * SEVERAL_PARTS))
    backward, scored = logits * each + values * LEARNED_VALUE_BYTES, logits // SCORED_PARTS * BYTES_PER_LOGIT
    of_loss = JSD_BYTES if getattr(spec.of_task, "loss_type", None) == "jsd" else VALUE_BYTES
    return max(backward, values * of_loss), 0, max(scored, values * SCORED_VALUE_BYTES)


def gpu_bytes(spec: Spec) -> int | None:
    """Return the memory of a GPU: what cluster.accelerator gives, or else what nvidia-smi shows for its name;
    None if it is unknown."""
    accelerator = spec.accelerator
    gib = accelerator and (accelerator.memory_gib or memory_of(accelerator.name))
    return int(gib * GIB) if gib else None


def with_device(spec: Spec, device: str, memory: int | None) -> Spec:
    """Return the spec for the plan of a run, which knows its own device: as of a cluster of it, where it is a
    GPU, and with the kernels that auto uses. memory: bytes."""
    found: dict[str, Any] = {}
    if spec.model.kernels == "auto" and (device == "cpu" or find_spec("liger_kernel") is None):
        found["model"] = spec.model.model_copy(update={"kernels": "torch"})
    if device != "cpu" and memory is not None:
        cluster = spec.cluster or Cluster(hosts={"localhost": 1})
        accelerator = Accelerator(name=device, memory_gib=memory / GIB)
        found["cluster"] = cluster.model_copy(update={"accelerator": accelerator})
    return spec.model_copy(update=found)


def fuses(spec: Spec) -> bool:
    """Return whether Liger's kernels compute what they can: auto uses them on a GPU, where
    `dsft.model.kernels` finds them."""
    model = spec.model
    if model.kernels == "auto":
        return not (model.compile or spec.is_on_cpu)
    return model.kernels == "liger"


def compute_bytes(spec: Spec) -> int:
    """Return the bytes of an element in the type in which forward and backward compute: of activations, of
    trained weights and of their gradients. What other weights take is `Parameter.stored`."""
    return width(spec.train.precision)


def moment_bytes(spec: Spec) -> int:
    """Return the bytes per element of the optimizer states in 32 bits, as checkpoints have them."""
    return spec.optim.facts.moments(spec.optim) * FP32


def _orthogonalized(parameters: Iterable[Parameter], spec: Spec) -> Iterator[Parameter]:
    return (p for p in parameters if p.trained and is_orthogonalized(p.name, p.shape, spec.optim))


def fewer_moment_bytes(parameters: Iterable[Parameter], spec: Spec) -> int:
    """Return how many bytes less than `moment_bytes` per element the moments of layers' matrices take."""
    facts = spec.optim.facts
    fewer = facts.moments(spec.optim) - (facts.matrices or 0)
    return fewer * FP32 * sum(p.numel for p in _orthogonalized(parameters, spec))


def orthogonal_bytes(parameters: Iterable[Parameter], spec: Spec, ranks: int) -> int:
    """Return the bytes beside gradients and moments while muon updates the largest of its matrices: the
    momentum ahead in fp32, and what engine/muon.py orthogonal has at once. Where matrices are split over
    ranks, the parts that this one sends too. ranks: over which they are split, or 1."""
    width, largest = compute_bytes(spec), 0
    for p in _orthogonalized(parameters, spec):
        gram = p.numel // max(p.shape[-2:]) * min(p.shape[-2:])
        normed = p.numel * (FP32 + (width if width < FP32 else 0))
        iterated = width * (2 * p.numel + gram)
        largest = max(largest, p.numel * FP32 * (1 + (ranks > 1)) + max(normed, iterated))
    return largest


def saved_bytes(census: Census, spec: Spec) -> tuple[int, int]:
    """Return the bytes of a checkpoint, which has the trained weights and the optimizer's moments in fp32,
    and those of the export."""
    exported = census.trained if spec.model.lora else census.numel
    moments = census.trained * moment_bytes(spec) - fewer_moment_bytes(census.parameters, spec)
    return census.trained * FP32 + moments, exported * compute_bytes(spec)
