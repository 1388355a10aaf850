"""Chat templates: which one a run takes, and what it makes of messages.

Takes a name, a file or the tokenizer's own. Gives text, rendered in transformers' sandbox, and the characters
that the template marks with `{% generation %}`. Reads the file of a template.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.data.rows import BadRowError, Message
from dsft.errors import DataError, MissingInputError, Problem
from dsft.spec.chat_templates import CHAT_TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIME_LIMIT = 10.0
"""Seconds that a template may take for one row."""
FREE_SIZE = 200_000
TIMES_THE_ROW = 20
"""A rendered text may have FREE_SIZE characters, or TIMES_THE_ROW times those of the row's strings."""

_FOLDER = Path(__file__).parent / "templates"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Marks = list[tuple[int, int]]
"""(start, stop) characters of what a template marks."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja text and the special tokens that it may name (bos_token, eos_token, …)."""

    text: str
    special_tokens: Mapping[str, Any]

    @cached_property
    def is_marked(self) -> bool:
        return _GENERATION.search(self.text) is not None

    @cached_property
    def literals(self) -> list[str]:
        """All that the template can write by itself: its text, and the strings in its expressions."""
        from jinja2 import nodes

        tree = self._compiled.environment.parse(self.text)
        found: list[Any] = [node.data for node in tree.find_all(nodes.TemplateData)]
        found += [node.value for node in tree.find_all(nodes.Const)]
        return [one for one in found if isinstance(one, str)]

    def reads(self, key: str) -> bool:
        """Whether it looks at a key of a message, or at the tools."""
        names = {"reasoning_content": ("reasoning_content", "thinking", "reasoning")}.get(key, (key,))
        return any(name in self.text for name in names)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: bool = False,
    ) -> tuple[str, Marks]:
        """The text of `prepared` messages, with the generation prompt where asked for, and its marks.

        Raises BadRowError where the template refuses the messages or writes far more than they hold.
        """
        from jinja2 import TemplateError

        values = {
            **self.special_tokens,
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            return self._written(values)
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            raise BadRowError(f"the chat template refuses the row: {error}") from error
        except RecursionError as error:
            raise BadRowError("the chat template calls itself without an end; mend it") from error
        except MemoryError as error:
            raise BadRowError("the chat template needs more memory than there is; mend it") from error

    def _written(self, values: dict[str, Any]) -> tuple[str, Marks]:
        written: list[str] = []
        marks: Marks = []
        size, largest = 0, FREE_SIZE
        with self._compiled.environment.activate_tracker(written, marks):
            for part in self._compiled.generate(values):
                written.append(part)
                size += len(part)
                if size > largest:
                    largest = max(largest, TIMES_THE_ROW * _characters([values["messages"], values["tools"]]))
                    if size > largest:
                        raise BadRowError(
                            f"the chat template writes more than {largest:,} characters, {TIMES_THE_ROW} "
                            "times what the row holds; mend the template"
                        )
        return "".join(written), marks

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from transformers.utils import chat_template_utils

        try:
            # transformers' own sandbox, with the filters and functions that templates count on; it is cached
            return chat_template_utils._compile_jinja_template(self.text)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise template_error(
                f"{where}{error}", "mend the Jinja text, or name another template"
            ) from error


def prepared(messages: Sequence[Message]) -> list[Message]:
    """As transformers gives messages to a template: plain data, without keys that are null, the reasoning
    under each of its names. Of a part of the messages it is the part of all."""
    from transformers.utils import chat_template_utils

    plain: Any = chat_template_utils._plain_template_data(
        [{key: value for key, value in message.items() if value is not None} for message in messages]
    )
    return list(chat_template_utils._alias_reasoning_fields(plain))


def template_error(reason: str, way_out: str) -> DataError:
    return DataError("conversations cannot be rendered:", [Problem("chat template", f"{reason}; {way_out}")])


# --- which template ---------------------------------------------------------------------------------------


def choose_template(tokenizer: PreTrainedTokenizerBase, name: str | Path | None) -> None:
    """Gives the tokenizer what `data.chat_template` means: one of its own by name, one of ours, or a file.
    Whatever reads the tokenizer then has the same, and so has an export. None leaves it as it is.

    Raises MissingInputError where it is none of these.
    """
    if name is not None:
        tokenizer.chat_template = _template_text(tokenizer, name)


def _template_text(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> str:
    own: Any = tokenizer.chat_template
    if isinstance(own, dict) and str(name) in own:
        return str(own[str(name)])
    if str(name) in CHAT_TEMPLATES:
        return named_template(str(name))
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        named = f"the tokenizer's {', '.join(sorted(own))}, or " if isinstance(own, dict) else ""
        raise MissingInputError(
            f"data.chat_template {name}: cannot be read ({reason}); give a file with a Jinja template, or "
            f"the name of one: {named}dsft's {', '.join(CHAT_TEMPLATES)}"
        ) from error


def named_template(name: str) -> str:
    """The Jinja text of one of ours (CHAT_TEMPLATES)."""
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def template_of(
    tokenizer: PreTrainedTokenizerBase, text: str | None = None, *, tools: bool = False
) -> ChatTemplate:
    """The template `text`, or the tokenizer's own. Of several that it has, as transformers chooses: tool_use
    for rows with tools, where there is one, else default. Raises DataError where there is none."""
    own: Any = text if text is not None else tokenizer.chat_template
    if isinstance(own, dict):
        chosen = "tool_use" if tools and "tool_use" in own else "default"
        if chosen not in own:
            raise template_error(
                f"the tokenizer has several ({', '.join(sorted(own))}) and none is chosen",
                f"name one with data.chat_template: {min(own, default='default')}",
            )
        own = own[chosen]
    if not isinstance(own, str):
        raise template_error(
            "the tokenizer has none",
            f"name one with data.chat_template, a Jinja file or one of {', '.join(CHAT_TEMPLATES)}; or take "
            "the tokenizer of the model's chat version with model.tokenizer, or train on text rows",
        )
    return ChatTemplate(own, dict(tokenizer.special_tokens_map))


# --- limits -----------------------------------------------------------------------------------------------


@contextmanager
def time_limit() -> Iterator[Callable[[], None]]:
    """Inside, BadRowError is raised TIME_LIMIT seconds after the last call of what this gives.

    Only a process's main thread gets signals: in another one there is no limit. A timer that ran before goes
    on afterwards with what it had left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def stop(*_: object) -> None:
        raise BadRowError(
            f"the chat template was not done with the row after {TIME_LIMIT:g} seconds; mend the template "
            "or shorten the row"
        )

    def restart() -> None:
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT, TIME_LIMIT)

    begun = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield restart
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left - (time.monotonic() - begun)), interval)


def _characters(value: Any) -> int:
    """Of all strings in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(key) + _characters(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0
