"""Chat templates: which one is taken, and what stops one that has no end."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsft.data.render import template as module
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import (
    ChatTemplate,
    choose_template,
    named_template,
    prepared,
    template_of,
    time_limit,
)
from dsft.data.rows import BadRowError, Conversation, Rendered
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError, MissingInputError
from tests.launching import allowed

QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def written(text: str, messages: list[Any] | None = None, **given: Any) -> str:
    return ChatTemplate(text, {}).render(prepared(messages or [QUESTION, ANSWER]), **given)[0]


# --- which one --------------------------------------------------------------------------------------------


def test_a_template_of_ours_a_file_and_none(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    own = tokenizer.chat_template
    choose_template(tokenizer, None)
    assert tokenizer.chat_template == own
    choose_template(tokenizer, "llama3")
    assert tokenizer.chat_template == named_template("llama3")
    (tmp_path / "t.jinja").write_text("é", encoding="utf-8")
    choose_template(tokenizer, tmp_path / "t.jinja")
    assert tokenizer.chat_template == "é"


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(MissingInputError, match="not UTF-8"):
        choose_template(tokenizer, tmp_path / "t.jinja")
    with pytest.raises(MissingInputError, match=r"llama9: cannot be read .*dsft's chatml, cohere, .*zephyr"):
        choose_template(tokenizer, "llama9")
    tokenizer.chat_template = {"one": "1", "two": "2"}
    with pytest.raises(MissingInputError, match="the name of one: the tokenizer's one, two, or dsft's"):
        choose_template(tokenizer, "three")


def test_one_of_several_that_the_tokenizer_has() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = {"default": "d", "tool_use": "t", "chatml": "its own"}
    assert template_of(tokenizer).text == "d"
    assert template_of(tokenizer, tools=True).text == "t"
    for name, text in (("tool_use", "t"), ("chatml", "its own"), ("llama3", named_template("llama3"))):
        tokenizer.chat_template = {"default": "d", "tool_use": "t", "chatml": "its own"}
        choose_template(tokenizer, name)
        assert tokenizer.chat_template == text
    tokenizer.chat_template = {"b": "b", "a": "a"}
    with pytest.raises(DataError, match=r"several \(a, b\) and none is chosen; name one with .*: a"):
        template_of(tokenizer)


def test_rows_with_tools_take_the_template_for_them() -> None:
    tokenizer = byte_level_tokenizer()
    own = named_template("chatml")
    tokenizer.chat_template = {"default": own, "tool_use": named_template("qwen2_5")}
    plain, tooled = Renderer(tokenizer).render(
        [Conversation((QUESTION, ANSWER)), Conversation((QUESTION, ANSWER), (TOOL,))]
    )
    assert isinstance(plain, Rendered) and isinstance(tooled, Rendered)
    for made, tools in ((plain, None), (tooled, [TOOL])):
        own_ids = tokenizer.apply_chat_template([QUESTION, ANSWER], tools=tools)["input_ids"]
        assert made.input_ids.tolist() == own_ids


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(DataError, match="line 2: unexpected '}'; mend the Jinja text"):
        written("a\n{{ b }")


# --- what a template is given -----------------------------------------------------------------------------


def test_it_is_given_what_transformers_gives() -> None:
    """Keys that are null are left out, reasoning has each of its names, tools are a list or none."""
    text = (
        "{{ messages[0] | tojson }}{{ tools | tojson }}{{ documents is none }}"
        "{{ add_generation_prompt }}{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "assistant", "content": None, "thinking": "hm"}]
    tokenizer = byte_level_tokenizer()
    for tools in ([], [TOOL]):
        own = tokenizer.apply_chat_template(messages, tools=tools or None, chat_template=text, tokenize=False)
        assert written(text, messages, tools=tools) == own


@pytest.mark.parametrize(
    "text",
    ["{{ raise_exception('no') }}", "{{ messages[5]['x'] }}", "{{ 1 / 0 }}", "{{ messages[0] + 1 }}",
     "{{ 'x' * 999999999999999 }}",
     "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)  # fmt: skip
def test_whatever_fails_in_it_is_a_reason(text: str) -> None:
    with pytest.raises(BadRowError, match="the chat template"):
        written(text)


# --- limits -----------------------------------------------------------------------------------------------


def test_one_that_never_ends_is_stopped_and_the_next_row_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIME_LIMIT", 0.2)
    begun = time.monotonic()
    text = "{% if messages[0]['content'] == 'loop' %}" + NESTED + "{% endif %}" + named_template("chatml")
    rows = [Conversation(({"role": "user", "content": said}, ANSWER)) for said in ("loop", "a")]
    said, made = Renderer(byte_level_tokenizer(), text).render(rows)
    assert isinstance(said, str)
    assert said.startswith("the chat template was not done with the row after 0.2 seconds; mend the template")
    assert isinstance(made, Rendered)
    assert time.monotonic() - begun < allowed(4)


def test_a_timer_that_ran_before_goes_on() -> None:
    rang = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    left = signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        with time_limit() as restart:
            restart()
            time.sleep(0.2)
        assert not rang and 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1.8
        while not rang:
            time.sleep(0.02)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *left)


def test_in_another_thread_there_is_no_limit_and_no_error() -> None:
    found: list[Any] = []
    renderer = Renderer(byte_level_tokenizer())
    row = Conversation((QUESTION, ANSWER))
    thread = threading.Thread(target=lambda: found.extend(renderer.render([row])))
    thread.start()
    thread.join()
    assert isinstance(found[0], Rendered)


def test_far_more_text_than_the_row_has_is_refused() -> None:
    text = "{% for i in range(9999) %}{{ 'x' * 99 }}{% endfor %}"
    with pytest.raises(BadRowError, match="writes more than 200,000 characters, 20 times what the row holds"):
        written(text)
    long = [{"role": "user", "content": "y" * 100_000}]
    assert len(written(text, long)) == 9999 * 99
