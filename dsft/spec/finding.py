"""A mistake found in a spec, before it is known on which line it stands. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsft.spec.document import Path
from dsft.spec.schema import Spec


@dataclass(frozen=True)
class Finding:
    """`path` is where it is told; `reads` are all keys that it follows from, dotted, without list numbers."""

    path: Path
    message: str
    reads: tuple[str, ...] = ()


def values_at(spec: Spec, key: str) -> Iterator[tuple[Path, Any]]:
    """The value at a dotted key; of each item where it has a `*`; none where a section is null."""
    found: list[tuple[Path, Any]] = [((), spec)]
    for part in key.split("."):
        found = [step for path, value in found if value is not None for step in _enter(path, value, part)]
    yield from found


def value_at(spec: Spec, key: str) -> Any:
    """The value at a dotted key without `*`; None where a section on the way is null."""
    return next((value for _, value in values_at(spec, key)), None)


def _enter(path: Path, value: Any, part: str) -> list[tuple[Path, Any]]:
    if part == "*":
        return [((*path, index), item) for index, item in enumerate(value)]
    return [((*path, part), getattr(value, part))]
