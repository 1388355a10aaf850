"""The names that evaluation sets have in metrics: `eval/NAME/loss`. Pure: takes `data.eval`, gives names or
findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsft.spec.document import shown
from dsft.spec.finding import Finding
from dsft.spec.schema import Source, Spec


def set_names(sources: Sequence[Source]) -> tuple[str | None, ...]:
    """The name of each set: its own, or its file's without folder and suffix, with `_` for what a metric's
    name cannot hold. None for one that stands alone without a name: `eval/loss` says all of it."""
    if len(sources) == 1 and sources[0].name is None:
        return (None,)
    return tuple(source.name or _file_name(source.path) for source in sources)


def name_findings(spec: Spec) -> Iterator[Finding]:
    """Two sets with one name."""
    seen: dict[str | None, int] = {}
    for index, name in enumerate(set_names(spec.data.eval)):
        if name in seen:
            message = f"{shown(name)} is the name of data.eval.{seen[name]} too; give each a name of its own"
            yield Finding(("data", "eval", index), message, ("data.eval.name", "data.eval.path"))
        seen.setdefault(name, index)


def _file_name(path: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", Path(path.removeprefix("builtin:")).stem)
