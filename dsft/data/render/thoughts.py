"""Thoughts of answers: take them out of a row's messages, and write them around what a template writes.

Templates of reasoning models drop the thoughts of earlier turns, and many open a thought in the generation
prompt that a row's answer may not have. So a row's messages are rendered without the thoughts, and each is
inserted where the generation prompt before its turn begins one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal

from dsft.data.render.template import ChatTemplate, prepare_messages
from dsft.data.rows import BadRowError, Message

Thinking = Literal["as_in_template", "empty", "strip", "keep"]

OPEN, CLOSE = "<think>", "</think>"
_NAMES = ("reasoning_content", "reasoning", "thinking")
_WRITTEN = re.compile(rf"\s*(?:{OPEN})?((?:(?!{OPEN}).)*?){CLOSE}\n*", re.DOTALL)
"""A thought at the start of a content; its opening may have been in the generation prompt."""


def split_thought(message: Message) -> tuple[str, Message]:
    """Return an answer's thought, "" if it has none, and the answer without it. Raises BadRowError if the end
    of a thought is left in it, since templates leave out what is before that."""
    rest = {key: value for key, value in message.items() if key not in _NAMES}
    thought = next((message[name] for name in _NAMES if message.get(name) is not None), "")
    content = rest.get("content")
    if isinstance(content, str) and CLOSE in content:
        found = None if thought else _WRITTEN.match(content)
        if found is None or CLOSE in content[found.end() :]:
            raise BadRowError(
                f"an answer has {CLOSE} after its thought; remove it, or set data.thinking: as_in_template"
            )
        thought, rest["content"] = found[1], content[found.end() :]
    return thought.strip("\n"), rest


def thought_in_content(message: Message) -> Message:
    """Return an answer whose thought, if it is apart, is in the content, for templates that look for it
    there."""
    if not any(message.get(name) for name in _NAMES):
        return message
    thought, rest = split_thought(message)
    return {**rest, "content": f"{OPEN}\n{thought}\n{CLOSE}\n\n{rest.get('content') or ''}"}


@dataclass(frozen=True)
class ThoughtMarkup:
    """What a template writes around thoughts.

    opening     the generation prompt's text from <think> on: "", <think>, or a whole empty thought
    empty       the empty thought that it writes before an answer without one at the end; "": none
    start, end  before and after a thought
    """

    opening: str
    empty: str
    start: str
    end: str

    def block(self, thought: str, opening: str) -> str:
        """Return what precedes the words of an answer. opening: as of this turn's generation prompt, which
        may have none after the result of a tool."""
        if thought:
            return self.start + thought + self.end
        if CLOSE in opening:
            return self.empty if self.empty.startswith(opening) else opening
        if opening:  # the line break of the opening is its last token; two would be another token
            return opening + self.end.lstrip("\n")
        return "" if self.opening else self.empty or self.start + self.end


def find_markup(template: ChatTemplate, probe: Callable[..., tuple[str, Any]]) -> ThoughtMarkup | None:
    """Return what a template writes around thoughts; None if it writes none, or marks its turns itself.
    probe: renders a short conversation."""
    if template.is_marked or CLOSE not in template.text and OPEN not in template.text:
        return None

    question: Message = {"role": "user", "content": "0"}

    def answered(content: str, **more: str) -> str:
        text = probe(prepare_messages([question, {"role": "assistant", "content": content, **more}]))[0]
        return text[len(header) :] if text.startswith(header) else ""

    def apart(content: str, thought: str) -> str:
        return answered(content, reasoning_content=thought)

    def in_content(content: str, thought: str) -> str:
        return answered(f"{OPEN}\n{thought}\n{CLOSE}\n\n{content}")

    try:
        header, prompt = probe([question])[0], probe([question], prompt=True)[0]
        at = prompt.find(OPEN, len(header) if prompt.startswith(header) else 0)
        opening = prompt[at:] if at >= 0 else ""
        header = prompt.removesuffix(opening)
        empty = commonprefix([answered("1"), answered("2")])
        start, end = f"{OPEN}\n", f"\n{CLOSE}\n\n"
        for written in (in_content, apart):
            before = commonprefix([written("1", "3"), written("1", "4")])
            after = commonprefix([written(content, "3")[len(before) + 1 :] for content in "12"])
            if OPEN in before and CLOSE in after:
                start, end = before, after
    except BadRowError:
        return None  # the first row has the reason
    if CLOSE not in opening and not start.startswith(opening):
        start = opening
    return ThoughtMarkup(opening, empty if CLOSE in empty else "", start, end)
