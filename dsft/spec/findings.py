"""Define a finding: a mistake in a spec, before its line in the file is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsft.spec.document import KeyPath, quote


@dataclass(frozen=True)
class Finding:
    """A mistake in a spec. path: key at which it is reported; reads: all keys that it depends on, dotted,
    without list numbers; if there are none, it depends on that key alone."""

    path: KeyPath
    message: str
    reads: tuple[str, ...] = ()


def finding(key: str, message: str, *others: str) -> Finding:
    """Return a finding at a dotted key, with list items by number. It depends on that key and on `others`."""
    parts = key.split(".")
    own = ".".join(part for part in parts if not part.isdigit())
    return Finding(tuple(int(part) if part.isdigit() else part for part in parts), message, (own, *others))


def value_finding(spec: Any, key: str, message: str, *others: str) -> Finding:
    """Return a finding whose message begins with the value at the key."""
    return finding(key, f"{quote(value_at(spec, key))} {message}", *others)


def value_at(spec: Any, key: str) -> Any:
    """Return the value at a dotted key; None if a section on the way is null."""
    value = spec
    for part in key.split("."):
        if value is not None:
            value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value
