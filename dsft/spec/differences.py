"""Compare two nested JSON values: each leaf that differs, with its dotted key and both values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

ABSENT = "(not set)"
_LONGEST = 80
"""Maximum characters of a text that is shown whole; of a longer one, only the part around the first
difference is shown."""
_AROUND = 20


@dataclass(frozen=True)
class Difference:
    """One leaf that differs. old, new: its values, ABSENT if the key is missing."""

    key: str
    old: Any
    new: Any

    @property
    def is_of_empty_values(self) -> bool:
        """Whether both values are missing, None, [] or {}."""
        empty: tuple[Any, ...] = (ABSENT, None, [], {})
        return self.old in empty and self.new in empty

    def clause(self, old: str, new: str) -> str:
        """Describe the difference. old, new: words with one `{}` for the value, such as "was {}" and "now
        {}"."""
        return (
            f"{self.key} {old.format(_shown(self.old, self.new))}, {new.format(_shown(self.new, self.old))}"
        )


def json_differences(old: Any, new: Any) -> list[Difference]:
    """Return every leaf that differs, sorted by key."""
    before, after = dict(flatten(old)), dict(flatten(new))
    for one, other in ((before, after), (after, before)):  # drop an empty mapping that has keys in the other
        for key in [key for key in one if key not in other and one[key] in ({}, [])]:
            if any(below.startswith(f"{key}.") for below in other):
                del one[key]
    return [
        Difference(key, before.get(key, ABSENT), after.get(key, ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, leaf) of nested mappings and lists; empty ones are leaves."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from flatten(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for index, below in enumerate(value):
            yield from flatten(below, f"{path}.{index}")
    else:
        yield path, value


def first_difference(one: str, other: str) -> int:
    """Return the index of the first character that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _shown(value: Any, other: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # YAML's word too
    if value == ABSENT:
        return ABSENT
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return repr(value)
    at = first_difference(value, other) if isinstance(other, str) and other != ABSENT else 0
    begin, end = max(0, at - _AROUND), at + _AROUND
    return f"{'…' if begin else ''}{value[begin:end]!r}{'…' if end < len(value) else ''}"
