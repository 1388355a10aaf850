"""Prompts with an answer, with two to choose between, or with one that is labelled.

Takes a row's fields. Gives Rows in which the prompt is not trained on, unless a message of it says so. Raises
BadRowError. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsft.data.formats.message import SHAREGPT, Turn, conversation, tools, turn, turns
from dsft.data.formats.talk import alpaca_turns, said_by, with_system
from dsft.data.formats.values import Fields, is_empty, string
from dsft.data.read.json_rows import kind
from dsft.data.rows import BadRowError, Conversation, Row, Sample, Text

_LABELS: Mapping[str, bool] = {"true": True, "false": False, "1": True, "0": False}
"""As CSV writes them, in any case."""


def prompt_completion(fields: Fields) -> Row:
    return Row((_completed(fields),))


def preference(fields: Fields) -> Row:
    """The chosen and the rejected sample, which begin with the same prompt."""
    if fields.get("rejected_response") is not None and fields.get("chosen") is None:
        pair = _replaced_answer(fields)
    else:
        pair = _pair(fields)
    if pair[0] == pair[1]:
        raise BadRowError("the chosen and the rejected answer are the same, so there is nothing to prefer")
    return Row(pair)


def kto(fields: Fields) -> Row:
    label = _label(fields)
    if fields.get("completion") is not None:
        return Row((_completed(fields),), label)
    if fields.get("output") is not None:
        question, answer = alpaca_turns(fields), fields.string("output")
        return Row((_talk(question, [_said(answer, fields.name("output"))]),), label)
    key = next(key for key in ("messages", "conversations") if fields.get(key) is not None)
    prompt, answer_turns = _last_answer(fields, key)
    return Row((_talk(prompt, answer_turns, _tools(fields)),), label)


# --- one answer -------------------------------------------------------------------------------------------


def _completed(fields: Fields) -> Sample:
    """Strings are one text as they stand; messages are a conversation, in which a string is one turn."""
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return _text(fields.string("prompt"), fields.string("completion"))
    question = with_system(fields, _question(prompt, fields.name("prompt")))
    return _talk(question, _answer(completion, fields.name("completion")), _tools(fields))


def _text(prompt: str, answer: str) -> Text:
    return Text(((prompt, False), (answer, True)))


def _talk(prompt: Sequence[Turn], answer: Sequence[Turn], tools: Any = ()) -> Conversation:
    """The prompt's turns are not trained on but where they say so."""
    asked = [turn._replace(trained=bool(turn.trained)) for turn in prompt]
    return conversation([*asked, *answer], tools, of=answer[0].place if answer else "completion")


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    return tools(fields.get("tools"), fields.name("tools"))


def _question(value: object, name: str) -> list[Turn]:
    return [said_by(0, string(value, name), name)] if isinstance(value, str) else _listed(value, name)


def _answer(value: object, name: str) -> list[Turn]:
    """An answer: a string, a message, or a list of messages."""
    if isinstance(value, str):
        return [_said(string(value, name), name)]
    return [turn(value, name, SHAREGPT)] if isinstance(value, dict) else _listed(value, name)


def _said(answer: str, place: str) -> Turn:
    return said_by(1, answer, place)


def _listed(value: object, name: str) -> list[Turn]:
    if not isinstance(value, list):
        raise BadRowError(f'"{name}" is {kind(value)}; it must be a string or a list of messages')
    if not value:
        raise BadRowError(f'"{name}" is an empty list; it must hold messages')
    return turns(value, name, SHAREGPT)


def _last_answer(fields: Fields, key: str) -> tuple[list[Turn], list[Turn]]:
    """The last message of a list, which is the assistant's, and what stands before it."""
    name = fields.name(key)
    talk = with_system(fields, _listed(fields.get(key), name))
    if talk[-1].message["role"] != "assistant":
        raise BadRowError(
            f'"{talk[-1].place}" is a {talk[-1].message["role"]} message; the last one must be the answer'
        )
    return talk[:-1], talk[-1:]


def _label(fields: Fields) -> bool:
    key = "kto_tag" if fields.get("label") is None and fields.has("kto_tag") else "label"
    value, name = fields.get(key), fields.name(key)
    if isinstance(value, str):
        value = _LABELS.get(value.lower(), value)
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    shown = value if isinstance(value, (int, float)) else kind(value)
    raise BadRowError(f'"{name}" is {shown}; it must be true or false, or 1 or 0')


# --- two answers ------------------------------------------------------------------------------------------


def _replaced_answer(fields: Fields) -> tuple[Sample, Sample]:
    """messages that end with the chosen answer, and the rejected one beside them."""
    prompt, chosen = _last_answer(fields, "messages")
    name = fields.name("rejected_response")
    return _talks(prompt, chosen, _answer(fields.get("rejected_response"), name), fields)


def _pair(fields: Fields) -> tuple[Sample, Sample]:
    names = fields.name("chosen"), fields.name("rejected")
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadRowError(
            f'"{names[0]}" is {kind(chosen)} and "{names[1]}" is {kind(rejected)}; they must be of one kind'
        )
    key = _prompt_key(fields, chosen)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if key is None:
            raise BadRowError(
                f'"{names[0]}" and "{names[1]}" are strings, and no "{fields.name("prompt")}" stands '
                "beside them"
            )
        if key == "prompt" and isinstance(fields.get("prompt"), str):
            return _texts(fields)
    answers = [_answer(one, name) for one, name in zip((chosen, rejected), names, strict=True)]
    same = _common(*answers) if isinstance(chosen, list) else 0
    asked = _prompt(fields, key)
    if same:
        _check_prompt(fields, key, asked, answers[0][:same])
        asked = answers[0][:same]
    if not asked:
        raise BadRowError(
            f'"{names[0]}" and "{names[1]}" begin with different messages, and no '
            f'"{fields.name("prompt")}" stands beside them'
        )
    return _talks(with_system(fields, asked), answers[0][same:], answers[1][same:], fields)


def _prompt_key(fields: Fields, chosen: object) -> str | None:
    """What holds the prompt. Beside lists of messages `messages` is another telling of the same."""
    keys = ["prompt", "conversations", "instruction", *([] if isinstance(chosen, list) else ["messages"])]
    return next((key for key in keys if not is_empty(fields.get(key))), None)


def _prompt(fields: Fields, key: str | None) -> list[Turn]:
    if key is None:
        return []
    if key == "instruction":
        # the system's message is laid before it with the others
        return [turn for turn in alpaca_turns(fields) if turn.message["role"] != "system"]
    return _question(fields.get(key), fields.name(key))


def _common(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> int:
    """How many messages both begin with."""
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one.message != other.message:
            break
        same += 1
    if same and same in (len(chosen), len(rejected)):
        # one is the other's beginning, or both are the same: the answer begins with its last assistant turn
        same = len(chosen[:same]) - 1
    return same


def _check_prompt(fields: Fields, key: str | None, asked: Sequence[Turn], common: Sequence[Turn]) -> None:
    """A prompt that stands beside answers that begin with it says the same."""
    said = [turn.message for turn in common]
    if key is None or all(turn.message in said for turn in asked):
        return
    raise BadRowError(
        f'"{fields.name(key)}" is not what "{fields.name("chosen")}" and "{fields.name("rejected")}" '
        "begin with"
    )


def _texts(fields: Fields) -> tuple[Sample, Sample]:
    prompt = fields.string("prompt")
    for key in ("chosen", "rejected"):
        if not fields.string(key):
            raise BadRowError(f'"{fields.name(key)}" is empty; an answer must say something')
    return _text(prompt, fields.string("chosen")), _text(prompt, fields.string("rejected"))


def _talks(
    prompt: Sequence[Turn], chosen: Sequence[Turn], rejected: Sequence[Turn], fields: Fields
) -> tuple[Sample, Sample]:
    for answer in (chosen, rejected):
        _check_answer(answer)
    tools = _tools(fields)
    return _talk(prompt, chosen, tools), _talk(prompt, rejected, tools)


def _check_answer(answer: Sequence[Turn]) -> None:
    place, message, _ = answer[0]
    if message["role"] != "assistant":
        raise BadRowError(
            f'"{place}" is a {message["role"]} message; the answers must differ first in an assistant turn'
        )
    if all(is_empty(turn.message["content"]) and "tool_calls" not in turn.message for turn in answer):
        raise BadRowError(f'"{place}" is empty; an answer must say something')
