"""Apply overrides (`key=value` from the command line) to a document.

The first `=` splits key and value; the value is YAML. A dotted path sets one entry, a mapping as value
replaces the whole entry. Parts of a path that contain a dot are quoted; list items are addressed by number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dsft.errors import Problem
from dsft.spec.document import Document, KeyPath, Location, dotted, quote, read_document

_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."']+))\s*(\.|$)""")

# Mappings of plain values: the rest of the path is one key, even with dots, since a shell removes quotes.
_FLAT_MAPPINGS = re.compile(r"cluster\.hosts|cluster\.env|data\.(?:train|eval)\.\d+\.columns")


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply the overrides in order, so that a later one wins. The document is changed in place, and invalid
    overrides are added to its problems."""
    for text in overrides:
        try:
            _apply(document, text)
        except ValueError as error:
            document.problems.append(Problem(f"override {quote(text)}", str(error)))


def parse_path(text: str) -> KeyPath | None:
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


def _joined(path: KeyPath) -> KeyPath:
    for end in range(2, len(path) - 1):
        if _FLAT_MAPPINGS.fullmatch(".".join(map(str, path[:end]))):
            return (*path[:end], ".".join(map(str, path[end:])))
    return path


def _apply(document: Document, text: str) -> None:
    """Apply one override. Raise ValueError, with the reason, if it cannot be applied."""
    name, equals, value_text = text.partition("=")
    if not equals:
        raise ValueError("there is no '='; write key=value, such as train.max_steps=100")
    path = parse_path(name)
    if path is None:
        message = "is not a dotted path; write it like train.max_steps or data.train.0.path"
        raise ValueError(f"{quote(name)} {message}")
    value = read_document(value_text)
    if value.problems:
        split = f"; quote the argument for the shell: '{name}=…'" if value_text[:1] in ("{", "[") else ""
        raise ValueError(f"the value is not YAML: {value.problems[0].message}{split}")
    if document.data is None:
        document.data = {}
    _set(document.data, path, value.data)
    for old in [location for location in document.locations if location[: len(path)] == path]:
        del document.locations[old]  # of the values that were replaced
    document.locations[path] = Location(override=text)


def _set(container: Any, path: KeyPath, value: Any) -> None:
    """Set the value at a path; mappings and lists that are missing on the way are created. Raise ValueError
    if the path leads through something else, or beyond the end of a list."""
    for end, part in enumerate(path):
        where, key = dotted(path[:end]), part if isinstance(container, list) else str(part)
        if isinstance(container, list):
            if not isinstance(part, int) or part > len(container):
                message = f"{where} is a list of {len(container)}; give an item's number, counted from 0"
                raise ValueError(message)
            if part == len(container):
                container.append(None)
        elif isinstance(container, dict):
            container.setdefault(key, None)
        else:
            message = f"{where} is {quote(container)}, not a mapping; it has no key {quote(part)} to set"
            raise ValueError(message)
        if end == len(path) - 1:
            container[key] = value
        elif container[key] is None:
            container[key] = [] if isinstance(path[end + 1], int) else {}
        container = container[key]
