"""Count the activations of a layer and its dequantized weights, and decide in how many chunks of tokens its
MLP is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsft.plan.census import Census, Parameter
from dsft.plan.memory.sizes import chunk_limit, compute_bytes, fuses, runs_on_cpu
from dsft.plan.memory.tensors import NONE, Tensors, each, one
from dsft.plan.storage import BLOCK, DEQUANTIZED_AT_ONCE, FP32
from dsft.spec.schema import Spec


def mlp_chunks(spec: Spec, census: Census, tokens: int) -> int:
    """Return the number of chunks in which MLPs are computed: model.mlp_chunks, or by default as many as keep
    what the backward needs of a chunk within `chunk_limit`. tokens: of a rank, in the largest micro-batch.

    Chunks cost next to nothing (dsft/model/mlp_chunks.py), but each reads and writes the gradients of the
    MLP's weights, so it has as many tokens as the limit allows. At this limit the MLP of a long row takes
    less than the rest of the layer, which is recomputed for all tokens.
    """
    model = spec.model
    if not model.gradient_checkpointing or model.compile:
        return 1
    if model.mlp_chunks is not None:
        return model.mlp_chunks
    layers: dict[int | None, list[Parameter]] = {}
    for parameter in census.parameters:
        if parameter.mlp:
            layers.setdefault(parameter.layer, []).append(parameter)
    largest = max((sum(_saved(own, 0, spec)) for own in layers.values()), default=0)
    limit = chunk_limit("cpu" if runs_on_cpu(spec) else "cuda")
    return max(1, -(-tokens * largest * compute_bytes(spec) // limit))


def activations(own: Sequence[Parameter], hidden: int, spec: Spec, tokens: int, chunks: int) -> Tensors:
    """Return what the backward needs of a layer with these parameters: of its MLP one of `chunks` chunks; of
    a recurrence what was counted."""
    token = tokens * compute_bytes(spec)
    recurrent = one(tokens * sum(p.saved[compute_bytes(spec) == FP32] for p in own if p.saved))
    own = [parameter for parameter in own if not parameter.saved]
    mlp = [parameter for parameter in own if chunks > 1 and parameter.mlp]
    others = [parameter for parameter in own if not (chunks > 1 and parameter.mlp)]
    return (
        each(_saved(others, hidden, spec), token)
        + each(_saved(mlp, 0, spec), -(-token // chunks))
        + recurrent
    )


def chunk_sums(own: Sequence[Parameter], spec: Spec, chunks: int) -> Tensors:
    """Return the sums in float32 of the gradients of an MLP that is computed in chunks, and the gradients of
    a chunk."""
    trained = (p.numel for p in own if chunks > 1 and p.mlp and not p.saved and p.trained)
    return each(trained, FP32 + compute_bytes(spec))


def forward_only(own: Sequence[Parameter], hidden: int, spec: Spec, tokens: int) -> int:
    """Return the bytes that a layer with these parameters has at once in a forward without a backward: the
    two inputs and the output of its MLP's product, each as wide as the widest matrix's output, and four
    hidden vectors; of experts what the backward would need. MLPs are not divided into chunks."""
    experts = [p for p in own if p.experts > 1]
    widest = max((p.shape[0] for p in own if p.experts == 1 and len(p.shape) == 2), default=0)
    recurrent = sum(p.saved[compute_bytes(spec) == FP32] for p in own if p.saved)
    per_token = max(3 * widest, sum(_saved(experts, 0, spec))) + 4 * hidden
    return tokens * (per_token * compute_bytes(spec) + recurrent)


def _saved(own: Sequence[Parameter], hidden: int, spec: Spec) -> list[int]:
    """Return the elements per token that the backward needs of a layer with these parameters, as tensors in
    the type of the weights.

    Counted are input and output of each matrix, and the widest output once more for the result of the
    activation function. The input shared by q, k and v is counted for each, which accounts for the two norms
    and rotary embeddings; trained norms of weights narrower than fp32 need two more hidden vectors. An
    adapter's matrices share their input with the layer's own and add only their rank. Of experts each token
    has top_k copies of these; the result of their activation function is as wide as the narrowest matrix.

    Liger's norms keep their input alone, and its MLPs the two inputs and the output of SwiGLU.
    """
    of_mlp = [p for p in own if p.fused and len(p.shape) == 2] if fuses(spec) else []
    others = [p for p in own if p not in of_mlp]
    matrices = [p.shape for p in others if len(p.shape) == 2 and p.experts == 1 and ".lora_" not in p.name]
    ranks = [min(p.shape) for p in own if len(p.shape) == 2 and ".lora_" in p.name]
    norms = compute_bytes(spec) < FP32 and any(
        p.trained and len(p.shape) == 1 and not (fuses(spec) and p.fused) for p in own
    )
    widest = 0 if of_mlp else max((shape[0] for shape in matrices), default=0)
    found = [size for shape in matrices for size in shape] + [widest, *ranks] + [hidden] * (2 * norms)
    found += [size for p in of_mlp if ".lora_" not in p.name for size in p.shape if size != hidden]
    stacked = [p for p in own if p.experts > 1 and len(p.shape) == 3]
    experts = [p for p in stacked if ".lora_" not in p.name]
    found += [min(p.shape[1:]) * p.top_k for p in stacked if ".lora_" in p.name]
    found += [size * p.top_k for p in experts for size in p.shape[1:]]
    between = [(sum(p.shape[1:]) - hidden) * p.top_k for p in experts]
    return found + ([min(between)] if between else [])


def dequantized(parameters: Iterable[Parameter], spec: Spec) -> Tensors:
    """Return what the largest product with a weight in 4 bits needs: the weight, in a mixture that of all
    experts, in the type of the activations; its scales in fp32; of experts a copy of the bytes that are
    dequantized at once."""

    def needed(weight: Parameter) -> Tensors:
        one_by_one = spec.model.experts.implementation == "eager"
        whole = weight.numel // weight.experts if one_by_one else weight.numel
        at_once = whole if weight.experts == 1 else min(whole, DEQUANTIZED_AT_ONCE)
        scales, copied = one(-(-at_once // BLOCK) * FP32), one(at_once // 2 if at_once < whole else 0)
        return one(whole * compute_bytes(spec)) + scales + copied

    found = (needed(parameter) for parameter in parameters if parameter.form != "plain")
    return max(found, key=lambda tensors: tensors.total, default=NONE)
