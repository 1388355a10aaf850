"""From rows to tokens, and which of them are trained on.

Takes rows and a tokenizer. Gives token ids and a mask of the same length. Touches nothing.

Of a conversation the assistant's turns are trained on, with the token that ends them. Where the chat
template marks them (`{% generation %}`), the marks are taken. Where it does not, a turn begins after the
generation prompt, which is what the model is given when it is used: the template renders the messages before
the turn with that prompt, and both the text and its tokens must begin the row. The turn ends where what the
template writes after the content begins, found by rendering the row once more with another content; of that
it holds everything up to the first special token. The row's own text is never searched.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dsft.data.rows import Conversation, Message, Rendered, Sample, Text
from dsft.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_EXCERPT = 30  # characters shown of a rendered row
_BATCH = 1000  # rows tokenised in one call
_WAY_OUT = "give data.chat_template a template with {% generation %} marks around the assistant's turns"
_MERGED = (
    "{name}: the tokenizer makes one token of its first or last characters and what the template writes "
    "beside them, which the model would never be given; let the content not begin with white space"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, with what is needed to find the assistant's turns in what it writes."""

    tokenizer: PreTrainedTokenizerBase
    text: str
    end_of_turn: str
    """What ends a turn, its last special token included; empty where the template has generation marks."""

    @property
    def is_marked(self) -> bool:
        return _GENERATION.search(self.text) is not None

    def render(
        self, messages: Sequence[Message], *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the (start, stop) characters of what is marked in it.

        Raises jinja2.TemplateError where the template refuses the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        special_tokens: dict[str, Any] = self.tokenizer.special_tokens_map
        # annotated as -> str in transformers 5.23; it returns (texts, marks of each text)
        result: Any = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=self.text,
            return_assistant_tokens_mask=self.is_marked,
            add_generation_prompt=prompt,
            **special_tokens,
        )
        texts, marks = result
        return texts[0], marks[0] if marks else []


class _UnrenderableError(Exception):
    """The reason alone; whoever catches it knows the row."""


def chat_template(tokenizer: PreTrainedTokenizerBase, text: str | None = None) -> ChatTemplate:
    """The template `text`, or the tokenizer's own. Raises DataError where there is none that can be used."""
    text = text if text is not None else tokenizer.chat_template
    if not isinstance(text, str):
        raise _template_error(
            "the tokenizer has none" if text is None else "the tokenizer has several and none is chosen",
            "name a Jinja file with data.chat_template, take the tokenizer of the model's chat version with "
            "model.tokenizer, or train on text rows",
        )
    template = ChatTemplate(tokenizer, text, end_of_turn="")
    return template if template.is_marked else replace(template, end_of_turn=_end_of_turn(template))


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its chat template, or with `template` in its place. Can be sent to another process.

    digest: of all that decides which tokens a row becomes."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None

    @cached_property
    def digest(self) -> str:
        import tokenizers
        import transformers

        tokenizer: Any = self.tokenizer
        said = [
            tokenizer.backend_tokenizer.to_str(),
            type(tokenizer).__name__,
            tokenizer.special_tokens_map,
            self._template_text,
            tokenizers.__version__,
            transformers.__version__,
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()

    def render(self, samples: Sequence[Sample]) -> list[Rendered | str]:
        """Of each sample its tokens, or why the template refuses it.

        Raises DataError where the tokenizer has no template that can be used, or no token that ends a text.
        """
        rendered: list[Rendered | str] = [""] * len(samples)
        texts = [i for i, sample in enumerate(samples) if isinstance(sample, Text)]
        talks = [i for i, sample in enumerate(samples) if isinstance(sample, Conversation)]
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            found = _render_texts([cast(Text, samples[i]) for i in batch], self.tokenizer)
            for i, one in zip(batch, found, strict=True):
                rendered[i] = one
        for start in range(0, len(talks), _BATCH):
            batch = talks[start : start + _BATCH]
            made = _render_conversations([cast(Conversation, samples[i]) for i in batch], self._chat_template)
            for i, other in zip(batch, made, strict=True):
                rendered[i] = other
        return rendered

    @property
    def _template_text(self) -> Any:
        return self.template if self.template is not None else self.tokenizer.chat_template

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return chat_template(self.tokenizer, self.template)


# --- texts ------------------------------------------------------------------------------------------------


def _render_texts(samples: Sequence[Text], tokenizer: PreTrainedTokenizerBase) -> list[Rendered]:
    """What the tokenizer makes of the text, and the end of text. The first token has nothing before it to be
    predicted from, so it is no target whatever its mask says."""
    if tokenizer.eos_token_id is None:
        problem = Problem("tokenizer", "has no end-of-text token (eos_token), and every text ends with it")
        raise DataError("text rows cannot be made tokens of:", [problem])
    rendered = []
    texts = ["".join(part for part, _ in sample.parts) for sample in samples]
    for ids in _tokenize(texts, tokenizer, add_special_tokens=True):
        if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]  # the text brought its own
        if ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
        rendered.append(Rendered(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_)))
    return rendered


def _tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(
        texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
    )
    return [list(ids) for ids in encoded["input_ids"]]


# --- conversations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Turn:
    """An assistant's turn or a marked part: what an error calls it, and the characters trained on."""

    name: str
    start: int
    stop: int


def _render_conversations(
    conversations: Sequence[Conversation], template: ChatTemplate
) -> list[Rendered | str]:
    found: list[tuple[str, list[_Turn]] | str] = []
    for conversation in conversations:
        try:
            found.append(_turns(conversation.messages, template))
        except _UnrenderableError as error:
            found.append(str(error))
    good = [one for one in found if not isinstance(one, str)]
    # a template writes the beginning-of-text token itself
    whole = iter(_tokenize([text for text, _ in good], template.tokenizer, add_special_tokens=False))
    cuts = [text[:end] for text, turns in good for turn in turns for end in (turn.start, turn.stop)]
    before = iter(_tokenize(cuts, template.tokenizer, add_special_tokens=False))
    rendered: list[Rendered | str] = []
    for one in found:
        if isinstance(one, str):
            rendered.append(one)
            continue
        ids = next(whole)
        trained = np.zeros(len(ids), dtype=np.bool_)
        bad = None
        for turn, start, stop in [(turn, next(before), next(before)) for turn in one[1]]:
            if ids[: len(start)] != start or ids[: len(stop)] != stop:
                bad = bad or turn
            trained[len(start) : len(stop)] = True
        merged = None if bad is None else _MERGED.format(name=bad.name)
        rendered.append(merged or Rendered(np.array(ids, dtype=np.int32), trained))
    return rendered


def _turns(messages: Sequence[Message], template: ChatTemplate) -> tuple[str, list[_Turn]]:
    """The rendered conversation, and the assistant's turns in it."""
    text, marks = _render(messages, template)
    if template.is_marked:
        return text, [_Turn(f"marked part {i}", *mark) for i, mark in enumerate(marks, start=1)]
    numbers = [i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    return text, [_turn(messages, number, text, template) for number in numbers]


def _turn(messages: Sequence[Message], number: int, text: str, template: ChatTemplate) -> _Turn:
    """Where turn `number` stands in `text`, by what the template writes before and after its content."""
    before, _ = _render(messages[: number - 1], template, prompt=True)
    if not text.startswith(before):
        same = len(commonprefix([text, before]))
        asked, stands = before[same : same + _EXCERPT], text[same : same + _EXCERPT]
        raise _UnrenderableError(
            f"turn {number}: the chat template writes {asked!r} when this answer is asked for and {stands!r} "
            f"in the row, so the model would learn from what it is never given; {_WAY_OUT}"
        )
    start = len(before)
    after = _after_content(messages, number, text, template)
    stop = max(start, len(text) - len(after))
    if not text.startswith(template.end_of_turn, stop):
        raise _UnrenderableError(
            f"turn {number}: the chat template does not end it with {template.end_of_turn!r} as it ends a "
            f"last turn; {_WAY_OUT}"
        )
    return _Turn(f"turn {number}", start, stop + len(template.end_of_turn))


def _after_content(messages: Sequence[Message], number: int, text: str, template: ChatTemplate) -> str:
    """What the template writes after the content of a turn: the end that another content has as well."""
    content = messages[number - 1]["content"]
    other = next(c for c in "0123" if c not in {content[-1:], content.rstrip()[-1:]})
    changed = [*messages[: number - 1], {"role": "assistant", "content": other}, *messages[number:]]
    return _common_end(text, _render(changed, template)[0])


def _common_end(one: str, other: str) -> str:
    return commonprefix([one[::-1], other[::-1]])[::-1]


def _render(
    messages: Sequence[Message], template: ChatTemplate, *, prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """As ChatTemplate.render, with the template's refusal as a reason."""
    from jinja2 import TemplateError

    try:
        return template.render(messages, prompt=prompt)
    except (TemplateError, TypeError) as error:
        raise _UnrenderableError(f"the chat template refuses the row: {error}") from error


# --- the template itself ----------------------------------------------------------------------------------


def _end_of_turn(template: ChatTemplate) -> str:
    """What stands after the content of a last turn, up to and including the first special token."""
    question: Message = {"role": "user", "content": "0"}
    answer: Message = {"role": "assistant", "content": "1"}
    try:
        text, _ = _render([question, answer], template)
        after = _after_content([question, answer], 2, text, template)
    except _UnrenderableError as error:
        raise _template_error(str(error), _WAY_OUT) from error
    added = (token.content for token in template.tokenizer.added_tokens_decoder.values())
    known = {*added, *template.tokenizer.all_special_tokens}
    names = sorted((re.escape(name) for name in known if name.strip()), key=len, reverse=True)
    found = re.search("|".join(names), after) if names else None
    if found is None:
        reason = "writes nothing after an assistant's turn"
        if after:
            reason = (
                f"ends an assistant's turn with {after!r}, which holds no special token of this tokenizer"
            )
        raise _template_error(
            f"{reason}, so a model trained on it would not know how to stop",
            f"take the tokenizer that the template was made for, or {_WAY_OUT}",
        )
    return after[: found.end()]


def _template_error(reason: str, way_out: str) -> DataError:
    return DataError("conversations cannot be rendered:", [Problem("chat template", f"{reason}; {way_out}")])
