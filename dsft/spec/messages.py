"""Rephrase pydantic's errors: the value, the rule and what to do, in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dsft.spec.aliases import VALUES, suggestion
from dsft.spec.document import Path, dotted, quote, read_document
from dsft.spec.not_offered import feature_of_value

Worded = tuple[Path, str]


def sentences(errors: Sequence[ErrorDetails], data: Any, descriptions: Mapping[str, str]) -> list[Worded]:
    """Return (path, sentence), one per path. data: the validated data; descriptions: key without list numbers
    -> its description in the schema."""
    found: dict[Path, str] = {}
    paths = [path_in(data, error) for error in errors]
    for error, path in zip(errors, paths, strict=True):
        if error["type"] == "literal_error" and any(path == other[:-1] for other in paths if other):
            continue  # the key takes a word or a list, and the mistake is in an item of the list
        if error["type"] == "tuple_type" and path in found:
            found[path] += ", or a list: [...]"
        found.setdefault(path, _sentence(error, path, descriptions))
    return list(found.items())


def errors_of(error: ValidationError) -> list[ErrorDetails]:
    """Return the errors of a validation, without "too short" for lists with wrong items: pydantic counts only
    the valid items."""
    return [detail for detail in error.errors(include_url=False) if not _miscounted(detail)]


def _miscounted(detail: ErrorDetails) -> bool:
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def key_of(path: Path) -> str:
    """Return the dotted path without list numbers, as in the schema."""
    return dotted(tuple(part for part in path if isinstance(part, str)))


def path_in(data: Any, error: ErrorDetails) -> Path:
    """Return the path of an error in `data`, without the names that pydantic adds for members of a union."""
    path: Path = ()
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


def _sentence(error: ErrorDetails, path: Path, descriptions: Mapping[str, str]) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, value)
    if kind == "missing":
        return _missing(path, descriptions)
    if kind == "literal_error":
        not_offered = feature_of_value(key_of(path), value)
        if not_offered is not None:
            return f"{quote(value)}: {not_offered.clause()}"
        return _none_of(value, context, VALUES.get(key_of(path), {}))
    worder = _WORDERS.get(kind)
    if worder is not None:
        return worder(value, context)
    description = descriptions.get(key_of(path), "").rstrip(".")
    return f"{quote(value)} is not allowed here; choose another: {description[:1].lower()}{description[1:]}"


def _unknown_key(path: Path, value: object) -> str:
    section, key = key_of(path[:-1]), str(path[-1])
    return f"there is no such key{f' in {section}' if section else ''}; {suggestion(section, key, value)}"


def _missing(path: Path, descriptions: Mapping[str, str]) -> str:
    if isinstance(path[-1], int):
        return f"item {path[-1]} is missing; give every item of the list"
    description = descriptions.get(key_of(path), "")
    return f"is missing and has no default; give it: {description[:1].lower()}{description[1:]}".rstrip(".: ")


def _wrong_type(wanted: str) -> Callable[[Any, Mapping[str, Any]], str]:
    def sentence(value: Any, context: Mapping[str, Any]) -> str:
        given = "nothing is given" if value is None else f"{quote(value)} is {_kind(value)}"
        return f"{given}, {wanted} is needed; {_way_out(value, wanted)}"

    return sentence


def _kind(value: Any) -> str:
    names = {str: "a text", bool: "a truth value", int: "a whole number", float: "a decimal number"}
    names |= {dict: "a mapping", list: "a list"}
    return names.get(type(value), "something else")


def _way_out(value: Any, wanted: str) -> str:
    """Return what to do: write the same value in the right type if possible, else a general hint."""
    lower = str(value).lower()
    if wanted == "a whole number" and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        way_out = f"write {int(value)}"
    elif wanted in ("a whole number", "a number") and isinstance(value, str) and _is_number(value):
        way_out = f"write {value} without quotes"
    elif wanted == "true or false" and lower in _TRUE | _FALSE:
        way_out = f"write {'true' if lower in _TRUE else 'false'}"
    elif wanted == "a text" and isinstance(value, (int, float)):
        way_out = f"write it in quotes: '{quote(value)}'"
    else:
        way_out = _WAYS_OUT.get(wanted, "change it")
    return way_out


_WAYS_OUT = {
    "a list": "write it in brackets: [...], or each item on a line that begins with '- '",
    "a mapping": "write its keys below it, or {key: value}",
    "a whole number": "write one, such as 8",
    "a number": "write one, such as 0.1",
    "true or false": "write one of the two",
    "a text": "write a word or a path",
}
_TRUE = {"yes", "on", "1", "y", "true"}
_FALSE = {"no", "off", "0", "n", "false"}


def _is_number(text: str) -> bool:
    """Return whether the text would be a number without quotes; `inf` and `1_000` would not."""
    return type(read_document(text).data) in (int, float)


def _none_of(value: Any, context: Mapping[str, Any], theirs: Mapping[str, str]) -> str:
    """Return the sentence for a value that is not one of the choices. theirs: value in another tool -> value
    in the spec."""
    choices = [part.strip().strip("'") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
    name = str(value).lower()
    close = [theirs[name]] if name in theirs else difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
    return f"{quote(value)} is not offered; write {listed}{f' (did you mean {close[0]}?)' if close else ''}"


def _beyond(words: str, bound: str) -> Callable[[Any, Mapping[str, Any]], str]:
    def sentence(value: Any, context: Mapping[str, Any]) -> str:
        return f"{quote(value)} is out of range; give a number {words} {quote(context[bound])}"

    return sentence


def _too_short(value: Any, context: Mapping[str, Any]) -> str:
    return f"{quote(value)} has too few entries; give at least {context['min_length']}"


def _too_long(value: Any, context: Mapping[str, Any]) -> str:
    return f"{quote(value)} has too many entries; give at most {context['max_length']}"


def _empty(value: Any, context: Mapping[str, Any]) -> str:
    return "the text is empty; write a value, or leave the key out"


def _not_finite(value: Any, context: Mapping[str, Any]) -> str:
    return f"{quote(value)} is not a finite number; give one that is"


_WORDERS: dict[str, Callable[[Any, Mapping[str, Any]], str]] = {
    "int_type": _wrong_type("a whole number"),
    "float_type": _wrong_type("a number"),
    "string_type": _wrong_type("a text"),
    "bool_type": _wrong_type("true or false"),
    "dict_type": _wrong_type("a mapping"),
    "model_type": _wrong_type("a mapping"),
    "tuple_type": _wrong_type("a list"),
    "greater_than": _beyond("above", "gt"),
    "greater_than_equal": _beyond("of at least", "ge"),
    "less_than": _beyond("below", "lt"),
    "less_than_equal": _beyond("of at most", "le"),
    "too_short": _too_short,
    "too_long": _too_long,
    "string_too_short": _empty,
    "finite_number": _not_finite,
}
