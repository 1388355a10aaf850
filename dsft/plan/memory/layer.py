"""Count the activations of a layer and what its products need beside, and decide in how many chunks of tokens
its MLP is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsft.plan.census import Census, Parameter
from dsft.plan.memory.sizes import chunk_limit, compute_bytes, fuses
from dsft.plan.memory.tensors import Tensors, each, one
from dsft.plan.storage import BLOCK, DEQUANTIZED_AT_ONCE, FP32
from dsft.spec.schema import Spec

MAGNITUDE = ".lora_magnitude"
"""In the names of DoRA's magnitudes, one per output of a layer."""


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
    limit = chunk_limit("cpu" if spec.is_on_cpu else "cuda")
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


def forward_only(own: Sequence[Parameter], hidden: int, spec: Spec, tokens: int, chunks: int) -> int:
    """Return the bytes that a layer with these parameters has at once in a forward without a backward: four
    hidden vectors, and the most of its MLP's products. Those of linear layers have as many as three tensors
    as wide as the widest matrix's output at once, and a dequantized weight beside two of them; those of
    experts what the backward would need, or input and output of one product and the dequantized weights.
    chunks: in which the MLP is computed."""
    width, experts = compute_bytes(spec), [replace(p, trained=True) for p in own if p.experts > 1]
    matrices = [p for p in own if p.experts == 1 and len(p.shape) == 2]
    widest = max((-(-p.shape[0] // (chunks if p.mlp else 1)) for p in matrices), default=0)
    recurrent = sum(p.saved[width == FP32] for p in own if p.saved)
    whole, token = dequantized(own, spec), tokens * width
    product = max((sum(p.shape[1:]) * p.top_k for p in experts), default=2 * widest)
    most = max(
        token * max(3 * widest, sum(_saved(experts, 0, spec))) + of_norms(own, spec, trains=False),
        token * product + whole,
    )
    return most + token * 4 * hidden + tokens * recurrent


def recomputed_experts(layer: Sequence[Parameter], hidden: int, spec: Spec, tokens: int) -> int:
    """Return the bytes at the end of the recomputation of a layer with experts, which save less than they
    need if they are not trained; 0 for other layers."""
    saved = activations(without_mlp(layer), hidden, spec, tokens, 1).total
    has_experts = any(p.experts > 1 for p in layer)
    return has_experts * (saved + forward_only(layer, hidden, spec, tokens, 1))


def without_mlp(layer: Sequence[Parameter]) -> list[Parameter]:
    return [p for p in layer if not p.mlp and p.experts == 1]


def _saved(own: Sequence[Parameter], hidden: int, spec: Spec) -> list[int]:
    """Return the elements per token that the backward needs of a layer with these parameters, as tensors in
    the type of the weights.

    Counted are input and output of each matrix, and the widest output once more for the result of the
    activation function. The input shared by q, k and v is counted for each, which accounts for the two norms
    and rotary embeddings; trained norms of weights narrower than fp32 need two more hidden vectors. An
    adapter's matrices share their input with the layer's own and add only their rank; DoRA adds both outputs
    that it scales. Of experts each token has top_k copies of these; the result of their activation function
    is as wide as the narrowest matrix.

    Liger's norms keep their input alone, and its MLPs the two inputs and the output of SwiGLU.
    """
    of_mlp = [p for p in own if p.fused and len(p.shape) == 2] if fuses(spec) else []
    others = [p for p in own if p not in of_mlp]
    matrices = [p.shape for p in others if len(p.shape) == 2 and p.experts == 1 and ".lora_" not in p.name]
    ranks = [min(p.shape) for p in own if len(p.shape) == 2 and ".lora_" in p.name]
    norms = compute_bytes(spec) < FP32 and any(
        p.trained and len(p.shape) == 1 and MAGNITUDE not in p.name and not (fuses(spec) and p.fused)
        for p in own
    )
    widest = 0 if of_mlp else max((shape[0] for shape in matrices), default=0)
    found = [size for shape in matrices for size in shape] + [widest, *ranks] + [hidden] * (2 * norms)
    found += [size for p in own if MAGNITUDE in p.name for size in p.shape * 2]
    found += [size for p in of_mlp if ".lora_" not in p.name for size in p.shape if size != hidden]
    stacked = [p for p in own if p.experts > 1 and len(p.shape) == 3]
    experts = [p for p in stacked if ".lora_" not in p.name]
    adapters = [p for p in stacked if ".lora_" in p.name]
    found += [min(p.shape[1:]) * p.top_k for p in adapters]
    takes_inputs = adapters or any(p.trained for p in experts)
    found += [size * p.top_k for p in experts for size in p.shape[1 : 3 if takes_inputs else 2]]
    between = [(sum(p.shape[1:]) - hidden) * p.top_k for p in experts]
    return found + ([min(between)] if between else [])


def dequantized(parameters: Sequence[Parameter], spec: Spec) -> int:
    """Return the bytes that the largest product with a weight in 4 bits needs: the weight, in a mixture that
    of all experts, in the type of the activations; its scales in fp32; of experts a copy of the bytes that
    are dequantized at once."""

    def needed(weight: Parameter) -> int:
        one_by_one = spec.model.experts.implementation == "eager"
        whole = weight.numel // weight.experts if one_by_one else weight.numel
        at_once = whole if weight.experts == 1 else min(whole, DEQUANTIZED_AT_ONCE)
        scales, copied = -(-at_once // BLOCK) * FP32, at_once // 2 if at_once < whole else 0
        return whole * compute_bytes(spec) + scales + copied

    return max((needed(weight) for weight in parameters if weight.form != "plain"), default=0)


def of_norms(parameters: Sequence[Parameter], spec: Spec, *, trains: bool) -> int:
    """Return the bytes that the largest norm of DoRA needs: the product of both factors, the same scaled, and
    its sum with the weight, which may be dequantized; and the identity matrix that peft multiplies by the
    factors (peft, tuners/lora/dora.py, get_lora_weight), until the norm is known where the model trains."""
    adapted = {p.name.partition(MAGNITUDE)[0] for p in parameters if MAGNITUDE in p.name}
    found = 0
    for weight in parameters:
        if weight.name.removesuffix(".weight") in adapted:
            identity, sums = weight.shape[1] ** 2, weight.numel * (3 if weight.form == "plain" else 4)
            needed = identity + sums if trains else max(identity + weight.numel, sums)
            found = max(found, needed * compute_bytes(spec))
    return found
