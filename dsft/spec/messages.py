"""Rephrase pydantic's errors: the value, the rule and what to do, in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dsft.spec.aliases import VALUES, description, suggestion
from dsft.spec.document import KeyPath, dotted, quote, read_document
from dsft.spec.not_offered import feature_of_value


def sentences(errors: Sequence[ErrorDetails], data: Any) -> list[tuple[KeyPath, str]]:
    """Return (path, sentence), one per path. data: the validated data."""
    found: dict[KeyPath, str] = {}
    paths = [path_in(data, error) for error in errors]
    for error, path in zip(errors, paths, strict=True):
        if error["type"] == "literal_error" and any(path == other[:-1] for other in paths if other):
            continue  # the key takes a word or a list, and the mistake is in an item of the list
        if error["type"] == "tuple_type" and path in found:
            found[path] += f", or {_LISTS.get(key_of(path), 'a list: [...]')}"
        if (kinds := _KINDS.get(key_of(path))) is not None:
            found[path] = f"{quote(error['input'])} is not a valid value; write {kinds}"
        found.setdefault(path, _sentence(error, path))
    return list(found.items())


def errors_of(error: ValidationError) -> list[ErrorDetails]:
    """Return the errors of a validation, without "too short" for lists with wrong items: pydantic counts only
    the valid items."""
    return [detail for detail in error.errors(include_url=False) if not _miscounted(detail)]


def _miscounted(detail: ErrorDetails) -> bool:
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def key_of(path: KeyPath) -> str:
    """Return the dotted path without list numbers, as in the schema."""
    return dotted(tuple(part for part in path if isinstance(part, str)))


def path_in(data: Any, error: ErrorDetails) -> KeyPath:
    """Return the path of an error in `data`, without the names that pydantic adds for members of a union."""
    path: KeyPath = ()
    for part in error["loc"]:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif error["type"] == "missing":
            return (*path, part)
        else:
            continue
        path = (*path, part)
    return path


_NEEDED = {
    "int_type": "an integer", "float_type": "a number", "string_type": "a string",
    "bool_type": "true or false", "tuple_type": "a list",
    **dict.fromkeys(("dict_type", "model_type"), "a mapping"),
}  # fmt: skip
"""pydantic's type of an error -> the kind of value that is needed."""
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}


def _sentence(error: ErrorDetails, path: KeyPath) -> str:
    kind, value, context, key = error["type"], error["input"], error.get("ctx", {}), key_of(path)
    about = description(key).rstrip(".")
    described = f"({about[:1].lower()}{about[1:]})" if about else ""
    if kind == "extra_forbidden":
        section, name = key_of(path[:-1]), str(path[-1])
        message = f"there is no such key{f' in {section}' if section else ''}"
        message += f"; {suggestion(section, name, value)}"
    elif kind == "missing" and isinstance(path[-1], int):
        message = f"the list has no item {path[-1]}; give all of its items"
    elif kind == "missing":
        message = f"this key is required; add it {described}".rstrip()
    elif kind == "literal_error":
        not_offered = feature_of_value(key, value)
        message = f"{quote(value)}: {not_offered.clause()}" if not_offered else _none_of(value, context, key)
    elif kind in _NEEDED:
        message = _wrong_type(value, _NEEDED[kind])
    elif kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        message = f"{quote(value)} is out of range; give a number {words} {quote(context[bound])}"
    elif kind == "too_short":
        message = f"{quote(value)} has too few entries; give at least {context['min_length']}"
    elif kind == "too_long":
        message = f"{quote(value)} has too many entries; give at most {context['max_length']}"
    elif kind == "string_too_short":
        message = "the string is empty; write a value, or leave the key out"
    elif kind == "finite_number":
        message = f"{quote(value)} is not a finite number; give a finite one"
    else:
        message = f"{quote(value)} is not valid here; give another value {described}".rstrip()
    return message


def _wrong_type(value: Any, needed: str) -> str:
    kinds = {str: "a string", bool: "a boolean", int: "an integer", float: "a decimal number"}
    kinds |= {dict: "a mapping", list: "a list"}
    kind = kinds.get(type(value), "something else")
    given = "the value is null" if value is None else f"{quote(value)} is {kind}"
    return f"{given}, but {needed} is needed; {_way_out(value, needed)}"


def _way_out(value: Any, needed: str) -> str:
    """Return what to do: write the same value in the right type if possible, else a general hint."""
    lower = str(value).lower()
    if needed == "an integer" and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        way_out = f"write {int(value)}"
    elif needed in ("an integer", "a number") and isinstance(value, str) and _is_number(value):
        way_out = f"write {value} without quotes"
    elif needed == "true or false" and lower in _TRUE | _FALSE:
        way_out = f"write {'true' if lower in _TRUE else 'false'}"
    elif needed == "a string" and isinstance(value, (int, float)):
        way_out = f"write it in quotes: '{quote(value)}'"
    else:
        way_out = _WAYS_OUT[needed]
    return way_out


_WAYS_OUT = {
    "a list": "write it in brackets: [...], or each item on a line that begins with '- '",
    "a mapping": "write its keys below it, or {key: value}",
    "an integer": "write one, such as 8",
    "a number": "write one, such as 0.1",
    "true or false": "write one of the two",
    "a string": "write a word or a path",
}
_LISTS = {"parallel.pipeline_cut": "the number of layers of each stage, such as [8, 8]"}
"""Key that takes a word or a list -> what the list has."""
_KINDS = {
    "model.gradient_checkpointing": "true (every layer), false, N from 1 on for every N-th layer, a share of "
    "the layers such as 0.5, or auto"
}
"""Key with values of several types -> what they are."""
_TRUE = {"yes", "on", "1", "y", "true"}
_FALSE = {"no", "off", "0", "n", "false"}


def _is_number(text: str) -> bool:
    """Return whether the text would be a number without quotes; `inf` and `1_000` would not."""
    return type(read_document(text).data) in (int, float)


def _none_of(value: Any, context: Mapping[str, Any], key: str) -> str:
    """Return the sentence for a value that is not one of the choices."""
    choices = [part.strip().strip("'") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
    name, theirs = str(value).lower(), {name.lower(): ours for name, ours in VALUES.get(key, {}).items()}
    close = [theirs[name]] if name in theirs else difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{quote(value)} is not a valid value; write {listed}{hint}"
