"""Describe what a mixture of experts means for a plan: parameters per token, and the gather of a layer's
experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dsft.plan.census import Census
from dsft.spec.schema import Spec
from dsft.system.disk import size_text


def active_line(census: Census) -> Iterator[str]:
    """Yield the line on the parameters that a token uses, if the model is a mixture of experts."""
    experts = [p for p in census.parameters if p.experts > 1]
    if experts:
        layers = len({p.module for p in experts})
        share = census.active / census.numel
        yield (
            f"A token uses {census.active:,} of them ({share:.1%}): it passes through {experts[0].top_k} of "
            f"{experts[0].experts} experts in {layers} of {census.num_layers} layers."
        )


def gather_line(census: Census, spec: Spec) -> Iterator[str]:
    """Yield the line on what ZeRO 3 gathers of a mixture of experts."""
    modules, sizes = Counter[str](), Counter[str]()
    for parameter in census.parameters:
        if parameter.experts > 1:
            modules[parameter.module] += parameter.numel
            sizes[parameter.module] += sum(t.bytes for t in parameter.stored(spec.train.precision))
    if modules:
        largest, size = max(modules.values()), size_text(max(sizes.values()))
        yield (
            f"ZeRO 3 gathers all experts of a layer at once, on any number of ranks: {largest:,} parameters, "
            f"{size}, and as much again while they arrive. Only expert parallelism, which dsft does not "
            "offer, would divide them."
        )
