"""Rows of a table of values that do not fit together: (key, test, others, message).

A row applies if the value at the key passes its test, and those at the keys of `others` pass theirs. A test
is a function, or the values that pass. The message, which begins with the key's value, gives the rule and
what to do; {section.key} in it becomes that key's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dsft.spec.aliases import fields
from dsft.spec.document import quote
from dsft.spec.findings import Finding, finding, value_at
from dsft.spec.schema import Spec
from dsft.spec.task import TASKS

Test = Callable[[Any], object] | tuple[Any, ...]
Row = tuple[str, Test, Mapping[str, Test], str]

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


def changed(key: str) -> Test:
    """Test whether the value is not the default of the key, nor in a section that is null."""
    return other_than(None, fields()[key].default)


def row_findings(spec: Spec, rows: Iterable[Row]) -> Iterator[Finding]:
    """Yield a finding for each row that applies to the spec. It depends on all keys of the row."""
    values = {**dict(spec), "longest_example": spec.longest_example}
    for key, test, others, message in rows:
        if all(_passes(one, value_at(spec, at)) for at, one in {key: test, **others}.items()):
            yield finding(key, f"{quote(value_at(spec, key))} {message.format_map(values)}", *others)


def _passes(test: Test, value: Any) -> bool:
    return value in test if isinstance(test, tuple) else bool(test(value))
