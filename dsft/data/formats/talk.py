"""Read the columns of a row besides its messages: system, tools, and the turns of alpaca rows.

All functions raise BadRowError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsft.data.formats.calls import tools
from dsft.data.formats.message import Turn
from dsft.data.formats.values import Fields, is_empty, string
from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError


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
