"""Convert rows of the formats prompt_completion, preference and kto.

The prompt is not trained on, unless a message in it has a flag. All functions raise BadRowError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from dsft.data.formats.calls import tools
from dsft.data.formats.message import (
    OPENAI,
    SHAREGPT,
    Dialect,
    Turn,
    alpaca_turns,
    conversation,
    row_tools,
    said_by,
    turn,
    turns,
    with_system,
)
from dsft.data.formats.values import Fields, is_empty, only, string
from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError, Conversation, Row, Sample, Text
from dsft.spec.task import TASKS

_LABELS: Mapping[str, bool] = {"true": True, "false": False, "1": True, "0": False}
"""Labels in CSV, in lower case -> value."""
_PAIR = ("chosen", "rejected")
_ASKED = ("question", "query", "input")
"""Names of the prompt in files of other tools."""


def prompt_completion(fields: Fields) -> Row:
    return Row((_completed(fields),))


def preference(fields: Fields, task: str = "dpo") -> Row:
    """Return the chosen and the rejected sample, which have the same prompt; for sft, only the chosen one."""
    if fields.get("chosen") is None and fields.get("rejected_messages") is not None:
        names = {"chosen": fields.name("messages"), "rejected": fields.name("rejected_messages")}
        fields = Fields(fields.row, {**fields.columns, **names})
    is_replaced = fields.get("chosen") is None and fields.get("rejected_response") is not None
    pair = _replaced_answer(fields) if is_replaced else _pair(fields, task)
    if pair[0] == pair[1]:
        raise BadRowError("the chosen and the rejected answer are the same, so there is nothing to prefer")
    return Row(pair[: TASKS[task].rows])


def kto(fields: Fields) -> Row:
    label = is_desirable(fields)
    if fields.get("completion") is not None or fields.get("prompt") is not None:
        return Row((_completed(fields),), label)
    if fields.get("output") is not None or fields.get("instruction") is not None:
        place = fields.name("output")
        answer = _answer(fields.string("output"), place)
        return Row((_talk(alpaca_turns(fields), answer, place, _tools(fields)),), label)
    prompt, answer = _last_answer(fields)
    return Row((_talk(prompt, answer, answer[0].place, _tools(fields)),), label)


def is_desirable(fields: Fields) -> bool:
    """Return the row's label. Raises BadRowError unless it is true, false, 1 or 0."""
    key = "kto_tag" if fields.get("label") is None and fields.has("kto_tag") else "label"
    value, name = fields.get(key), fields.name(key)
    if isinstance(value, str):
        value = _LABELS.get(value.lower(), value)
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    shown = value if isinstance(value, (int, float)) else json_type(value)
    raise BadRowError(f'"{name}" is {shown}; it must be true or false, or 1 or 0')


# --- one answer -------------------------------------------------------------------------------------------


def _completed(fields: Fields) -> Sample:
    """Return prompt and completion as one text if both are strings, else as a conversation, in which a string
    is one turn."""
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return _text(fields, fields.string("prompt"), fields.string("completion"))
    place = fields.name("completion")
    asked = with_system(fields, _question(prompt, fields.name("prompt")))
    return _talk(asked, _answer(completion, place), place, _tools(fields))


def _text(fields: Fields, prompt: str, answer: str) -> Text:
    """Return prompt and answer as one text. Raises BadRowError if the row has a system message or tools."""
    for other in ("system", "tools", "functions"):
        if not is_empty(fields.get(other)):
            name = fields.name("prompt")
            raise BadRowError(
                f'"{fields.name(other)}" stands beside a "{name}" that is a string, which is read as it '
                f"stands; write messages, or columns: {{instruction: {name}}} for a chat"
            )
    return Text(((prompt, False), (answer, True)))


def _talk(
    prompt: Sequence[Turn], answer: Sequence[Turn], place: str, tools: tuple[Mapping[str, Any], ...]
) -> Conversation:
    """Return a conversation. The prompt's turns are trained on only if they have a flag that says so."""
    if not any(turn.message["role"] == "assistant" or turn.trained for turn in answer):
        raise BadRowError(f'"{place}" has no assistant turn, so there is nothing to train on')
    asked = [turn._replace(trained=bool(turn.trained)) for turn in prompt]
    return conversation([*asked, *answer], tools, of=place)


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of the row, or of its prompt if that is an object with tools."""
    prompt = fields.get("prompt")
    if isinstance(prompt, dict) and not is_empty(prompt.get("tools")):
        return tools(prompt["tools"], f"{fields.name('prompt')}.tools")
    return row_tools(fields)


def _question(value: object, name: str) -> list[Turn]:
    """Return the turns of a prompt: a string, a list of messages, or an object with messages (and tools)."""
    if isinstance(value, str):
        return [said_by(0, string(value, name), name)]
    if isinstance(value, dict) and "messages" in value:
        only(value, ("messages", "tools", "parallel_tool_calls"), name)
        return turns(value["messages"], f"{name}.messages", SHAREGPT)
    return _listed(value, name, SHAREGPT)


def _answer(value: object, name: str) -> list[Turn]:
    """Return the turns of an answer: a string, a message, or a list of messages."""
    if isinstance(value, str):
        return [said_by(1, string(value, name), name)]
    return [turn(value, name, SHAREGPT)] if isinstance(value, dict) else _listed(value, name, SHAREGPT)


def _listed(value: object, name: str, dialect: Dialect) -> list[Turn]:
    if not isinstance(value, list):
        raise BadRowError(f'"{name}" is {json_type(value)}; it must be a string or a list of messages')
    return turns(value, name, dialect)


def _last_answer(fields: Fields) -> tuple[list[Turn], list[Turn]]:
    """Split `messages` or `conversations` into the prompt and the answer: the last turn, which must
    be an assistant's."""
    is_sharegpt = fields.get("messages") is None and fields.has("conversations")
    key, dialect = ("conversations", SHAREGPT) if is_sharegpt else ("messages", OPENAI)
    talk = with_system(fields, turns(fields.get(key), fields.name(key), dialect))
    place, message, _ = talk[-1]
    if message["role"] != "assistant":
        raise BadRowError(f'"{place}" is a {message["role"]} message; the last one must be the answer')
    return talk[:-1], talk[-1:]


# --- two answers ------------------------------------------------------------------------------------------


def _replaced_answer(fields: Fields) -> tuple[Sample, Sample]:
    """Return a pair from messages that end with the chosen answer, and a column with the rejected one."""
    prompt, chosen = _last_answer(fields)
    name = fields.name("rejected_response")
    return _talks(prompt, (chosen, _answer(fields.get("rejected_response"), name)), fields)


def _pair(fields: Fields, task: str) -> tuple[Sample, Sample]:
    chosen, rejected = (fields.get(key) for key in _PAIR)
    names = [fields.name(key) for key in _PAIR]
    if isinstance(chosen, list) != isinstance(rejected, list):
        said = f'"{names[0]}" is {json_type(chosen)} and "{names[1]}" is {json_type(rejected)}'
        raise BadRowError(f"{said}; they must be of one kind")
    key = _prompt_key(fields, chosen)
    is_text = isinstance(chosen, str) and isinstance(rejected, str)
    if is_text and key == "prompt" and isinstance(fields.get("prompt"), str):
        return _texts(fields)
    if is_text and key is None:
        return _begun_alike(fields, task)
    answers = _answer(chosen, names[0]), _answer(rejected, names[1])
    asked = _prompt(fields, key)
    if asked and (not isinstance(chosen, list) or answers[0][0].message["role"] == "assistant"):
        return _talks(with_system(fields, asked), answers, fields)
    same = _common(*answers)
    if not same:
        said = f'"{names[0]}" and "{names[1]}" begin with different messages'
        raise BadRowError(f"{said}; answers begin with their prompt, or with the assistant's turn after it")
    prompt = answers[0][:same]
    _check_prompt(fields, key, asked, prompt)
    return _talks(with_system(fields, prompt), (answers[0][same:], answers[1][same:]), fields)


def _no_prompt(fields: Fields) -> str:
    meant = next((key for key in _ASKED if isinstance(fields.row.get(key), str)), None)
    way_out = (
        f"write columns: {{prompt: {meant}}} for texts as they stand, or {{instruction: {meant}}} for a chat"
        if meant
        else "a row of strings needs the prompt that both answer, or for dpo begins with it in both"
    )
    chosen, rejected = (fields.name(key) for key in _PAIR)
    return f'"{chosen}" and "{rejected}" are strings without a "{fields.name("prompt")}"; {way_out}'


def _prompt_key(fields: Fields, chosen: object) -> str | None:
    """Return the column with the prompt. `messages` is ignored if the answers are lists of messages, since it
    then repeats their content."""
    keys = ["prompt", "conversations", "instruction", *([] if isinstance(chosen, list) else ["messages"])]
    return next((key for key in keys if not is_empty(fields.get(key))), None)


def _prompt(fields: Fields, key: str | None) -> list[Turn]:
    if key is None:
        return []
    if key == "instruction":
        return alpaca_turns(fields)
    return _question(fields.get(key), fields.name(key))


def _common(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> int:
    """Return the number of messages that both begin with, leaving at least one to each."""
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same].message == rejected[same].message:
        same += 1
    return same


def _check_prompt(fields: Fields, key: str | None, asked: Sequence[Turn], common: Sequence[Turn]) -> None:
    """Raise BadRowError if a prompt column differs from the prompt that the answers begin with."""
    said = {_stripped(turn) for turn in common}
    if key is not None and not all(_stripped(turn) in said for turn in asked):
        chosen, rejected = (fields.name(key) for key in _PAIR)
        raise BadRowError(f'"{fields.name(key)}" is not what "{chosen}" and "{rejected}" begin with')


def _stripped(turn: Turn) -> tuple[str, str]:
    return turn.message["role"], (turn.message["content"] or "").strip()


def _texts(fields: Fields) -> tuple[Sample, Sample]:
    for key in _PAIR:
        if not fields.string(key):
            raise BadRowError(f'"{fields.name(key)}" is empty; an answer must say something')
    chosen, rejected = (_text(fields, fields.string("prompt"), fields.string(key)) for key in _PAIR)
    return chosen, rejected


def _begun_alike(fields: Fields, task: str) -> tuple[Sample, Sample]:
    """Return a pair of two strings that begin with their prompt: all words before the first that differs. A
    pair's loss does not depend on where in the common beginning the answers start; that of sft would."""
    texts = [fields.string(key) for key in _PAIR]
    most = min(map(len, texts)) - 1  # leave at least one character to each
    common = commonprefix([text[: max(0, most)] for text in texts])
    prompt = common.rstrip()
    if prompt == common:  # it may end within a word
        prompt, *last = common.rsplit(maxsplit=1) if common else [""]
        prompt = prompt if last else ""
    named = any(isinstance(fields.row.get(key), str) for key in _ASKED)
    if not prompt or named or TASKS[task].rows == 1:
        raise BadRowError(_no_prompt(fields))
    chosen, rejected = (_text(fields, prompt, text[len(prompt) :]) for text in texts)
    return chosen, rejected


def _talks(
    prompt: Sequence[Turn], answers: tuple[Sequence[Turn], Sequence[Turn]], fields: Fields
) -> tuple[Sample, Sample]:
    """Return a pair of conversations. Raises BadRowError unless both answers begin with an assistant turn,
    since a pair with different prompts compares nothing."""
    tools = _tools(fields)
    for place, message, _ in (answers[0][0], answers[1][0]):
        if message["role"] != "assistant":
            raise BadRowError(
                f'"{place}" is a {message["role"]} message; a pair must differ first in an assistant turn'
            )
        if is_empty(message["content"]) and "tool_calls" not in message:
            raise BadRowError(f'"{place}" is empty; an answer must say something')
    chosen, rejected = (_talk(prompt, answer, answer[0].place, tools) for answer in answers)
    return chosen, rejected
