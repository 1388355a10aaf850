"""Convert tool calls and tool descriptions, given as JSON values or JSON text, to what chat templates take.

All functions raise BadRowError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsft.data.formats.values import is_empty, listed, mapping, one_of, only, parsed, plain, read_text, string
from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError


def tools(value: object, place: str) -> tuple[Mapping[str, Any], ...]:
    """Return a row's tools, each as {"type": "function", "function": {...}}; JSON text is parsed."""
    if isinstance(value, str) and value.strip():
        value = read_text(value, place)
    if is_empty(value) or isinstance(value, str):
        return ()
    if not isinstance(value, list):
        raise BadRowError(f'"{place}" is {json_type(value)}; it must be a list of functions, or its JSON')
    return tuple(_tool(one, f"{place}[{i}]") for i, one in enumerate(value))


def calls(said: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    """Return the calls of a message, from tool_calls or function_call, OpenAI's older key for one call."""
    given = {key: said[key] for key in ("tool_calls", "function_call") if not is_empty(said.get(key))}
    if one_of(("tool_calls", "function_call"), given, place) is None:
        return []
    if "function_call" in given:
        return [_call(given["function_call"], f"{place}.function_call")]
    several = given["tool_calls"]
    if not isinstance(several, list):
        raise BadRowError(f'"{place}.tool_calls" is {json_type(several)}; it must be a list of calls')
    return [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(several)]


def written_calls(value: object, place: str) -> list[Mapping[str, Any]]:
    """Return the calls in a JSON text of one call, or of a list of calls."""
    written = string(value, place)
    try:
        read = parsed(written)
    except ValueError as error:
        raise BadRowError(f'"{place}" is not the JSON of a call of a function ({error})') from None
    if not isinstance(read, list):
        return [_call(read, place)]
    if not read:
        raise BadRowError(f'"{place}" is an empty list; it must be the JSON of a call of a function')
    return [_call(call, f"{place}[{i}]") for i, call in enumerate(read)]


def _call(value: object, place: str) -> Mapping[str, Any]:
    """Return a call as templates take it. Arguments are a mapping, empty if there are none, or a text if that
    is not the JSON of an object."""
    call = mapping(value, place, "a call of a function")
    outer = {key: one for key, one in call.items() if not is_empty(one)}
    if "function" in outer:
        if outer.get("type", "function") != "function":
            what = json_type(outer["type"]) if not isinstance(outer["type"], str) else outer["type"][:40]
            raise BadRowError(f'"{place}.type" is {what}; only calls of type function are read')
        only(outer, ("id", "type", "function"), place)
        inner_place = f"{place}.function"
        inner = dict(mapping(outer["function"], inner_place, "an object with name and arguments"))
    else:
        inner, inner_place = {key: one for key, one in call.items() if key not in ("id", "type")}, place
    only(inner, ("name", "arguments"), inner_place)
    if inner.get("name") is None:
        raise BadRowError(f'"name" is missing in "{inner_place}", which has {listed(inner) or "no keys"}')
    made: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": string(inner["name"], f"{inner_place}.name"),
            "arguments": _arguments(inner.get("arguments"), f"{inner_place}.arguments"),
        },
    }
    return {"id": string(outer["id"], f"{place}.id"), **made} if "id" in outer else made


def _arguments(value: object, place: str) -> Any:
    if value is None or isinstance(value, dict):
        return plain(value or {}, place)
    text = string(value, place)
    if not text.strip():
        return {}
    try:
        read = parsed(text)
    except ValueError:
        return text
    return plain(read, place) if isinstance(read, dict) else text


def _tool(value: object, place: str) -> Mapping[str, Any]:
    tool = plain(mapping(value, place, "an object that describes a function"), place)
    if tool.get("type", "function") != "function":
        raise BadRowError(f'"{place}.type" is not "function"; only functions are read')
    if "function" not in tool:
        tool = {"function": {key: one for key, one in tool.items() if key != "type"}}
    described = mapping(tool["function"], f"{place}.function", "an object with name and parameters")
    if described.get("name") is None:
        raise BadRowError(f'"name" is missing in "{place}", which has {listed(described) or "no keys"}')
    string(described["name"], f"{place}.name")
    return {"type": "function", **tool}
