"""From a row to what it says, by the format of its file.

Takes rows as JSON has them. Gives Rows. Raises BadRowError. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsft.data.formats.answers import kto, preference, prompt_completion
from dsft.data.formats.calls import tools
from dsft.data.formats.detect import Format, check_row
from dsft.data.formats.message import OPENAI, SHAREGPT, conversation, turns
from dsft.data.formats.talk import alpaca_turns, with_system
from dsft.data.formats.values import Fields
from dsft.data.rows import BadRowError, Row, Text


def convert(row: Mapping[str, Any], found: Format) -> Row:
    """Raises BadRowError where the row is not what its file's format says.

    A preference pair gives both samples for task dpo, and for sft the chosen one alone.
    """
    fields = Fields(row, found.columns)
    check_row(fields, found)
    try:
        made = _CONVERT[found.name](fields)
    except RecursionError:
        raise BadRowError("nested too deeply to be read") from None
    return Row(made.samples[:1], made.label) if found.task == "sft" and len(made.samples) > 1 else made


def _text(fields: Fields) -> Row:
    return Row((Text(((fields.string("text"), True),)),))


def _messages(fields: Fields) -> Row:
    name = fields.name("messages")
    talk = with_system(fields, turns(fields.get("messages"), name, OPENAI))
    return Row((conversation(talk, tools(fields.get("tools"), fields.name("tools")), of=name),))


def _sharegpt(fields: Fields) -> Row:
    name = fields.name("conversations")
    talk = with_system(fields, turns(fields.get("conversations"), name, SHAREGPT))
    return Row((conversation(talk, tools(fields.get("tools"), fields.name("tools")), of=name),))


def _alpaca(fields: Fields) -> Row:
    talk = alpaca_turns(fields, fields.string("output"))
    return Row((conversation(talk, tools(fields.get("tools"), fields.name("tools"))),))


_CONVERT: Mapping[str, Callable[[Fields], Row]] = {
    "text": _text,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": prompt_completion,
    "preference": preference,
    "kto": kto,
}
