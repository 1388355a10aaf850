"""Convert lists of messages, in OpenAI's or ShareGPT's notation, to conversations for chat templates.

All functions raise BadRowError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dsft.data.formats.calls import calls, calls_in_text, tools
from dsft.data.formats.values import (
    Fields,
    boolean,
    check_keys,
    is_empty,
    is_text,
    json_text,
    mapping,
    quoted,
    single_key,
    string,
)
from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError, Conversation, Message, Row

_CALL = "call"  # an assistant message whose content is the JSON of its calls
_OPENAI_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool", "tool_call": _CALL, "tool_response": "tool",
}  # fmt: skip
_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "gpt": "assistant", "observation": "tool", "function_call": _CALL,
    "model": "assistant", "function_response": "tool", **_OPENAI_ROLES,
}  # fmt: skip
_SHAREGPT_HINT = "for ShareGPT messages, set format: sharegpt, columns: {{conversations: {column}}}"
_FLAGS = ("train", "weight", "loss", "loss_weight")
_TEXT_KEYS = ("name", "tool_call_id")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Synonyms; `prepare_messages` passes the value to templates under each of them."""
_ROLE_OF_KEY = {
    "tool_calls": "assistant",
    "function_call": "assistant",
    **dict.fromkeys(_REASONING, "assistant"),
    "tool_call_id": "tool",
}


@dataclass(frozen=True)
class Dialect:
    """The names of a message's keys and roles. roles: name in the file -> name in templates."""

    role_keys: tuple[str, ...]
    content_keys: tuple[str, ...]
    roles: Mapping[str, str]

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset((*self.role_keys, *self.content_keys, *_FLAGS, *_TEXT_KEYS, *_ROLE_OF_KEY))


OPENAI = Dialect(("role",), ("content",), _OPENAI_ROLES)
SHAREGPT = Dialect(("from", "role"), ("value", "content"), _SHAREGPT_ROLES)
"""Accepts OpenAI's names as well."""


class Turn(NamedTuple):
    """A message, its place in the row, and the row's flag for training on it (None: no flag)."""

    place: str
    message: Message
    trained: bool | None


def turns(value: object, place: str, dialect: Dialect) -> list[Turn]:
    """Return the turns of a list of messages, or of the JSON of one. Raises BadRowError if it is empty."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json_text(value, place)
    if not isinstance(value, list):
        keys = f"{dialect.role_keys[0]} and {dialect.content_keys[0]}"
        raise BadRowError(f'"{place}" is {json_type(value)}; it must be a list of objects with {keys}')
    if not value:
        raise BadRowError(f'"{place}" is an empty list; it must have messages')
    return [turn(message, f"{place}[{i}]", dialect) for i, message in enumerate(value)]


def turn(value: object, place: str, dialect: Dialect) -> Turn:
    """Return the turn of one message."""
    role_key, content_key = dialect.role_keys[0], dialect.content_keys[0]
    if not isinstance(value, dict):
        raise BadRowError(
            f'"{place}" is {json_type(value)}; it must be an object with {role_key} and {content_key}'
        )
    if len(value) == 2:  # a fast path for most messages
        named, content = value.get(role_key), value.get(content_key)
        role = dialect.roles.get(named) if isinstance(named, str) else None
        if role is not None and role != _CALL and is_text(content):
            return Turn(place, {"role": role, "content": content}, None)
    role_key = next((key for key in dialect.role_keys if value.get(key) is not None), role_key)
    if role_key not in value:
        raise BadRowError(_missing(role_key, value, place, dialect))
    content_key = dialect.content_keys[dialect.role_keys.index(role_key)]
    content_key = next((key for key in dialect.content_keys if value.get(key) is not None), content_key)
    named = _role(value[role_key], f"{place}.{role_key}", dialect)
    role = "assistant" if named == _CALL else named
    given = _checked(value, role, place, dialect)
    message: dict[str, Any] = {"role": role, "content": None}
    tool_calls = calls(given, place)
    if named == _CALL:
        single_key((content_key, "tool_calls", "function_call"), given, place)
        tool_calls = calls_in_text(given.get(content_key), f"{place}.{content_key}")
    elif content_key in given:
        message["content"] = _content(given[content_key], f"{place}.{content_key}")
    elif not tool_calls:
        raise BadRowError(_missing(content_key, value, place, dialect))
    if tool_calls:
        message["tool_calls"] = tool_calls
    reasoning = single_key(_REASONING, given, place)
    if reasoning is not None:
        message["reasoning_content"] = string(given[reasoning], f"{place}.{reasoning}")
    message |= {key: string(given[key], f"{place}.{key}") for key in _TEXT_KEYS if key in given}
    key = single_key(_FLAGS, given, place)
    rule = "0 or 1" if key in ("weight", "loss_weight") else "true or false"
    return Turn(place, message, None if key is None else boolean(given[key], f"{place}.{key}", rule))


def conversation(
    turns: Sequence[Turn], tools: tuple[Mapping[str, Any], ...] = (), *, name: str = "messages"
) -> Conversation:
    """Return a conversation of turns. name: the column of the messages. Raises BadRowError if no turn is
    trained on, or if a turn is at the wrong place."""
    _check_order(turns)
    messages = tuple([turn.message for turn in turns])
    flags = tuple([turn.trained for turn in turns])
    answers = [turn.trained for turn in turns if turn.message["role"] == "assistant"]
    if None not in answers and True not in flags:
        if not answers:
            raise BadRowError(f'"{name}" has no assistant turn, so there is nothing to train on')
        raise BadRowError("every assistant turn has train: false, so there is nothing to train on")
    return Conversation(messages, tools, flags if flags.count(None) < len(flags) else ())


# --- one message ------------------------------------------------------------------------------------------


def _missing(key: str, value: Mapping[str, Any], place: str, dialect: Dialect) -> str:
    if key in value:
        return f'"{place}.{key}" is null; it must be a string'
    reason = f'"{key}" is missing in "{place}", which has {quoted(value) or "no keys"}'
    if dialect is OPENAI and {"from", "value"} & value.keys():
        return f"{reason}; {_SHAREGPT_HINT.format(column=place.partition('[')[0])}"
    return reason


def _role(value: object, place: str, dialect: Dialect) -> str:
    role = dialect.roles.get(value) if isinstance(value, str) else None
    if role is not None:
        return role
    role = string(value, place)
    reason = f'"{place}" is "{role[:40]}"; the roles are {", ".join(dialect.roles)}'
    if role in _SHAREGPT_ROLES:
        reason += f"; {_SHAREGPT_HINT.format(column=place.partition('[')[0])}"
    raise BadRowError(reason)


def _checked(value: Mapping[str, Any], role: str, place: str, dialect: Dialect) -> dict[str, Any]:
    """Return a message without keys that are null, and without empty keys that are unknown or belong to
    another role. Raises BadRowError if such a key is not empty, or if synonymous keys are given."""
    given = {key: one for key, one in value.items() if one is not None}
    wrong = [key for key in given if key not in dialect.keys or _ROLE_OF_KEY.get(key, role) != role]
    unknown = [key for key in wrong if key not in dialect.keys and not is_empty(given[key])]
    if unknown:
        names = (dialect.role_keys[0], dialect.content_keys[0], "tool_calls", *_TEXT_KEYS, _REASONING[0])
        raise BadRowError(
            f'"{place}" has {quoted(unknown)}; the keys of a message are {", ".join((*names, *_FLAGS))}'
        )
    for key in wrong:
        if not is_empty(given[key]):
            raise BadRowError(
                f'"{place}" has "{key}" and the role {role}; only {_ROLE_OF_KEY[key]} messages can have it'
            )
        del given[key]
    for keys in (dialect.role_keys, dialect.content_keys):
        single_key(keys, given, place)
    return given


def _content(value: object, place: str) -> str:
    """Return a message's content: a string, or the concatenated texts of a list of parts."""
    if not isinstance(value, list):
        return string(value, place)
    return "".join(_text_part(part, f"{place}[{i}]") for i, part in enumerate(value))


def _text_part(value: object, place: str) -> str:
    part = mapping(value, place, "an object with type and text")
    kind = string(part.get("type"), f"{place}.type")
    if kind != "text":
        raise BadRowError(f'"{place}" is a part of type "{kind[:40]}"; only parts of type text are supported')
    check_keys(part, ("type", "text", "value"), place)
    given = {name: one for name, one in part.items() if one is not None}
    key = single_key(("text", "value"), given, place) or "text"
    return string(part.get(key), f"{place}.{key}")


# --- several messages -------------------------------------------------------------------------------------


def _check_order(turns: Sequence[Turn]) -> None:
    """Raise BadRowError for a system message that is not the first, or a tool result without a call."""
    before: Message | None = None  # the last message that is not a tool result
    for i, (place, message, _) in enumerate(turns):
        role = message["role"]
        if role == "tool":
            _check_result(message, before, place)
            continue
        if role == "system" and i > 0:
            raise BadRowError(f'"{place}" is a system message; it must be the first one')
        before = message


def _check_result(message: Message, before: Message | None, place: str) -> None:
    if before is None or before["role"] != "assistant":
        raise BadRowError(f'"{place}" is a tool result without an assistant turn before it that calls a tool')
    ids = {call.get("id") for call in before.get("tool_calls", ())}
    own = message.get("tool_call_id")
    if own is not None and ids and None not in ids and own not in ids:
        raise BadRowError(
            f'"{place}.tool_call_id" is "{own[:40]}"; the calls before it have {quoted(sorted(ids))}'
        )


# --- other columns ----------------------------------------------------------------------------------------


def with_system(fields: Fields, turns: list[Turn]) -> list[Turn]:
    """Return the turns, preceded by the system column's message if the row has one."""
    system, place = fields.optional("system"), fields.name("system")
    if not system:
        return turns
    if turns and turns[0].message["role"] == "system":
        if turns[0].message["content"] == system:
            return turns
        raise BadRowError(
            f'"{place}" and "{turns[0].place}" are two different system messages; leave one out'
        )
    return [Turn(place, {"role": "system", "content": system}, None), *turns]


def row_tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of the column `tools`, or `functions`, OpenAI's older name."""
    value, older = fields.get("tools"), fields.get("functions")
    if value is None and older is None:
        return ()
    if is_empty(older):
        return tools(value, fields.name("tools"))
    if not is_empty(value):
        raise BadRowError(
            f'the row has "{fields.name("tools")}" and "{fields.name("functions")}"; give one of them'
        )
    return tools(older, fields.name("functions"))


def messages(fields: Fields, column: str = "messages", dialect: Dialect = OPENAI) -> Row:
    """Convert a row of the formats messages and sharegpt."""
    name = fields.name(column)
    given = with_system(fields, turns(fields.get(column), name, dialect))
    return Row((conversation(given, row_tools(fields), name=name),))


def alpaca(fields: Fields) -> Row:
    return Row((conversation(alpaca_turns(fields, fields.string("output")), row_tools(fields)),))


def alpaca_turns(fields: Fields, *answer: str) -> list[Turn]:
    """Return the turns of an alpaca row: system, history, the instruction with its input after an empty line,
    and the answer, if given."""
    question, more = fields.string("instruction"), fields.optional("input")
    if more:
        question = f"{question}\n\n{more}" if question else more
    contents = [*_history(fields), question, *answer]
    place = fields.name("instruction")
    return with_system(fields, [alternating_turn(i, content, place) for i, content in enumerate(contents)])


def alternating_turn(number: int, content: str, place: str) -> Turn:
    """Return turn `number`, from 0, where user and assistant alternate."""
    return Turn(place, {"role": "assistant" if number % 2 else "user", "content": content}, None)


def _history(fields: Fields) -> list[str]:
    """Return alternating questions and answers from a list of [question, answer]."""
    history, name = fields.get("history"), fields.name("history")
    if history is None:
        return []
    if not isinstance(history, list):
        raise BadRowError(f'"{name}" is {json_type(history)}; it must be a list of [question, answer]')
    contents = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            what = f"a list of {len(pair)}" if isinstance(pair, list) else json_type(pair)
            raise BadRowError(f'"{name}[{i}]" is {what}; it must be [question, answer]')
        contents += [string(one, f"{name}[{i}][{j}]") for j, one in enumerate(pair)]
    return contents
