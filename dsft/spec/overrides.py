"""Apply overrides (`key=value` from the command line) to a document.

The first `=` splits key and value; the value is YAML. A dotted path sets one entry, a mapping as value
replaces the whole entry. Parts of a path that contain a dot are quoted; list items are addressed by number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dsft.errors import Problem
from dsft.spec.document import Document, Location, Path, dotted, quote, read_document

_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."']+))\s*(\.|$)""")

# Mappings of plain values: the rest of the path is one key, even with dots, since a shell removes quotes.
_FLAT_MAPPINGS = re.compile(r"cluster\.hosts|cluster\.env|data\.(?:train|eval)\.\d+\.columns")


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply the overrides in order, so that a later one wins. The document is changed in place, and invalid
    overrides are added to its problems."""
    for text in overrides:
        reason = _apply(document, text)
        if reason is not None:
            document.problems.append(Problem(f"override {quote(text)}", reason))


def parse_path(text: str) -> Path | None:
    """Split a dotted path such as `cluster.hosts."10.0.0.1"` into its parts; None if it is not a path."""
    parts: list[str | int] = []
    end = 0
    while end < len(text) or not parts or text.endswith("."):
        match = _PART.match(text, end)
        if match is None:
            return None
        quoted = match[1] if match[1] is not None else match[2]
        parts.append(quoted if quoted is not None else _plain_part(match[3].strip()))
        end = match.end()
        if match[4] == "":
            break
    return None if "" in parts else _joined(tuple(parts))


def _plain_part(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else text


def _joined(path: Path) -> Path:
    for end in range(2, len(path) - 1):
        if _FLAT_MAPPINGS.fullmatch(".".join(map(str, path[:end]))):
            return (*path[:end], ".".join(map(str, path[end:])))
    return path


def _apply(document: Document, text: str) -> str | None:
    """Apply one override. Return None, or why it cannot be applied."""
    name, equals, value_text = text.partition("=")
    if not equals:
        return "there is no '='; write key=value, such as train.max_steps=100"
    path = parse_path(name)
    if path is None:
        return f"{quote(name)} is not a dotted path; write it like train.max_steps or data.train.0.path"
    value = read_document(value_text)
    if value.problems:
        return f"the value is not YAML: {value.problems[0].message}"
    if document.data is None:
        document.data = {}
    reason = _set(document.data, path, value.data)
    if reason is None:
        _forget(document, path)
        document.locations[path] = Location(override=text)
    return reason


def _set(container: Any, path: Path, value: Any) -> str | None:
    for end, part in enumerate(path[:-1]):
        reason = _make_room(container, part, path[: end + 1], following=path[end + 1])
        if reason is not None:
            return reason
        container = container[part if isinstance(container, list) else str(part)]
    reason = _make_room(container, path[-1], path, following=None)
    if reason is None:
        container[path[-1] if isinstance(container, list) else str(path[-1])] = value
    return reason


def _make_room(container: Any, part: str | int, path: Path, following: str | int | None) -> str | None:
    """Prepare to set `container[part]`, and create a mapping or list there if the path goes on. Return None,
    or why it cannot be set. following: the next part of the path, None at its end."""
    if isinstance(container, list):
        if not isinstance(part, int) or part > len(container):
            return f"{dotted(path[:-1])} is a list of {len(container)}; give an item's number, counted from 0"
        if part == len(container):
            container.append(None)
        key: Any = part
    elif isinstance(container, dict):
        key = str(part)
    else:
        return f"{dotted(path[:-1])} is {quote(container)}, not a mapping; it has no key {quote(part)} to set"
    if (
        following is not None
        and (container[key] if isinstance(container, list) else container.get(key)) is None
    ):
        container[key] = [] if isinstance(following, int) else {}
    return None


def _forget(document: Document, path: Path) -> None:
    """Remove the locations at and below `path`, whose values were replaced."""
    for old in [location for location in document.locations if location[: len(path)] == path]:
        del document.locations[old]
