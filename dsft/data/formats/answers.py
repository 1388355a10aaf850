"""Convert rows of the formats prompt_completion, preference, kto and classify.

The prompt is not trained on, unless a message in it has a flag. All functions raise BadRowError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from dsft.data.formats.calls import tools
from dsft.data.formats.message import (
    OPENAI,
    SHAREGPT,
    Turn,
    alpaca_turns,
    alternating_turn,
    conversation,
    row_tools,
    turn,
    turns,
    with_system,
)
from dsft.data.formats.values import Fields, boolean, check_keys, is_empty, quoted, string
from dsft.data.read.json_rows import json_type
from dsft.data.rows import BadRowError, Conversation, Row, Sample, Text
from dsft.spec.document import quote
from dsft.spec.task import TASKS

_LABELS: Mapping[str, bool] = {"true": True, "false": False, "1": True, "0": False}
"""Labels in CSV, in lower case -> value."""
_PAIR = ("chosen", "rejected")
SHOWN = 10
"""Labels that a message lists."""
_PROMPT_NAMES = ("question", "query", "input")
"""Names of the prompt in files of other tools."""


def preference(fields: Fields, task: str) -> Row:
    """Return the chosen and the rejected sample, which have the same prompt: for sft only the chosen one, for
    a task of labeled answers both as records of their own."""
    if fields.get("chosen") is None and fields.get("rejected_messages") is not None:
        ours = "messages" if fields.get("chosen_messages") is None else "chosen_messages"
        names = {"chosen": fields.name(ours), "rejected": fields.name("rejected_messages")}
        fields = Fields(fields.row, {**fields.columns, **names})
    if fields.get("chosen") is None and fields.get("rejected_response") is not None:
        prompt, chosen = _last_answer(fields)
        rejected = _answer(fields.get("rejected_response"), fields.name("rejected_response"))
        pair = _conversations(prompt, (chosen, rejected), fields)
    else:
        pair = _pair(fields, task)
    if pair[0] == pair[1]:
        raise BadRowError("the chosen and the rejected answer are the same, so the pair has no preference")
    kind = TASKS[task]
    return Row(pair, {"label": (True, False)}) if kind.label == "answer" else Row(pair[: kind.rows])


def kto(fields: Fields) -> Row:
    label = {"label": (is_desirable(fields),)}
    if fields.get("completion") is not None or fields.get("prompt") is not None:
        return Row((completed(fields),), label)
    if fields.get("output") is not None or fields.get("instruction") is not None:
        place = fields.name("output")
        answer = _answer(fields.string("output"), place)
        return Row((_conversation(alpaca_turns(fields), answer, place, _tools(fields)),), label)
    prompt, answer = _last_answer(fields)
    return Row((_conversation(prompt, answer, answer[0].place, _tools(fields)),), label)


def classify(fields: Fields, labels: Sequence[str]) -> Row:
    """Return the row with the number of its label, all of it trained on; the label is not read without
    `labels`."""
    label = {"label": (class_of(fields, labels),)} if labels else {}
    keys = (one for one in ("messages", "conversations", "prompt") if fields.get(one) is not None)
    key = "text" if fields.get("text") is not None else next(keys, "text")
    value, name = fields.get(key), fields.name(key)
    if key == "prompt" and fields.get("completion") is not None:
        return Row((completed(fields),), label)
    if key == "text" or (key == "prompt" and isinstance(value, str)):
        return Row((Text(((string(value, name), True),)),), label)
    dialect = OPENAI if key == "messages" else SHAREGPT
    given = with_system(fields, turns(value, name, dialect))
    whole = conversation([turn._replace(trained=True) for turn in given], row_tools(fields), name=name)
    return Row((whole,), label)


def class_of(fields: Fields, labels: Sequence[str]) -> int:
    """Return the number of the row's label, which is given by its name or, unless a label's name is a whole
    number, by its number from 0. Raises BadRowError for another value."""
    value, name = fields.get("label"), fields.name("label")
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    if text in labels:
        return labels.index(text)
    if text is not None and text.isdecimal() and int(text) < len(labels):
        if not any(label.isdecimal() for label in labels):
            return int(text)
    found = "is missing" if value is None else f"is {quote(value, 40)}"
    shown = quoted(labels[:SHOWN]) + ", …" * (len(labels) > SHOWN)
    raise BadRowError(f'"{name}" {found}; it must be one of classify.labels: {shown}')


def is_desirable(fields: Fields) -> bool:
    """Return the row's label. Raises BadRowError unless it is true, false, 1 or 0."""
    key = "kto_tag" if fields.get("label") is None and fields.has("kto_tag") else "label"
    value, name = fields.get(key), fields.name(key)
    if isinstance(value, str):
        value = _LABELS.get(value.lower(), value)
    return boolean(value, name)


# --- one answer -------------------------------------------------------------------------------------------


def completed(fields: Fields) -> Sample:
    """Return prompt and completion as one text if both are strings, else as a conversation, in which a string
    is one turn."""
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return _text(fields, fields.string("prompt"), fields.string("completion"))
    place = fields.name("completion")
    before = with_system(fields, _prompt_turns(prompt, fields.name("prompt")))
    return _conversation(before, _answer(completion, place), place, _tools(fields))


def _text(fields: Fields, prompt: str, answer: str) -> Text:
    """Return prompt and answer as one text. Raises BadRowError if the row has a system message or tools."""
    for other in ("system", "tools", "functions"):
        if not is_empty(fields.get(other)):
            name = fields.name("prompt")
            raise BadRowError(
                f'the row has "{fields.name(other)}", but its "{name}" is a string, which is used without a '
                f"chat template; write messages, or set columns: {{instruction: {name}}} for a chat"
            )
    return Text(((prompt, False), (answer, True)))


def _conversation(
    prompt: Sequence[Turn], answer: Sequence[Turn], place: str, tools: tuple[Mapping[str, Any], ...]
) -> Conversation:
    """Return a conversation. The prompt's turns are trained on only if they have a flag that says so."""
    if not any(turn.message["role"] == "assistant" or turn.trained for turn in answer):
        raise BadRowError(f'"{place}" has no assistant turn, so there is nothing to train on')
    before = [turn._replace(trained=bool(turn.trained)) for turn in prompt]
    return conversation([*before, *answer], tools, name=place)


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of the row, or of its prompt if that is an object with tools."""
    prompt = fields.get("prompt")
    if isinstance(prompt, dict) and not is_empty(prompt.get("tools")):
        return tools(prompt["tools"], f"{fields.name('prompt')}.tools")
    return row_tools(fields)


def _prompt_turns(value: object, name: str) -> list[Turn]:
    """Return the turns of a prompt: a string, a list of messages, or an object with messages (and tools)."""
    if isinstance(value, str):
        return [alternating_turn(0, string(value, name), name)]
    if isinstance(value, dict) and "messages" in value:
        check_keys(value, ("messages", "tools", "parallel_tool_calls"), name)
        return turns(value["messages"], f"{name}.messages", SHAREGPT)
    return _turns(value, name)


def _answer(value: object, name: str) -> list[Turn]:
    """Return the turns of an answer: a string, a message, or a list of messages."""
    if isinstance(value, str):
        return [alternating_turn(1, string(value, name), name)]
    return [turn(value, name, SHAREGPT)] if isinstance(value, dict) else _turns(value, name)


def _turns(value: object, name: str) -> list[Turn]:
    if not isinstance(value, list):
        raise BadRowError(f'"{name}" is {json_type(value)}; it must be a string or a list of messages')
    return turns(value, name, SHAREGPT)


def _last_answer(fields: Fields) -> tuple[list[Turn], list[Turn]]:
    """Split `messages` or `conversations` into the prompt and the answer: the last turn, which must
    be an assistant's."""
    is_sharegpt = fields.get("messages") is None and fields.has("conversations")
    key, dialect = ("conversations", SHAREGPT) if is_sharegpt else ("messages", OPENAI)
    messages = with_system(fields, turns(fields.get(key), fields.name(key), dialect))
    place, message, _ = messages[-1]
    if message["role"] != "assistant":
        raise BadRowError(f'"{place}" is a {message["role"]} message; the last message must be the answer')
    return messages[:-1], messages[-1:]


# --- two answers ------------------------------------------------------------------------------------------


def _pair(fields: Fields, task: str) -> tuple[Sample, Sample]:
    chosen, rejected = (fields.get(key) for key in _PAIR)
    names = [fields.name(key) for key in _PAIR]
    if isinstance(chosen, list) != isinstance(rejected, list):
        found = f'"{names[0]}" is {json_type(chosen)} and "{names[1]}" is {json_type(rejected)}'
        raise BadRowError(f"{found}; they must have the same type")
    # `messages` is ignored if the answers are lists of messages, since it then repeats their content
    keys = ["prompt", "conversations", "instruction", *([] if isinstance(chosen, list) else ["messages"])]
    key = next((key for key in keys if not is_empty(fields.get(key))), None)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if key is None:
            return _common_prompt(fields, task)
        if key == "prompt" and isinstance(fields.get(key), str):
            for name in _PAIR:
                if not fields.string(name):
                    raise BadRowError(f'"{fields.name(name)}" is empty; an answer must not be empty')
            first, second = (_text(fields, fields.string(key), fields.string(name)) for name in _PAIR)
            return first, second
    answers = _answer(chosen, names[0]), _answer(rejected, names[1])
    given: list[Turn] = []
    if key == "instruction":
        given = alpaca_turns(fields)
    elif key is not None:
        given = _prompt_turns(fields.get(key), fields.name(key))
    if given and (not isinstance(chosen, list) or answers[0][0].message["role"] == "assistant"):
        return _conversations(with_system(fields, given), answers, fields)
    prompt = _common_turns(*answers)
    if not prompt:
        raise BadRowError(
            f'"{names[0]}" and "{names[1]}" begin with different messages; both must begin with the prompt '
            "or with the assistant's turn after it"
        )
    common = {_stripped(turn) for turn in prompt}
    if key is not None and not all(_stripped(turn) in common for turn in given):
        raise BadRowError(
            f'"{fields.name(key)}" differs from the prompt with which "{names[0]}" and "{names[1]}" begin'
        )
    rest = answers[0][len(prompt) :], answers[1][len(prompt) :]
    return _conversations(with_system(fields, prompt), rest, fields)


def _common_turns(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> list[Turn]:
    """Return the turns that both begin with, leaving at least one to each."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return [ours for ours, _ in takewhile(lambda pair: pair[0].message == pair[1].message, pairs)]


def _stripped(turn: Turn) -> tuple[str, str]:
    return turn.message["role"], (turn.message["content"] or "").strip()


def _common_prompt(fields: Fields, task: str) -> tuple[Sample, Sample]:
    """Return a pair of two strings that begin with their prompt: all words before the first that differs. A
    pair's loss does not depend on where in the common beginning the answers start; that of sft would."""
    texts = [fields.string(key) for key in _PAIR]
    most = min(map(len, texts)) - 1  # leave at least one character to each
    common = commonprefix([text[: max(0, most)] for text in texts])
    prompt = common.rstrip()
    if prompt == common:  # it may end within a word
        prompt, *last = common.rsplit(maxsplit=1) if common else [""]
        prompt = prompt if last else ""
    column = next((key for key in _PROMPT_NAMES if isinstance(fields.row.get(key), str)), None)
    if not prompt or column or TASKS[task].rows == 1:
        chosen, rejected = (fields.name(key) for key in _PAIR)
        way_out = (
            f"set columns: {{prompt: {column}}} for plain texts, or {{instruction: {column}}} for a chat"
            if column
            else "add the prompt that both answer; for dpo, both strings may begin with it instead"
        )
        raise BadRowError(
            f'"{chosen}" and "{rejected}" are strings without a "{fields.name("prompt")}"; {way_out}'
        )
    first, second = (_text(fields, prompt, text[len(prompt) :]) for text in texts)
    return first, second


def _conversations(
    prompt: Sequence[Turn], answers: tuple[Sequence[Turn], Sequence[Turn]], fields: Fields
) -> tuple[Sample, Sample]:
    """Return a pair of conversations. Raises BadRowError unless both answers begin with an assistant turn,
    since a pair with different prompts compares nothing."""
    tools = _tools(fields)
    for place, message, _ in (answers[0][0], answers[1][0]):
        if message["role"] != "assistant":
            raise BadRowError(
                f'"{place}" is a {message["role"]} message; the first difference between the answers of a '
                "pair must be in an assistant turn"
            )
        if is_empty(message["content"]) and "tool_calls" not in message:
            raise BadRowError(f'"{place}" is empty; an answer must not be empty')
    chosen, rejected = (_conversation(prompt, answer, answer[0].place, tools) for answer in answers)
    return chosen, rejected
