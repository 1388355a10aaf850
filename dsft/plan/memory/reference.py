"""Compute the memory of a run's reference: beside the policy, or in its own pass before training.

As accurate as the policy's memory plan, on which it builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsft.plan.census import Census, Parameter
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import PERSIST_BELOW
from dsft.plan.layout import Layout
from dsft.plan.memory.ranks import Memory, RankMemory, most_tokens, of_host, stage_memory
from dsft.plan.memory.sizes import weight_bytes
from dsft.plan.reference import (
    dpo_of,
    has_engine,
    needs_reference,
    reference_layout,
    reference_model,
    reference_parallel,
)
from dsft.spec.schema import Spec


@dataclass(frozen=True)
class ReferenceRankMemory:
    """Memory in bytes of a reference with its own engine, on one rank of a stage; on the GPU, except
    offloaded.

    parameters   parameters between their uses
    gathered     gathered parameters at ZeRO 3, at most
    activations  activations of the largest layer; a forward pass keeps no more
    logits       logits in memory at once, at most
    offloaded    parameters in host memory
    beside       as in RankMemory
    retained     as in RankMemory; nothing is freed before the end
    """

    stage: int
    elements: int
    parameters: int
    gathered: int
    activations: int
    logits: int
    offloaded: int
    beside: int = 0
    retained: int = 0

    @property
    def device(self) -> int:
        return self.parameters + self.gathered + self.activations + self.logits

    @property
    def gpu(self) -> int:
        return self.device + self.beside


@dataclass(frozen=True)
class ReferenceMemory:
    """Memory of the reference.

    stages  one rank of each stage; empty if the policy's own engine scores
    hosts   host -> bytes during the reference's own pass; None if the reference runs beside the policy, whose
            memory then includes it
    """

    stages: tuple[ReferenceRankMemory, ...]
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
    if not needs_reference(spec):
        return sizes, None
    if not has_engine(spec):
        copies = tuple(_copies(rank, census, spec, layout) for rank in sizes.stages)
        return _beside(sizes, copies, (0,) * len(copies), spec, layout, hosts), ReferenceMemory((), None)
    found = _stages(census, spec, layout, tokens or most_tokens(spec, layout))
    if dpo_of(spec).reference == "precomputed":
        return sizes, ReferenceMemory(found, _per_host(found, spec, layout, hosts))
    of_rank = [found[rank.stage % len(found)] for rank in sizes.stages]
    on_gpu, offloaded = zip(*((one.parameters, one.offloaded) for one in of_rank), strict=True)
    return _beside(sizes, on_gpu, offloaded, spec, layout, hosts), ReferenceMemory(found, None)


def _stages(census: Census, spec: Spec, layout: Layout, tokens: int) -> tuple[ReferenceRankMemory, ...]:
    """Return the memory of one rank of each stage, computed as for a policy without trained parameters."""
    places = reference_layout(spec, layout.world_size)
    own = spec.model_copy(update={"model": reference_model(spec), "parallel": reference_parallel(spec)})
    parameters = tuple(replace(p, trained=False) for p in census.parameters if _is_its(p, own))
    frozen = replace(census, parameters=parameters)
    return tuple(
        _frozen(stage_memory(stage, frozen, own, places, tokens), frozen, own)
        for stage in range(places.pipeline_stages)
    )


def _frozen(rank: RankMemory, census: Census, spec: Spec) -> ReferenceRankMemory:
    parameters, offloaded = rank.parameters, 0
    if dpo_of(spec).reference_offload == "cpu":
        small = sum(p.numel for p in census.parameters if p.numel <= PERSIST_BELOW) * weight_bytes(spec)
        parameters, offloaded = small, rank.parameters - small
    rest = (rank.buffers, rank.one_layer, rank.logits, offloaded, rank.beside)
    return ReferenceRankMemory(rank.stage, rank.elements, parameters, *rest)


def _is_its(parameter: Parameter, own: Spec) -> bool:
    """Return whether a parameter belongs to the reference; the policy's new adapter does not."""
    return own.model.lora is not None or not _is_adapters(parameter)


def _copies(rank: RankMemory, census: Census, spec: Spec, layout: Layout) -> int:
    """Return the bytes of the copies of initial values that `refer_to_start` keeps: of a continued adapter,
    and of modules trained beside an adapter; at ZeRO 3 of everything trained."""
    sharded, lora = spec.parallel.zero_stage == 3, spec.model.lora
    by_copy = sharded or (lora is not None and lora.path is not None)
    trained = [p for p in census.stage(rank.stage, cut_of(spec.parallel, census)) if p.trained]
    copied = [p.numel for p in trained if by_copy or not _is_adapters(p)]
    ranks = layout.data_parallel if sharded else 1
    return sum(-(-numel // ranks) for numel in copied) * weight_bytes(spec)


def _is_adapters(parameter: Parameter) -> bool:
    return ".lora_" in parameter.name


def _beside(
    sizes: Memory,
    on_gpu: tuple[int, ...],
    offloaded: tuple[int, ...],
    spec: Spec,
    layout: Layout,
    hosts: Mapping[str, int],
) -> Memory:
    stages = tuple(
        replace(rank, reference=weights, offloaded=rank.offloaded + on_host)
        for rank, weights, on_host in zip(sizes.stages, on_gpu, offloaded, strict=True)
    )
    return Memory(stages, of_host(stages, spec, layout, hosts))


def _per_host(
    found: tuple[ReferenceRankMemory, ...], spec: Spec, layout: Layout, hosts: Mapping[str, int]
) -> dict[str, int]:
    places = reference_layout(spec, layout.world_size)
    return of_host(found, spec, places, hosts)
