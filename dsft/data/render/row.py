"""A row's messages as its template renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any

from dsft.data.render.template import ChatTemplate, Marks
from dsft.data.render.thoughts import CLOSE, ThoughtMarkup
from dsft.data.rows import BadRowError, EndlessTemplateError, Message

EXCERPT = 30  # characters shown of a rendered row
WAY_OUT = (
    "set data.chat_template to a template with {% generation %} marks around the assistant's turns: one of "
    "dsft's, or a file"
)


@dataclass(frozen=True)
class TemplatedRow:
    """Messages and tools. thoughts: turn -> the thought that is written before its words with `markup`, and
    which its message does not have."""

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    template: ChatTemplate
    thoughts: Mapping[int, str] = field(default_factory=dict)
    markup: ThoughtMarkup | None = None
    _rendered: dict[tuple[int, bool], tuple[str, Marks]] = field(default_factory=dict, init=False)

    def render(self, count: int, *, prompt: bool = False) -> tuple[str, Marks]:
        """Render the first `count` messages."""
        text, marks = self._without_thoughts(count, prompt)
        if self.markup is None:
            return text, marks
        pieces, position = [], 0
        for number, thought in self.thoughts.items():
            if number >= count:
                break
            before, _ = self._without_thoughts(number, True)
            opening = self.markup.opening if before.endswith(self.markup.opening) else ""
            header = before.removesuffix(opening)
            if not text.startswith(header):
                raise self._rewritten(number, text, header, prompt=True)
            start, empty = len(header), self.markup.empty
            pieces += [text[position:start], self.markup.block(thought, opening)]
            position = start + len(empty) if text.startswith(empty, start) else start
        return "".join([*pieces, text[position:]]), marks

    def _without_thoughts(self, count: int, prompt: bool) -> tuple[str, Marks]:
        if self.markup is None:
            return self.template.render(self.messages[:count], self.tools, prompt=prompt)
        if (count, prompt) not in self._rendered:
            self._rendered[count, prompt] = self.template.render(
                self.messages[:count], self.tools, prompt=prompt
            )
        return self._rendered[count, prompt]

    @property
    def or_last(self) -> str:
        """The ways out if the template rewrites earlier turns."""
        keep = "keep the thoughts of all turns (data.thinking: keep), " if CLOSE in self.template.text else ""
        return f"train only on the last turn (data.train_on: last), {keep}or {WAY_OUT}"

    def prefix(self, count: int, text: str, *, prompt: bool = False) -> int:
        """Return the length of the first `count` messages rendered, with which the text must begin."""
        before, _ = self.render(count, prompt=prompt)
        if text.startswith(before):
            return len(before)
        raise self._rewritten(count, text, before, prompt=prompt)

    def _rewritten(self, count: int, text: str, before: str, *, prompt: bool) -> BadRowError:
        same = len(commonprefix([text, before]))
        alone, inside = before[same : same + EXCERPT], text[same : same + EXCERPT]
        when = "before this answer at inference" if prompt else "if the conversation ends with it"
        number = count + 1 if prompt else count
        # if the messages match without the prompt, only the prompt differs; else an earlier turn is rewritten
        is_prompt = prompt and text.startswith(self._without_thoughts(count, False)[0])
        way_out = WAY_OUT if is_prompt else self.or_last
        if self.markup is not None and CLOSE in self.markup.opening and self.thoughts.get(count):
            way_out = f"train without thoughts (data.thinking: strip), or {WAY_OUT}"
        return BadRowError(
            f"turn {number}: the chat template writes {alone!r} {when}, but {inside!r} in the row, so the "
            f"model would be trained on a prompt that it never gets; {way_out}"
        )


def speaks_beside_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) and bool((message.get("content") or "").strip())


def with_arguments(row: TemplatedRow) -> TemplatedRow:
    """Return the row with call arguments as the template takes them: mappings, or JSON text (DeepSeek's)."""
    try:
        row.render(len(row.messages))
    except EndlessTemplateError:
        raise
    except BadRowError:
        as_text = replace(row, messages=[_with_text_arguments(message) for message in row.messages])
        try:
            as_text.render(len(row.messages))
        except BadRowError:
            return row
        return as_text
    return row


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message
