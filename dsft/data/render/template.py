"""Chat templates: choose the one of a run (a name, a file or the tokenizer's own) and render messages with
it.

Templates run in transformers' sandbox. Besides the text, rendering returns the characters that the template
marks with `{% generation %}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.data.render.limits import MEMORY_LIMIT, TIME_LIMIT, OutOfTimeError, RenderLimits
from dsft.data.render.older import template_messages
from dsft.data.rows import BadRowError, EndlessTemplateError, Message
from dsft.errors import DataError, MissingInputError, Problem
from dsft.spec.files import CHAT_TEMPLATES
from dsft.system.json_file import read_text, reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FREE_SIZE = 200_000
TIMES_THE_ROW = 20
"""A rendered text may have FREE_SIZE characters or, if more, TIMES_THE_ROW times those of the row's
strings."""

_LARGEST = 2**20  # bytes of a template's file; the largest have about 30,000
_FOLDER = Path(__file__).parent / "templates"
_NO_THINKING = "{% set enable_thinking = enable_thinking | default(false) %}"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Marks = list[tuple[int, int]]
"""(start, stop) of each part that a template marks, in characters."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may use (bos_token, eos_token, …). name: as in
    data.chat_template; None: the tokenizer's own template."""

    text: str
    special_tokens: Mapping[str, Any]
    name: str | None = None

    @cached_property
    def is_marked(self) -> bool:
        return _GENERATION.search(self.text) is not None

    @cached_property
    def literals(self) -> list[str]:
        """All strings that the template itself can write: its text, and the constants in its expressions.
        Raises DataError for a template that cannot be compiled, EndlessTemplateError as `render` does."""
        from jinja2 import nodes

        with self._limited():
            tree = self._compiled.environment.parse(self.text)
            found: list[Any] = [node.data for node in tree.find_all(nodes.TemplateData)]
            found += [node.value for node in tree.find_all(nodes.Const)]
        return [one for one in found if isinstance(one, str)]

    def reads(self, key: str) -> bool:
        """Return whether the template mentions a key of messages, or "tools"."""
        if key == "reasoning_content":
            return re.search(r"\b(reasoning_content|thinking|reasoning)\b", self.text) is not None
        return key in self.text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: bool = False,
    ) -> tuple[str, Marks]:
        """Return the text of messages from `prepare_messages`, and its marks. prompt: append the generation
        prompt.

        Raises BadRowError if the template refuses the messages, EndlessTemplateError if it exceeds the CPU
        time or memory of `RenderLimits`, or writes far more than the messages contain; DataError if it cannot
        be compiled.
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
            with self._limited():
                return self._written(values)
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            raise BadRowError(f"the chat template refuses the row: {error}") from error
        except RecursionError as error:
            raise BadRowError(f"{self.called} calls itself endlessly; correct the template") from error

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Limit CPU time and memory; raise EndlessTemplateError where one is exceeded."""
        try:
            with RenderLimits():
                yield
        except OutOfTimeError:
            raise EndlessTemplateError(
                f"{self.called} takes more than {TIME_LIMIT:g} seconds of CPU time for one row; correct its "
                "loops, or shorten the row"
            ) from None
        except MemoryError:
            raise EndlessTemplateError(
                f"{self.called} takes more than {MEMORY_LIMIT >> 20:,} MiB of memory for one row; correct "
                "the template, or shorten the row"
            ) from None

    def _written(self, values: dict[str, Any]) -> tuple[str, Marks]:
        written: list[str] = []
        marks: Marks = []
        size, largest = 0, FREE_SIZE
        with self._compiled.environment.activate_tracker(written, marks):
            for part in self._compiled.generate(values):
                written.append(part)
                size += len(part)
                if size > largest:
                    given = sum(map(len, strings([values["messages"], values["tools"]])))
                    largest = max(largest, TIMES_THE_ROW * given)
                    if size > largest:
                        raise EndlessTemplateError(
                            f"{self.called} writes more than {largest:,} characters for one row; correct "
                            "the template"
                        )
        return "".join(written), marks

    @property
    def called(self) -> str:
        """Name of the template in errors."""
        return f"the chat template {'of the tokenizer' if self.name is None else self.name}"

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from transformers.utils import chat_template_utils

        try:
            # transformers' own sandbox, with the filters and functions that templates rely on; it caches
            return chat_template_utils._compile_jinja_template(self.text)
        except (TemplateError, SyntaxError, ValueError, RecursionError) as error:
            # Jinja translates to Python, whose limits (such as 20 loops in each other) are SyntaxErrors
            is_jinja = isinstance(error, TemplateError)
            line = getattr(error, "lineno", None) if is_jinja else None
            where = f"line {line}: " if line else ""
            reason = str(error) if is_jinja else f"Jinja cannot compile it ({getattr(error, 'msg', error)})"
            raise template_error(
                f"{where}{reason}", "correct the Jinja text, or name another template"
            ) from error


def prepare_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as transformers passes them to a template: plain data, without keys that are null, the
    reasoning under each of its names. Each message is prepared independently of the others."""
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return list(template_messages(given))


def template_error(reason: str, way_out: str) -> DataError:
    return DataError("conversations cannot be rendered:", [Problem("chat template", f"{reason}; {way_out}")])


# --- which template ---------------------------------------------------------------------------------------


def choose_template(
    tokenizer: PreTrainedTokenizerBase, name: str | Path | None, thinking: str = "empty"
) -> None:
    """Set the tokenizer's template to what `data.chat_template` names: one of the tokenizer's, one of dsft's,
    or a file. Everything that uses the tokenizer, exports included, then has the same template. None: the
    tokenizer's own. thinking: as `data.thinking`; with strip, a template that reads enable_thinking prompts
    without a thought, unless that is true.

    Raises MissingInputError if the name is none of these.
    """
    if name is not None:
        tokenizer.chat_template = _template_text(tokenizer, name)
    if thinking == "strip":
        own: Any = tokenizer.chat_template
        several = own if isinstance(own, dict) else {"": own}
        stripped = {key: _without_thinking(text) for key, text in several.items()}
        tokenizer.chat_template = stripped if isinstance(own, dict) else stripped[""]


def _without_thinking(text: str | None) -> str | None:
    unchanged = not text or "enable_thinking" not in text or text.startswith(_NO_THINKING)
    return text if unchanged else f"{_NO_THINKING}{text}"


def _template_text(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> str:
    own: Any = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    try:
        if str(name) in own:
            return str(own[str(name)])
        if str(name) in CHAT_TEMPLATES:
            return named_template(str(name))
        return read_text(Path(name), _LARGEST).replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        names = f"the tokenizer's {', '.join(sorted(own))}, or " if own else ""
        raise MissingInputError(
            f"data.chat_template {name} {reason_of(error)}; give a file with a Jinja template, or "
            f"the name of one: {names}dsft's {', '.join(CHAT_TEMPLATES)}"
        ) from error


def named_template(name: str) -> str:
    """Return the Jinja text of one of dsft's templates (CHAT_TEMPLATES)."""
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def template_of(
    tokenizer: PreTrainedTokenizerBase,
    text: str | None = None,
    *,
    tools: bool = False,
    name: str | None = None,
) -> ChatTemplate:
    """Return the template `text`, or the tokenizer's own. If the tokenizer has several, choose as
    transformers does: tool_use for rows with tools, if there is one, else default. name: the template's name
    in errors. Raises DataError if there is none."""
    own: Any = text if text is not None else tokenizer.chat_template
    if isinstance(own, dict):
        chosen = "tool_use" if tools and "tool_use" in own else "default"
        if chosen not in own:
            raise template_error(
                f"the tokenizer has several ({', '.join(sorted(own))}), but none is named default",
                f"choose one, such as data.chat_template: {min(own, default='default')}",
            )
        own = own[chosen]
    if not isinstance(own, str):
        raise template_error(
            "the tokenizer has none",
            f"set data.chat_template to a Jinja file or one of {', '.join(CHAT_TEMPLATES)}; or set "
            "model.tokenizer to the tokenizer of the model's chat version, or train on text rows",
        )
    return ChatTemplate(own, dict(tokenizer.special_tokens_map), name)


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value, including the keys of its mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, *strings(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
