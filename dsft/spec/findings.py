"""Define a finding, which is a mistake in a spec before its line in the file is known, and tables of values
that do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsft.spec.document import KeyPath, quote
from dsft.spec.task import TASKS

if TYPE_CHECKING:  # hosts are asked by a process without pydantic
    from dsft.spec.schema import Spec


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


# --- tables -----------------------------------------------------------------------------------------------

Test = Callable[[Any], object] | tuple[Any, ...]
Row = tuple[str, Test, Mapping[str, Test], str]
"""A row of a table of values that do not fit together: (key, test, others, message).

It applies if the value at the key passes its test, and those at the keys of `others` pass theirs. A test is a
function, or the values that pass. The message, which begins with the key's value, gives the rule and what to
do; {section.key} in it becomes that key's value.
"""

ANSWERS: Test = tuple(name for name, task in TASKS.items() if task.answers)
TEXTS: Test = tuple(name for name, task in TASKS.items() if not task.answers)
"""Tasks that train on answers, and on texts."""


def given(value: Any) -> bool:
    return value is not None


def missing(value: Any) -> bool:
    return value is None


def off(value: Any) -> bool:
    return not value


def above_1(value: Any) -> bool:
    return value is not None and value > 1


def is_cpu(name: Any) -> bool:
    return str(name).lower() == "cpu"


def is_flash(attention: str) -> bool:
    return attention.startswith("flash")


def other_than(*values: Any) -> Test:
    return lambda value: value not in values


def row_findings(spec: Spec, rows: Iterable[Row]) -> Iterator[Finding]:
    """Yield a finding for each row that applies to the spec. It depends on all keys of the row."""
    values = {**dict(spec), "longest_example": spec.longest_example}
    for key, test, others, message in rows:
        if all(_passes(one, value_at(spec, at)) for at, one in {key: test, **others}.items()):
            yield finding(key, f"{quote(value_at(spec, key))} {message.format_map(values)}", *others)


def _passes(test: Test, value: Any) -> bool:
    return value in test if isinstance(test, tuple) else bool(test(value))
