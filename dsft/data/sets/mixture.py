"""What weights make of sources, in sentences: takes names and a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsft.data.sets.order import Mixed, quotas


def shares_text(names: Sequence[str], data: Mixed) -> Iterator[str]:
    """A sentence a source of how often an epoch has it; none without weights."""
    if data.weights is None:
        return
    slots = quotas(data.sizes, data.weights)
    for name, size, weight, taken in zip(names, data.sizes, data.weights, slots, strict=True):
        share = weight / sum(data.weights)
        times = taken / size if size else 0
        said = f"{name}: {size:,} examples, weight {share:.3g}: {taken:,} examples an epoch"
        yield f"{said}, {times:.3g} times each"
