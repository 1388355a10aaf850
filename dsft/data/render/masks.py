"""Render a conversation and find which characters of its text are trained on.

If the template marks the assistant's turns (`{% generation %}`), the n-th mark belongs to the n-th assistant
turn. If not, a turn begins after the generation prompt, as in inference: the messages before the turn are
rendered with that prompt, and the row's text must begin with the result. The turn ends with the first special
token that the template writes after a last answer, which is found by rendering the messages up to the turn.
The row's own text is never searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from dsft.data.render.row import EXCERPT, WAY_OUT, TemplatedRow, speaks_beside_calls, with_arguments
from dsft.data.render.template import ChatTemplate, prepare_messages, strings, template_error
from dsft.data.render.thoughts import Thinking, ThoughtMarkup, find_markup, split_thought, thought_in_content
from dsft.data.rows import BadRowError, Conversation, EndlessTemplateError, Message
from dsft.errors import DataError, Problem

TrainOn = Literal["assistant", "last", "all"]

_PRIVATE = 0x100000  # the first character of Unicode's last private-use plane
_KEYS = {"tools": "tools", "tool_calls": "tool calls", "reasoning_content": "reasoning contents"}
"""Keys of a row -> their names in errors; a template that does not read one silently leaves it out."""

_CALL = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
"""A sample tool call, to find out whether a template writes calls."""
_QUESTION: Message = {"role": "user", "content": "0"}


class TextSpan(NamedTuple):
    """Characters `start` to `stop` of a text, and their name in errors."""

    name: str
    start: int
    stop: int


class MaskedText(NamedTuple):
    """A rendered text and its mask, in characters. trained: whether `spans` are what is trained on or what is
    not. stand_ins: if contents spell tokens of the template, token -> the character that replaces its
    spelling in the text."""

    text: str
    spans: list[TextSpan]
    trained: bool
    stand_ins: Mapping[str, str] = {}


@dataclass(frozen=True)
class TurnEnds:
    """What a template writes around an answer: `lead` before it, `tail` after it. `end` is the tail up to and
    including its first special token, which ends a turn."""

    lead: str
    tail: str
    end: str


@dataclass(frozen=True)
class MaskBuilder:
    """Computes masks. special_tokens: the tokenizer's, one of which ends a turn."""

    template: ChatTemplate
    train_on: TrainOn
    special_tokens: frozenset[str]
    thinking: Thinking = "empty"

    def mask(self, conversation: Conversation) -> MaskedText:
        """Render a conversation. Raises BadRowError if the template refuses it or its turns cannot be
        located, DataError if the template's turns never can."""
        trained = _trained(conversation, self.train_on)
        row = self._row(conversation, trained)
        if not self._spells(row):
            return self._marked(row, trained)
        text = self._marked(row, trained).text  # first, so that errors quote the row as it is
        messages, tools, thoughts = map(self._with_stand_ins, (row.messages, row.tools, row.thoughts))
        hidden = replace(row, messages=messages, tools=tools, thoughts=thoughts)
        marked = self._marked(hidden, trained)
        names = {ord(stand_in): name for name, stand_in in self._stand_ins.items()}
        if marked.text.translate(names) != text:
            raise BadRowError(
                "its contents spell a token of the chat template, which treats such contents differently; "
                "remove it"
            )
        return marked._replace(stand_ins=self._stand_ins)

    def _row(self, conversation: Conversation, trained: Sequence[bool]) -> TemplatedRow:
        row = self._with_thoughts(conversation, trained)
        keys = {"tools"}.union(*row.messages) if row.tools else set[str]().union(*row.messages)
        for key in filter(keys.__contains__, _KEYS):
            has = key == "tools" or any(message.get(key) for message in row.messages)
            if has and not self.template.reads(key):
                raise BadRowError(_left_out(_KEYS[key], "them"))
        for role in self._dropped_roles & {message["role"] for message in row.messages}:
            raise BadRowError(_left_out(f"a {role} turn"))
        if "tool_calls" not in keys:
            return row
        if any(map(speaks_beside_calls, row.messages)) and self._drops_words_beside_calls:
            raise BadRowError(_left_out("content beside tool calls"))
        return with_arguments(row)

    # --- thoughts -------------------------------------------------------------------------------------------

    @cached_property
    def _thoughts(self) -> ThoughtMarkup | None:
        """What to write around thoughts; None if all is left to the template."""
        if self.thinking == "as_in_template":
            return None
        found = find_markup(self.template, self._probe)
        return found if found and (found.opening or self.thinking == "keep") else None

    def _with_thoughts(self, conversation: Conversation, trained: Sequence[bool]) -> TemplatedRow:
        """Return the row, with the thoughts of the turns that get theirs from `_thoughts` apart."""
        messages = prepare_messages(conversation.messages)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.thinking == "strip":
            for i in answers:
                messages[i] = split_thought(messages[i])[1]
        if self._thoughts is None:
            return TemplatedRow(messages, conversation.tools, self.template)
        every = self.thinking == "keep" or self.train_on == "all"
        thoughts, given = {}, list(messages)
        for i in answers:
            if every or trained[i]:
                thoughts[i], messages[i] = split_thought(messages[i])
            elif not self.template.reads("reasoning_content"):
                messages[i] = thought_in_content(messages[i])  # where the template drops it from
        earlier = {i: thoughts[i] for i in answers[:-1] if thoughts.get(i)}
        if earlier and self.thinking != "keep":
            _check_kept(with_arguments(TemplatedRow(given, conversation.tools, self.template)), earlier)
        return TemplatedRow(messages, conversation.tools, self.template, thoughts, self._thoughts)

    # --- what the template leaves out -----------------------------------------------------------------------

    @cached_property
    def _dropped_roles(self) -> frozenset[str]:
        """Roles whose turns the template silently leaves out. A tool's turn may need a call before it."""
        question, answer = _QUESTION, _answer("0")
        called = {**answer, "tool_calls": [_CALL]}
        ways: dict[str, list[tuple[list[Message], list[Message]]]] = {
            "system": [([], [question, answer])],
            "tool": [([question, answer], [answer]), ([question, called], [answer])],
        }
        dropped = set()
        for role, around in ways.items():
            numbers = [
                self._num_texts([*before, {"role": role, "content": content}, *after] for content in "12")
                for before, after in around
            ]
            if 1 in numbers and 2 not in numbers:
                dropped.add(role)
        return frozenset(dropped)

    @cached_property
    def _joins_system(self) -> bool:
        """Whether the template writes a system turn into the next turn, not alone (Gemma's, Llama 2's)."""
        return self._num_texts([{"role": "system", "content": content}] for content in "12") == 1

    @cached_property
    def _drops_words_beside_calls(self) -> bool:
        """Whether the template silently leaves out the content of turns with calls, as Llama 3.1's does."""
        talks = ([_QUESTION, {**_answer(content), "tool_calls": [_CALL]}] for content in "12")
        rows = (with_arguments(TemplatedRow(messages, (), self.template)) for messages in talks)
        return self._num_texts(row.messages for row in rows) == 1

    def _num_texts(self, conversations: Iterable[Sequence[Message]]) -> int:
        """Return how many different texts the template makes of conversations that differ in one content; 0
        if it refuses one, since it then also refuses such rows, or takes them only in other conversations."""
        try:
            return len({self._probe(messages)[0] for messages in conversations})
        except BadRowError:
            return 0

    def _probe(
        self, messages: Sequence[Message], *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a short conversation to see what the template does. Raises DataError if even that exceeds
        the limits, since the template is then of no use for any row."""
        try:
            return self.template.render(messages, prompt=prompt)
        except EndlessTemplateError as error:
            problem = Problem("chat template", str(error))
            raise DataError("conversations cannot be rendered:", [problem]) from error

    # --- the spans of a row ---------------------------------------------------------------------------------

    def _marked(self, row: TemplatedRow, trained: Sequence[bool]) -> MaskedText:
        wanted = [number for number, is_trained in enumerate(trained) if is_trained]
        roles = [message["role"] for message in row.messages[:2]]
        if roles == ["system", "user"] and trained[0] != trained[1] and self._joins_system:
            raise BadRowError(
                "the chat template writes the system turn into the user's turn, but only one of them is "
                f"trained on; give both the same flag, or {WAY_OUT}"
            )
        text, marks = row.render(len(trained))
        if self.train_on == "all":
            others = [number for number, is_trained in enumerate(trained) if not is_trained]
            return MaskedText(text, [self._message(row, number, text, marks) for number in others], False)
        if self.template.is_marked and all(row.messages[i]["role"] == "assistant" for i in wanted):
            return MaskedText(text, _marked(row, wanted, marks), True)
        return MaskedText(text, [self._message(row, number, text, marks) for number in wanted], True)

    def _message(self, row: TemplatedRow, number: int, text: str, marks: list[tuple[int, int]]) -> TextSpan:
        """Return the part of any message: an assistant turn, or all that the template writes for another."""
        if row.messages[number]["role"] != "assistant":
            start = row.prefix(number, text) if number else 0
            return TextSpan(f"turn {number + 1}", start, row.prefix(number + 1, text))
        if self.template.is_marked:
            return _marked(row, [number], marks)[0]
        return _turn(row, number, text, self.ends)

    # --- tokens of the template that contents spell ---------------------------------------------------------

    @cached_property
    def controls(self) -> frozenset[str]:
        """The special tokens that the template writes, and the bos, eos, pad and unk tokens."""
        named = [self.template.special_tokens.get(f"{key}_token", "") for key in ("bos", "eos", "pad", "unk")]
        written = [*self.template.literals, *named]
        return frozenset(name for name in self.special_tokens if any(name in one for one in written))

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        return {name: chr(_PRIVATE + i) for i, name in enumerate(sorted(self.controls))}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return any_of(self.controls)

    def _spells(self, row: TemplatedRow) -> bool:
        search = self._spelled.search
        for message in row.messages:
            for value in message.values():
                if search(value) if type(value) is str else any(map(search, strings(value))):
                    return True
        return any(map(search, strings([row.tools, list(row.thoughts.values())])))

    def _with_stand_ins(self, value: Any) -> Any:
        """Return the value with a stand-in for each token that is spelled in it."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: self._stand_ins[found[0]], value)
        if isinstance(value, Mapping):
            return {self._with_stand_ins(key): self._with_stand_ins(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._with_stand_ins(item) for item in value]
        return value

    # --- ends of turns --------------------------------------------------------------------------------------

    @cached_property
    def ends(self) -> TurnEnds:
        try:
            prompt, _ = self._probe([_QUESTION], prompt=True)
            texts = [self._probe([_QUESTION, _answer(content)])[0] for content in "12"]
        except BadRowError as error:
            raise template_error(str(error), WAY_OUT) from error
        tail = _common_end(*texts)
        # if the text does not begin with the prompt, the first turn of a row raises the error
        lead = texts[0][len(prompt) : len(texts[0]) - len(tail) - 1] if texts[0].startswith(prompt) else ""
        return TurnEnds(lead, tail, tail[: self._first_special(tail)])

    def check_marks(self) -> None:
        """Raise DataError unless the marks enclose an answer and, if they enclose text after it, that has a
        token that ends a turn; it has none if the template was made for another tokenizer."""
        if not self.template.is_marked:
            return
        marked, others = [], []
        try:
            for content in "12":
                text, marks = self._probe([_QUESTION, _answer(content)])
                marked.append("".join(text[start:stop] for start, stop in marks))
                borders = [0, *(end for mark in marks for end in mark), len(text)]
                others.append([text[i:j] for i, j in zip(borders[::2], borders[1::2], strict=True)])
        except BadRowError:
            return  # rows that it does render are counted in the ledger if they have no end
        if others[0] != others[1]:
            raise template_error(
                "its {% generation %} marks do not enclose the assistant's content; marks in macros cannot",
                "put them around the content in the loop over the messages, or remove them",
            )
        tail = _common_end(*marked)
        if tail.strip():
            self._first_special(tail)

    def _first_special(self, tail: str) -> int:
        found = any_of(self.special_tokens).search(tail)
        if found is not None:
            return found.end()
        stop = "so a model trained with it would not learn to stop"
        if not tail:
            raise template_error(f"it writes nothing after an assistant's turn, {stop}", WAY_OUT)
        raise template_error(
            f"it ends an assistant's turn with {tail!r}, which has no special token of the tokenizer, {stop}",
            "use the tokenizer that the template was made for, add the token that ends a turn with "
            f"model.add_tokens, or {WAY_OUT}",
        )


def _check_kept(row: TemplatedRow, thoughts: Mapping[int, str]) -> None:
    """Raise BadRowError if the template leaves out the thought of an earlier turn, so that the model does not
    get it at inference."""
    text, _ = row.render(len(row.messages))
    for number, thought in thoughts.items():
        if thought not in text:
            raise BadRowError(
                f"turn {number + 1}: the chat template leaves out its thought when other turns follow; "
                f"{row.or_last}"
            )


def _left_out(what: str, it: str = "it") -> str:
    return f"the row has {what}, which the chat template leaves out; remove {it}, or {WAY_OUT}"


def _answer(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _common_end(one: str, other: str) -> str:
    return commonprefix([one[::-1], other[::-1]])[::-1]


def _trained(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    """Return for each message whether it is trained on."""
    roles = [message["role"] for message in conversation.messages]
    last = max((number for number, role in enumerate(roles) if role == "assistant"), default=-1)
    flags = conversation.trained or (None,) * len(roles)
    trained = []
    for number, (role, flag) in enumerate(zip(roles, flags, strict=True)):
        by_role = train_on == "all" or (role == "assistant" and (train_on == "assistant" or number == last))
        trained.append(by_role if flag is None else flag)
    return trained


def _marked(row: TemplatedRow, wanted: Sequence[int], marks: Sequence[tuple[int, int]]) -> list[TextSpan]:
    """Return the marks of the wanted turns."""
    turns = [number for number, message in enumerate(row.messages) if message["role"] == "assistant"]
    if len(marks) == len(turns):
        return [TextSpan(f"turn {number + 1}", *marks[turns.index(number)]) for number in wanted]
    if list(wanted) == turns:
        return [TextSpan(f"marked part {i}", *mark) for i, mark in enumerate(marks, start=1)]
    raise BadRowError(
        f"the chat template marks {len(marks)} parts, but the row has {len(turns)} assistant turns, so it is "
        "unknown which part belongs to which turn; train on all turns, or mark each turn once in the template"
    )


def _turn(row: TemplatedRow, number: int, text: str, ends: TurnEnds) -> TextSpan:
    """Locate an assistant turn in a text without marks."""
    name = f"turn {number + 1}"
    start = row.prefix(number, text, prompt=True)
    content = row.messages[number].get("content")
    if isinstance(content, str) and row.messages[number].keys() == {"role", "content"}:
        # The fast path: the template writes the answer unchanged. The rest is for all other cases.
        for answer in (content, ends.lead + content, ends.lead + content.strip()):
            if text.startswith(answer + ends.end, start):
                return TextSpan(name, start, start + len(answer + ends.end))
    prompt, _ = row.render(number, prompt=True)
    alone, _ = row.render(number + 1)
    if not (alone.startswith(prompt) and alone.endswith(ends.tail)):
        raise BadRowError(
            f"{name}: the chat template does not end it with {ends.tail!r}, with which it ends other last "
            f"turns; {WAY_OUT}"
        )
    answer = alone[start : len(alone) - len(ends.tail) + len(ends.end)]
    # A lead that the template writes before any last answer, such as an empty thought, may be missing here.
    for rest in (answer, answer.removeprefix(ends.lead)):
        if text.startswith(rest, start):
            return TextSpan(name, start, start + len(rest))
    same = start + len(commonprefix([text[start:], answer]))
    raise BadRowError(
        f"{name}: the chat template writes {alone[same : same + EXCERPT]!r} if the conversation ends with "
        f"this answer, but {text[same : same + EXCERPT]!r} in the row; {row.or_last}"
    )


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of the names, the longest first, as the tokenizers library matches them."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
