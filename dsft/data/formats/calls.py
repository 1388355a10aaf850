"""Convert tool calls and tool descriptions, given as JSON values or JSON text, to what chat templates take.

All functions raise BadRowError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsft.data.formats.values import (
    check_keys,
    is_empty,
    json_copy,
    json_text,
    mapping,
    parse_json,
    quoted,
    single_key,
    string,
)
from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError


def tools(value: object, place: str) -> tuple[Mapping[str, Any], ...]:
    """Return a row's tools, each as {"type": "function", "function": {...}}; JSON text is parsed."""
    if isinstance(value, str) and value.strip():
        value = json_text(value, place)
    if is_empty(value) or isinstance(value, str):
        return ()
    if not isinstance(value, list):
        raise BadRowError(f'"{place}" is {json_type(value)}; it must be a list of functions or its JSON')
    return tuple(_tool(one, f"{place}[{i}]") for i, one in enumerate(value))


def calls(message: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    """Return the calls of a message, from tool_calls or function_call, OpenAI's older key for one call."""
    given = {key: message[key] for key in ("tool_calls", "function_call") if not is_empty(message.get(key))}
    if single_key(("tool_calls", "function_call"), given, place) is None:
        return []
    if "function_call" in given:
        return [_call(given["function_call"], f"{place}.function_call")]
    several = given["tool_calls"]
    if not isinstance(several, list):
        raise BadRowError(f'"{place}.tool_calls" is {json_type(several)}; it must be a list of calls')
    return [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(several)]


def calls_in_text(value: object, place: str) -> list[Mapping[str, Any]]:
    """Return the calls in a JSON text of one call, or of a list of calls."""
    written = string(value, place)
    try:
        read = parse_json(written)
    except ValueError as error:
        raise BadRowError(f'"{place}" is not the JSON of a function call ({error})') from None
    if not isinstance(read, list):
        return [_call(read, place)]
    if not read:
        raise BadRowError(f'"{place}" is an empty list; it must be the JSON of a function call')
    return [_call(call, f"{place}[{i}]") for i, call in enumerate(read)]


def _call(value: object, place: str) -> Mapping[str, Any]:
    """Return a call as templates take it. Arguments are a mapping, empty if there are none, or a text if that
    is not the JSON of an object."""
    call = mapping(value, place, "a function call")
    outer = {key: one for key, one in call.items() if not is_empty(one)}
    if "function" in outer:
        if outer.get("type", "function") != "function":
            what = json_type(outer["type"]) if not isinstance(outer["type"], str) else outer["type"][:40]
            raise BadRowError(f'"{place}.type" is {what}; only calls of type function are supported')
        check_keys(outer, ("id", "type", "function"), place)
        inner_place = f"{place}.function"
        inner = dict(mapping(outer["function"], inner_place, "an object with name and arguments"))
    else:
        inner, inner_place = {key: one for key, one in call.items() if key not in ("id", "type")}, place
    check_keys(inner, ("name", "arguments"), inner_place)
    if inner.get("name") is None:
        raise BadRowError(f'"name" is missing in "{inner_place}", which has {quoted(inner) or "no keys"}')
    result: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": string(inner["name"], f"{inner_place}.name"),
            "arguments": _arguments(inner.get("arguments"), f"{inner_place}.arguments"),
        },
    }
    return {"id": string(outer["id"], f"{place}.id"), **result} if "id" in outer else result


def _arguments(value: object, place: str) -> Any:
    if value is None or isinstance(value, dict):
        return json_copy(value or {}, place)
    text = string(value, place)
    if not text.strip():
        return {}
    try:
        read = parse_json(text)
    except ValueError:
        return text
    return json_copy(read, place) if isinstance(read, dict) else text


def _tool(value: object, place: str) -> Mapping[str, Any]:
    tool = json_copy(mapping(value, place, "an object that describes a function"), place)
    if tool.get("type", "function") != "function":
        raise BadRowError(f'"{place}.type" is not "function"; only functions are supported')
    if "function" not in tool:
        tool = {"function": {key: one for key, one in tool.items() if key != "type"}}
    described = mapping(tool["function"], f"{place}.function", "an object with name and parameters")
    if described.get("name") is None:
        raise BadRowError(f'"name" is missing in "{place}", which has {quoted(described) or "no keys"}')
    string(described["name"], f"{place}.name")
    return {"type": "function", **tool}
