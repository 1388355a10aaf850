"""Name the sources and evaluation sets of a spec, as used in metrics: `data/NAME/tokens`,
`eval/NAME/loss`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsft.spec.document import quote
from dsft.spec.findings import Finding
from dsft.spec.schema import Data, Source, Spec
from dsft.spec.sources import short_name

HELD_OUT = "held_out"
"""Name of the set held out of the unnamed sources, if there are other sets."""


def set_names(data: Data) -> tuple[str | None, ...]:
    """Return the name of each set of data.eval: its own, or one derived from its path. None for an
    unnamed set that is the only evaluation set; its metric is `eval/loss`."""
    if len(data.eval) == 1 and data.eval[0].name is None and not _holds_out_rows(data):
        return (None,)
    return train_names(data.eval)


def train_names(sources: Sequence[Source]) -> tuple[str, ...]:
    return tuple(source.name or short_name(source.path) for source in sources)


def split_sets(data: Data) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
    """Return the sets held out of data.train, each as (name, indices of its sources): one set per named
    source, and one for all unnamed sources. The name is None if the set is the only one."""
    if not _holds_out_rows(data):
        return ()
    named = [(source.name, (index,)) for index, source in enumerate(data.train) if source.name is not None]
    others = tuple(index for index, source in enumerate(data.train) if source.name is None)
    alone = not named and not data.eval
    unnamed = [(None if alone else HELD_OUT, others)] if others else []
    return (*named, *unnamed)


def evaluates(data: Data) -> bool:
    """Return whether there are rows to evaluate."""
    return bool(data.eval) or _holds_out_rows(data)


def _holds_out_rows(data: Data) -> bool:
    return data.eval_fraction is not None or data.eval_count is not None


def name_findings(spec: Spec) -> Iterator[Finding]:
    """Yield a finding for each name that two sources or two sets share."""
    data = spec.data
    splits = {name: f"of the rows held out of data.train.{of[0]}" for name, of in split_sets(data)}
    for section, owners, names in (("train", {}, train_names(data.train)), ("eval", splits, set_names(data))):
        for index, name in enumerate(names):
            if name in owners:
                message = f"the name {quote(name)} is also that {owners[name]}; give each its own name"
                path, reads = ("data", section, index), (f"data.{section}.name", f"data.{section}.path")
                yield Finding(path, message, reads)
            owners.setdefault(name, f"of data.{section}.{index}")
