"""Convert lists of messages, in OpenAI's or ShareGPT's notation, to conversations for chat templates.

All functions raise BadRowError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dsft.data.formats.calls import calls, tools, written_calls
from dsft.data.formats.values import Fields, is_empty, is_text, listed, mapping, one_of, read_text, string
from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError, Conversation, Message

_CALL = "call"  # an assistant message whose content is the JSON of its calls
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
_KEPT = ("name", "tool_call_id")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Synonyms; `prepare_messages` passes the value to templates under each of them."""
_OF_ROLE = {
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
    def known(self) -> frozenset[str]:
        return frozenset((*self.role_keys, *self.content_keys, *_FLAGS, *_KEPT, *_OF_ROLE))


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
        value = read_text(value, place)
    if not isinstance(value, list):
        keys = f"{dialect.role_keys[0]} and {dialect.content_keys[0]}"
        raise BadRowError(f'"{place}" is {json_type(value)}; it must be a list of {keys}')
    if not value:
        raise BadRowError(f'"{place}" is an empty list; it must hold messages')
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
    said = _checked(value, role, place, dialect)
    message: dict[str, Any] = {"role": role, "content": None}
    called = calls(said, place)
    if named == _CALL:
        one_of((content_key, "tool_calls", "function_call"), said, place)
        called = written_calls(said.get(content_key), f"{place}.{content_key}")
    elif content_key in said:
        message["content"] = _content(said[content_key], f"{place}.{content_key}")
    elif not called:
        raise BadRowError(_missing(content_key, value, place, dialect))
    if called:
        message["tool_calls"] = called
    reasoning = one_of(_REASONING, said, place)
    if reasoning is not None:
        message["reasoning_content"] = string(said[reasoning], f"{place}.{reasoning}")
    message |= {key: string(said[key], f"{place}.{key}") for key in _KEPT if key in said}
    return Turn(place, message, _trained(said, place))


def conversation(
    talk: Sequence[Turn], tools: tuple[Mapping[str, Any], ...] = (), *, of: str = "messages"
) -> Conversation:
    """Return a conversation of turns. of: the row's name for its messages. Raises BadRowError if no turn is
    trained on, or if a turn is at the wrong place."""
    _check_order(talk)
    messages = tuple([turn.message for turn in talk])
    flags = tuple([turn.trained for turn in talk])
    answers = [turn.trained for turn in talk if turn.message["role"] == "assistant"]
    if None not in answers and True not in flags:
        if not answers:
            raise BadRowError(f'"{of}" has no assistant turn, so there is nothing to train on')
        raise BadRowError("every assistant turn has train: false, so there is nothing to train on")
    return Conversation(messages, tools, flags if flags.count(None) < len(flags) else ())


# --- one message ------------------------------------------------------------------------------------------


def _missing(key: str, value: Mapping[str, Any], place: str, dialect: Dialect) -> str:
    if key in value:
        return f'"{place}.{key}" is null; it must be a string'
    reason = f'"{key}" is missing in "{place}", which has {listed(value) or "no keys"}'
    if dialect is OPENAI and {"from", "value"} & value.keys():
        return f"{reason}; from and value are read with {_as_sharegpt(place)}"
    return reason


def _as_sharegpt(place: str) -> str:
    """Return what the spec should say to read the list at `place` as ShareGPT messages."""
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


def _checked(value: Mapping[str, Any], role: str, place: str, dialect: Dialect) -> dict[str, Any]:
    """Return a message without keys that are null, and without empty keys that are unknown or belong to
    another role. Raises BadRowError if such a key is not empty, or if synonymous keys are given."""
    said = {key: one for key, one in value.items() if one is not None}
    for key in [key for key in said if key not in dialect.known or _OF_ROLE.get(key, role) != role]:
        if not is_empty(said[key]):
            raise BadRowError(_unfit(said, role, place, dialect))
        del said[key]
    for keys in (dialect.role_keys, dialect.content_keys):
        one_of(keys, said, place)
    return said


def _unfit(said: Mapping[str, Any], role: str, place: str, dialect: Dialect) -> str:
    unknown = [key for key, one in said.items() if key not in dialect.known and not is_empty(one)]
    if unknown:
        return f'"{place}" has {listed(unknown)}; a message has {", ".join(_public(dialect))}'
    key, owner = next((key, _OF_ROLE[key]) for key in said if _OF_ROLE.get(key, role) != role)
    return f'"{place}" has "{key}", and its role is {role}; only {owner} messages have it'


def _public(dialect: Dialect) -> list[str]:
    own = [dialect.role_keys[0], dialect.content_keys[0]]
    return [*own, "tool_calls", *_KEPT, *_REASONING[:1], *_FLAGS]


def _content(value: object, place: str) -> str:
    """Return a message's content: a string, or the concatenated texts of a list of parts."""
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
    key = one_of(_FLAGS, said, place)
    if key is None:
        return None
    value = said[key]
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    shown = value if isinstance(value, (int, float)) else json_type(value)
    rule = "0 or 1" if key == "weight" else "true or false"
    raise BadRowError(f'"{place}.{key}" is {shown}; it must be {rule}')


# --- several messages -------------------------------------------------------------------------------------


def _check_order(talk: Sequence[Turn]) -> None:
    """Raise BadRowError for a system message that is not the first, or a tool result without a call."""
    before: Message | None = None  # the last message that is not a tool result
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
            f'"{place}.tool_call_id" is "{own[:40]}"; the calls before it have {listed(sorted(ids))}'
        )


# --- other columns ----------------------------------------------------------------------------------------


def with_system(fields: Fields, talk: list[Turn]) -> list[Turn]:
    """Return the turns, preceded by the system column's message if the row has one."""
    system, place = fields.optional("system"), fields.name("system")
    if not system:
        return talk
    if talk and talk[0].message["role"] == "system":
        if talk[0].message["content"] == system:
            return talk
        raise BadRowError(
            f'"{place}" and "{talk[0].place}" are two system messages that differ; leave one out'
        )
    return [Turn(place, {"role": "system", "content": system}, None), *talk]


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


def alpaca_turns(fields: Fields, *answer: str) -> list[Turn]:
    """Return the turns of an alpaca row: system, history, the instruction with its input after an empty line,
    and the answer, if given."""
    question, more = fields.string("instruction"), fields.optional("input")
    if more:
        question = f"{question}\n\n{more}" if question else more
    said = [*_history(fields), question, *answer]
    place = fields.name("instruction")
    return with_system(fields, [said_by(i, content, place) for i, content in enumerate(said)])


def said_by(number: int, content: str, place: str) -> Turn:
    """Return turn `number`, from 0, where user and assistant alternate."""
    return Turn(place, {"role": "assistant" if number % 2 else "user", "content": content}, None)


def _history(fields: Fields) -> list[str]:
    """Return alternating questions and answers from a list of [question, answer]."""
    history, name = fields.get("history"), fields.name("history")
    if history is None:
        return []
    if not isinstance(history, list):
        raise BadRowError(f'"{name}" is {json_type(history)}; it must be a list of [question, answer]')
    said = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            what = f"a list of {len(pair)}" if isinstance(pair, list) else json_type(pair)
            raise BadRowError(f'"{name}[{i}]" is {what}; it must be [question, answer]')
        said += [string(one, f"{name}[{i}][{j}]") for j, one in enumerate(pair)]
    return said
