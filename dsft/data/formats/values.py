"""Check and convert the JSON values of a row. The functions raise BadRowError unless they say otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError
from dsft.spec.document import quote

DEEPEST = 100  # levels of arguments and schemas, which templates traverse recursively


@dataclass(slots=True)
class Fields:
    """A row, accessed by dsft's column names. columns: dsft's name -> the file's name; a renamed column is
    never looked up under dsft's name."""

    row: Mapping[str, Any]
    columns: Mapping[str, str]

    def get(self, key: str) -> Any:
        return self.row.get(self.columns.get(key, key))

    def name(self, key: str) -> str:
        """Return the file's name for a column."""
        return self.columns.get(key, key)

    def has(self, key: str) -> bool:
        return self.columns.get(key, key) in self.row

    def string(self, key: str) -> str:
        return string(self.get(key), self.name(key))

    def optional(self, key: str) -> str:
        """Return a string; "" if the row has none."""
        return "" if self.get(key) is None else self.string(key)


def string(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f'"{place}" is {json_type(value)}; it must be a string')
    if is_text(value):
        return value
    half = next(i for i, letter in enumerate(value) if "\ud800" <= letter <= "\udfff")
    raise BadRowError(f'"{place}" has half of a surrogate pair at character {half + 1}, which is not text')


def boolean(value: object, place: str, rule: str = "true or false, or 1 or 0") -> bool:
    """Return a flag that is given as a boolean or as 0 or 1. rule: what it must be, for the error."""
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    shown = value if isinstance(value, (int, float)) else json_type(value)
    raise BadRowError(f'"{place}" is {shown}; it must be {rule}')


def number(value: object, place: str) -> float:
    """Return a finite number that is given as one or, as in CSV, as text."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isfinite(found):
        return found
    raise BadRowError(f'"{place}" is {quote(value, 40)}; it must be a number')


def is_text(value: object) -> bool:
    """Return whether a value is a string that UTF-8 can encode; half of a surrogate pair cannot be."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_copy(value: object, place: str, depth: int = 0) -> Any:
    """Return a copy of a value. Raise BadRowError if it is not JSON, or has more than DEEPEST levels. place:
    its key in the row, for the message."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return string(value, place)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRowError(f'"{place}" is {value}, which is not JSON')
        return value
    if depth > DEEPEST:
        raise BadRowError(f'"{place[:40]}…" is nested more than {DEEPEST} levels deep')
    if isinstance(value, list):
        return [json_copy(one, f"{place}[{i}]", depth + 1) for i, one in enumerate(value)]
    if isinstance(value, dict):
        return {string(key, place): json_copy(one, f"{place}.{key}", depth + 1) for key, one in value.items()}
    raise BadRowError(f'"{place}" is {json_type(value)}, which is not JSON')


def parse_json(value: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON."""
    try:
        return json.loads(value, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg[0].lower()}{error.msg[1:]} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def mapping(value: object, place: str, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRowError(f'"{place}" is {json_type(value)}; it must be {what}')
    return value


def check_keys(value: Mapping[str, Any], keys: Sequence[str], place: str) -> None:
    """Raise BadRowError if a mapping has other keys than these with values that are not empty."""
    unknown = [key for key, one in value.items() if key not in keys and not is_empty(one)]
    if unknown:
        raise BadRowError(f'"{place}" has {quoted(unknown)}; it may have {", ".join(keys)}')


def single_key(keys: Sequence[str], message: Mapping[str, Any], place: str) -> str | None:
    """Return which of several synonymous keys a message has; None if it has none. Raises BadRowError if it
    has more than one."""
    given = [key for key in keys if key in message]
    if len(given) > 1:
        raise BadRowError(f'"{place}" has {" and ".join(quoted([key]) for key in given)}; give one of them')
    return given[0] if given else None


def json_text(value: str, place: str) -> Any:
    """Return the value of a JSON text. Raises BadRowError if it is not JSON."""
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadRowError(f'"{place}" is a string, but not JSON ({error})') from None


def is_empty(value: object) -> bool:
    """Return whether a value is null, "", [] or {}, as for a key that only other rows use."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
