"""Choose how many layers recompute their activations in the backward pass, and say what each choice costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsft.plan.census import Census
from dsft.plan.cost import step_flops
from dsft.plan.memory.ranks import Memory, memory
from dsft.plan.memory.reference import with_reference
from dsft.plan.memory.sizes import needed
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec

ROOMY = 0.95  # usable share of a memory limit; the rest is for the driver, fragmentation and the plan's error
SHOWN = (False, 0.25, 0.5, 0.75, True)
"""Values in the table of choices."""

Value = bool | int | float | Literal["auto"]
"""A value of model.gradient_checkpointing."""


@dataclass(frozen=True)
class Choice:
    """A value of model.gradient_checkpointing.

    layers  number of layers that are recomputed
    gpu     bytes of the fullest GPU
    work    matrix products of a step, relative to those without recomputation
    """

    value: Value
    layers: int
    gpu: int
    work: float


@dataclass(frozen=True)
class Limits:
    """Bytes of a GPU, and of each host for all of its processes; None where unknown."""

    gpu: int | None
    host: int | None


def decided(
    spec: Spec,
    census: Census,
    reference: Census,
    layout: Layout,
    hosts: Mapping[str, int],
    limits: Limits,
    tokens: int | None = None,
) -> Spec:
    """Return the spec with model.gradient_checkpointing: auto replaced: by the smallest share of layers with
    which the plan is within ROOMY of the limits; by true where no share is, or no limit is known. census,
    reference, hosts, tokens: as in `with_reference`."""
    if spec.model.gradient_checkpointing != "auto":
        return spec
    layers = census.num_layers
    known = limits.gpu is not None or limits.host is not None
    for value in (False, *(number / layers for number in range(1, layers))) if known else ():
        changed = with_value(spec, value)
        sizes = memory(census, changed, layout, hosts, tokens)
        sizes, _ = with_reference(sizes, reference, changed, layout, hosts, tokens)
        if _fits(sizes, limits):
            return changed
    return with_value(spec, True)


def choices(
    spec: Spec, census: Census, reference: Census, layout: Layout, hosts: Mapping[str, int]
) -> list[Choice]:
    """Return the choices of SHOWN and the spec's own, by the number of recomputed layers."""
    found = []
    for value in dict.fromkeys((spec.model.gradient_checkpointing, *SHOWN)):
        changed = with_value(spec, value)
        sizes, _ = with_reference(memory(census, changed, layout, hosts), reference, changed, layout, hosts)
        layers = sum(map(changed.model.checkpoints, range(census.num_layers)))
        work = step_flops(census, changed) / step_flops(census, with_value(spec, False))
        found.append(Choice(value, layers, _gpu(sizes), work))
    return sorted(found, key=lambda choice: choice.layers)


def with_value(spec: Spec, value: Value) -> Spec:
    """Return the spec with this model.gradient_checkpointing."""
    return spec.model_copy(update={"model": spec.model.model_copy(update={"gradient_checkpointing": value})})


def _gpu(sizes: Memory) -> int:
    return max(rank.gpu for rank in sizes.stages)


def _fits(sizes: Memory, limits: Limits) -> bool:
    on_gpu = limits.gpu is None or _gpu(sizes) <= ROOMY * limits.gpu
    return on_gpu and (
        limits.host is None or all(needed(size) <= ROOMY * limits.host for size in sizes.hosts.values())
    )
