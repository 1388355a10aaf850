"""Which cases of a file are run: some always, the others with `-m long`; and a worker that is launched once
for many tests does the work of those alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """For `parametrize`: those that are not among `always` take long."""
    return [pytest.param(value, marks=() if value in always else pytest.mark.long) for value in values]


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values of `parameter` in this file's tests that were selected and are not skipped, each
    once."""
    found: dict[Any, None] = {}
    for item in request.session.items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and parameter in values and not item.get_closest_marker("skip"):
            found[values[parameter]] = None
    return list(found)
