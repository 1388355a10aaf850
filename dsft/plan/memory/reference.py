"""Compute the memory of a run's reference: beside the policy, or in its own pass before training.

As accurate as the policy's memory plan, on which it builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsft.plan.census import Census, Parameter
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import PERSIST_BELOW
from dsft.plan.memory.ranks import Memory, RankMemory, most_tokens, of_host, stage_memory
from dsft.plan.memory.sizes import compute_bytes
from dsft.plan.reference import (
    has_engine,
    reference_layout,
    reference_model,
    reference_parallel,
    scores_in_training,
)
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec


@dataclass(frozen=True)
class ReferenceMemory:
    """Memory of the reference.

    stages  one rank of each stage: `activations` of the largest layer alone and `head` the logits alone,
            since a forward pass without backward keeps no more; empty if the policy's own engine scores
    hosts   host -> bytes during the reference's own pass; None if the reference runs beside the policy, whose
            memory then includes it
    """

    stages: tuple[RankMemory, ...]
    hosts: Mapping[str, int] | None


def with_reference(
    sizes: Memory,
    census: Census,
    spec: Spec,
    layout: Layout,
    hosts: Mapping[str, int],
    tokens: int | None = None,
) -> tuple[Memory, ReferenceMemory | None]:
    """Return the policy's memory with that of the reference beside it added, and the reference's own memory,
    None if the loss has no reference.

    census: that of the reference, or the policy's if the reference is its initial model; tokens: as in
    `memory`.
    """
    if spec.reference is None:
        return sizes, None
    if reference_model(spec).quantize is None:  # of the policy's census, in place of another model's
        plain = tuple(replace(parameter, form="plain") for parameter in census.parameters)
        census = replace(census, parameters=plain)
    found: tuple[RankMemory, ...] = ()
    if has_engine(spec):
        found = _stages(census, spec, layout, tokens or most_tokens(spec, layout))
        if not scores_in_training(spec):
            own_layout = reference_layout(spec, layout.world_size)
            return sizes, ReferenceMemory(found, of_host(found, spec, own_layout, hosts))
        of_rank = [found[rank.stage % len(found)] for rank in sizes.stages]
        beside = [(one.parameters + one.copies, one.offloaded) for one in of_rank]
    else:
        beside = [(_copies(rank, census, spec, layout), 0) for rank in sizes.stages]
    stages = tuple(
        replace(rank, reference=on_gpu, offloaded=rank.offloaded + on_host)
        for rank, (on_gpu, on_host) in zip(sizes.stages, beside, strict=True)
    )
    return Memory(stages, of_host(stages, spec, layout, hosts)), ReferenceMemory(found, None)


def _stages(census: Census, spec: Spec, layout: Layout, tokens: int) -> tuple[RankMemory, ...]:
    """Return the memory of one rank of each stage, computed as for a policy without trained parameters. The
    policy's new adapter is no part of the reference."""
    own_layout = reference_layout(spec, layout.world_size)
    own = spec.model_copy(update={"model": reference_model(spec), "parallel": reference_parallel(spec)})
    has_adapter = own.model.lora is not None
    parameters = (p for p in census.parameters if has_adapter or not _is_adapters(p))
    frozen = replace(census, parameters=tuple(replace(p, trained=False) for p in parameters))
    found = []
    for stage in range(own_layout.pipeline_stages):
        rank = stage_memory(stage, frozen, own, own_layout, tokens)
        on_gpu = rank.parameters
        if spec.reference is not None and spec.reference.reference_offload == "cpu":
            stored = [tensor for p in frozen.parameters for tensor in p.stored(own.train.precision)]
            on_gpu = sum(tensor.bytes for tensor in stored if tensor.numel <= PERSIST_BELOW)
        shares = {"parameters": on_gpu, "offloaded": rank.parameters - on_gpu}
        found.append(replace(rank, **shares, activations=rank.one_layer, head=rank.logits, retained=0))
    return tuple(found)


def _copies(rank: RankMemory, census: Census, spec: Spec, layout: Layout) -> int:
    """Return the bytes of the copies of initial values that `refer_to_start` keeps: of a continued adapter,
    and of modules trained beside an adapter; at ZeRO 3 of everything trained."""
    sharded, lora = spec.parallel.zero_stage == 3, spec.model.lora
    by_copy = sharded or (lora is not None and lora.path is not None)
    trained = [p for p in census.stage(rank.stage, cut_of(spec.parallel, census)) if p.trained]
    copied = [p.numel for p in trained if by_copy or not _is_adapters(p)]
    ranks = layout.shards if sharded else 1
    return sum(-(-numel // ranks) for numel in copied) * compute_bytes(spec)


def _is_adapters(parameter: Parameter) -> bool:
    return ".lora_" in parameter.name
