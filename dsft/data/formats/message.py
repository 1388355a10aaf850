"""From a list of messages to a conversation, as OpenAI's files and ShareGPT's write them.

Takes the list as JSON has it. Gives messages as chat templates take them. Raises BadRowError. Touches
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsft.data.formats.values import is_empty, is_text, listed, mapping, only, parsed, plain, string
from dsft.data.read.json_rows import kind
from dsft.data.rows import BadRowError, Conversation, Message

_CALL = "call"  # an assistant's message whose content is the JSON of its calls
_OPENAI_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "tool_call": _CALL,
    "tool_response": "tool",
}
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_call": _CALL,
    "model": "assistant",
    "function_response": "tool",
    **_OPENAI_ROLES,
}
_FLAGS = ("train", "weight", "loss")
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking")
_OF_ROLE = {
    "tool_calls": "assistant",
    "function_call": "assistant",
    "reasoning_content": "assistant",
    "thinking": "assistant",
    "tool_call_id": "tool",
}


@dataclass(frozen=True)
class Dialect:
    """How a message's keys and roles are named. roles: a file's name -> a template's."""

    role_keys: tuple[str, ...]
    content_keys: tuple[str, ...]
    roles: Mapping[str, str]

    @property
    def known(self) -> frozenset[str]:
        return frozenset((*self.role_keys, *self.content_keys, *_FLAGS, *_KEPT, *_OF_ROLE))


OPENAI = Dialect(("role",), ("content",), _OPENAI_ROLES)
SHAREGPT = Dialect(("from", "role"), ("value", "content"), _SHAREGPT_ROLES)
"""Takes OpenAI's names as well."""


class Turn(NamedTuple):
    """A message, where the row has it, and what the row says of training on it."""

    place: str
    message: Message
    trained: bool | None


def turns(value: object, place: str, dialect: Dialect) -> list[Turn]:
    """The messages of a list, or of the JSON of one. Raises BadRowError where it is empty."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _read(value, place)
    if not isinstance(value, list):
        keys = f"{dialect.role_keys[0]} and {dialect.content_keys[0]}"
        raise BadRowError(f'"{place}" is {kind(value)}; it must be a list of {keys}')
    if not value:
        raise BadRowError(f'"{place}" is an empty list; it must hold messages')
    return [turn(message, f"{place}[{i}]", dialect) for i, message in enumerate(value)]


def turn(value: object, place: str, dialect: Dialect) -> Turn:
    """One message."""
    role_key, content_key = dialect.role_keys[0], dialect.content_keys[0]
    if not isinstance(value, dict):
        raise BadRowError(
            f'"{place}" is {kind(value)}; it must be an object with {role_key} and {content_key}'
        )
    if len(value) == 2:  # as most are
        named, content = value.get(role_key), value.get(content_key)
        role = dialect.roles.get(named) if isinstance(named, str) else None
        if role is not None and role != _CALL and is_text(content):
            return Turn(place, {"role": role, "content": content}, None)
    said = {key: one for key, one in value.items() if one is not None}
    role_key = next((key for key in dialect.role_keys if key in said), role_key)
    content_key = next((key for key in dialect.content_keys if key in said), content_key)
    if role_key not in value:
        raise BadRowError(_missing(role_key, value, place, dialect))
    role = _role(value[role_key], f"{place}.{role_key}", dialect)
    _check_keys(said, role, place, dialect)
    message: dict[str, Any] = {"role": "assistant" if role == _CALL else role, "content": None}
    if role == _CALL:
        calls = _written_calls(said.get(content_key), f"{place}.{content_key}")
    else:
        calls = _calls(said, place)
        if content_key in said:
            message["content"] = _content(said[content_key], f"{place}.{content_key}")
        elif not calls and content_key in value:
            raise BadRowError(f'"{place}.{content_key}" is null; it must be a string')
        elif not calls:
            raise BadRowError(_missing(content_key, value, place, dialect))
    if calls:
        message["tool_calls"] = calls
    message |= {key: string(said[key], f"{place}.{key}") for key in _KEPT if key in said}
    return Turn(place, message, _trained(said, place))


def conversation(
    talk: Sequence[Turn], tools: tuple[Mapping[str, Any], ...] = (), *, of: str = "messages"
) -> Conversation:
    """`of`: what the row calls its messages. Raises BadRowError where nothing of them is trained on."""
    _check_order(talk)
    messages = tuple([turn.message for turn in talk])
    flags = tuple([turn.trained for turn in talk])
    answers = [turn.trained for turn in talk if turn.message["role"] == "assistant"]
    if None not in answers and True not in flags:
        if not answers:
            raise BadRowError(f'"{of}" has no assistant turn, so there is nothing to train on')
        raise BadRowError("every assistant turn has train: false, so there is nothing to train on")
    is_flagged = any(flag is not None for flag in flags)
    return Conversation(messages, tools, flags if is_flagged else ())


def tools(value: object, place: str) -> tuple[Mapping[str, Any], ...]:
    """A row's functions, each as {"type": "function", "function": {...}}; a JSON text is read."""
    if isinstance(value, str) and value.strip():
        value = _read(value, place)
    if is_empty(value) or isinstance(value, str):
        return ()
    if not isinstance(value, list):
        raise BadRowError(f'"{place}" is {kind(value)}; it must be a list of functions, or its JSON')
    return tuple(_tool(one, f"{place}[{i}]") for i, one in enumerate(value))


def _read(value: str, place: str) -> Any:
    try:
        return parsed(value)
    except ValueError as error:
        raise BadRowError(f'"{place}" is a string that is not JSON ({error})') from None


# --- one message ------------------------------------------------------------------------------------------


def _missing(key: str, value: Mapping[str, Any], place: str, dialect: Dialect) -> str:
    reason = f'"{key}" is missing in "{place}", which has {listed(value) or "no keys"}'
    if dialect is OPENAI and {"from", "value"} & value.keys():
        return f"{reason}; from and value are read with {_as_sharegpt(place)}"
    return reason


def _as_sharegpt(place: str) -> str:
    """What to write for a list that a place stands in, which OpenAI's names were looked for in."""
    return f"format: sharegpt, columns: {{conversations: {place.partition('[')[0]}}}"


def _role(value: object, place: str, dialect: Dialect) -> str:
    role = dialect.roles.get(value) if isinstance(value, str) else None
    if role is not None:
        return role
    role = string(value, place)
    reason = f'"{place}" is "{role[:40]}"; the roles are {", ".join(dialect.roles)}'
    if role in _SHAREGPT_ROLES:
        reason += f"; ShareGPT's are read with {_as_sharegpt(place)}"
    raise BadRowError(reason)


def _check_keys(said: Mapping[str, Any], role: str, place: str, dialect: Dialect) -> None:
    unknown = [key for key, value in said.items() if key not in dialect.known and not is_empty(value)]
    if unknown:
        raise BadRowError(f'"{place}" has {listed(unknown)}; a message has {", ".join(_public(dialect))}')
    for keys in (dialect.role_keys, dialect.content_keys):
        twice = [key for key in keys if key in said]
        if len(twice) > 1:
            raise BadRowError(
                f'"{place}" has {" and ".join(listed([key]) for key in twice)}; one of them says it'
            )
    role = "assistant" if role == _CALL else role
    for key, owner in _OF_ROLE.items():
        if owner != role and not is_empty(said.get(key)):
            raise BadRowError(f'"{place}" has "{key}", and its role is {role}; only {owner} messages have it')


def _public(dialect: Dialect) -> list[str]:
    own = [dialect.role_keys[0], dialect.content_keys[0]]
    return [*own, "tool_calls", *_KEPT, *_FLAGS]


def _content(value: object, place: str) -> str:
    """A string, or the texts of a list of parts, one after the other."""
    if not isinstance(value, list):
        return string(value, place)
    return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(value))


def _part(value: object, place: str) -> str:
    part = mapping(value, place, "an object with type and text")
    what = string(part.get("type"), f"{place}.type")
    if what != "text":
        medium = next((name for name in ("image", "audio", "video", "file") if name in what), None)
        rule = f"{medium} parts are not trained on" if medium else "only text parts are read"
        raise BadRowError(f'"{place}" is a part of type "{what[:40]}"; {rule}')
    unknown = [key for key, one in part.items() if key not in ("type", "text") and not is_empty(one)]
    if unknown:
        raise BadRowError(f'"{place}" has {listed(unknown)}; a part of type text has type and text')
    return string(part.get("text"), f"{place}.text")


def _trained(said: Mapping[str, Any], place: str) -> bool | None:
    given = [key for key in _FLAGS if key in said]
    if len(given) > 1:
        raise BadRowError(
            f'"{place}" has {" and ".join(listed([key]) for key in given)}; one of them says it'
        )
    if not given:
        return None
    key, value = given[0], said[given[0]]
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    shown = value if isinstance(value, (int, float)) else kind(value)
    rule = "0 or 1" if key == "weight" else "true or false"
    raise BadRowError(f'"{place}.{key}" is {shown}; it must be {rule}')


# --- calls and tools --------------------------------------------------------------------------------------


def _calls(said: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    """Of tool_calls, or of function_call, as OpenAI named a single one before."""
    several, single = said.get("tool_calls"), said.get("function_call")
    if not is_empty(several) and not is_empty(single):
        raise BadRowError(f'"{place}" has "tool_calls" and "function_call"; one of them says it')
    if not is_empty(single):
        return [_call(single, f"{place}.function_call")]
    if is_empty(several):
        return []
    if not isinstance(several, list):
        raise BadRowError(f'"{place}.tool_calls" is {kind(several)}; it must be a list of calls')
    return [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(several)]


def _written_calls(value: object, place: str) -> list[Mapping[str, Any]]:
    """Of the JSON of a call, or of a list of them."""
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
    """A call as templates take it: arguments are a mapping, unless their text is not the JSON of one."""
    call = mapping(value, place, "a call of a function")
    outer = {key: one for key, one in call.items() if not is_empty(one)}
    if "function" in outer:
        if outer.get("type", "function") != "function":
            what = kind(outer["type"]) if not isinstance(outer["type"], str) else outer["type"][:40]
            raise BadRowError(f'"{place}.type" is {what}; only calls of type function are read')
        only(outer, ("id", "type", "function"), place)
        inner_place = f"{place}.function"
        inner = dict(mapping(outer["function"], inner_place, "an object with name and arguments"))
    else:
        inner, inner_place = {key: one for key, one in call.items() if key not in ("id", "type")}, place
    only(inner, ("name", "arguments"), inner_place)
    for key in ("name", "arguments"):
        if inner.get(key) is None:
            raise BadRowError(
                f'"{key}" is missing in "{inner_place}", which has {listed(inner) or "no keys"}'
            )
    made: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": string(inner["name"], f"{inner_place}.name"),
            "arguments": _arguments(inner["arguments"], f"{inner_place}.arguments"),
        },
    }
    return {"id": string(outer["id"], f"{place}.id"), **made} if "id" in outer else made


def _arguments(value: object, place: str) -> Any:
    if isinstance(value, dict):
        return plain(value, place)
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
    if tool.get("type", "function") != "function" and "function" in tool:
        raise BadRowError(f'"{place}.type" is not function; only functions are read')
    described = tool.get("function") if "function" in tool else tool
    inner = mapping(described, f"{place}.function", "an object with name and parameters")
    if "name" not in inner:
        raise BadRowError(f'"name" is missing in "{place}", which has {listed(inner) or "no keys"}')
    string(inner["name"], f"{place}.name")
    return {"type": "function", "function": inner} if "function" not in tool else {"type": "function", **tool}


# --- several messages -------------------------------------------------------------------------------------


def _check_order(talk: Sequence[Turn]) -> None:
    """What no template can mend: a late system message, a tool's result that nobody asked for."""
    before: Message | None = None  # the last message that is not a tool's
    for i, (place, message, _) in enumerate(talk):
        role = message["role"]
        if role == "tool":
            _check_result(message, before, place)
            continue
        if role == "system" and i > 0:
            raise BadRowError(f'"{place}" is a system message; it must be the first one')
        before = message


def _check_result(message: Message, before: Message | None, place: str) -> None:
    if before is None or before["role"] != "assistant":
        raise BadRowError(f'"{place}" is a tool\'s result, and no assistant turn before it calls a tool')
    ids = {call.get("id") for call in before.get("tool_calls", ())}
    own = message.get("tool_call_id")
    if own is not None and ids and None not in ids and own not in ids:
        raise BadRowError(
            f'"{place}.tool_call_id" is "{own[:40]}"; the calls before it are {listed(sorted(ids))}'
        )
