"""Chat templates: which one is taken, and what stops one that has no end."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsft.data.render import limits
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import (
    ChatTemplate,
    choose_template,
    named_template,
    prepare_messages,
    template_of,
)
from dsft.data.rows import BadRowError, Conversation, EndlessTemplateError, Rendered
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError, MissingInputError

QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def written(text: str, messages: list[Any] | None = None, **given: Any) -> str:
    return ChatTemplate(text, {}).render(prepare_messages(messages or [QUESTION, ANSWER]), **given)[0]


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
    with pytest.raises(MissingInputError, match="t.jinja is not UTF-8 text; give a file with a Jinja"):
        choose_template(tokenizer, tmp_path / "t.jinja")
    (tmp_path / "t.jinja").write_bytes(b"x" * (2**20 + 1))
    os.mkfifo(tmp_path / "pipe.jinja")
    for file, reason in (("t.jinja", "is larger than"), ("pipe.jinja", "cannot be read .it is a named")):
        with pytest.raises(MissingInputError, match=f"{file}.* {reason}"):
            choose_template(tokenizer, tmp_path / file)
    with pytest.raises(MissingInputError, match="/dev/zero cannot be read .it is a device"):
        choose_template(tokenizer, "/dev/zero")
    with pytest.raises(MissingInputError, match=r"llama9 cannot be read .*dsft's chatml, cohere, .*zephyr"):
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
    with pytest.raises(
        DataError, match=r"several \(a, b\), but none is named default; choose one, such as .*: a"
    ):
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


# --- what a template is given -----------------------------------------------------------------------------


def test_it_is_given_what_transformers_gives() -> None:
    """Keys that are null are left out, reasoning has each of its names, tools are a list or none."""
    text = (
        "{{ messages[0] | tojson }}{{ tools | tojson }}{{ documents is none }}"
        "{{ add_generation_prompt }}{{ strftime_now('%Y') | length }}"
    )
    messages: Any = [{"role": "assistant", "content": None, "thinking": "hm"}]
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
def test_any_error_in_a_template_is_a_reason(text: str) -> None:
    with pytest.raises(BadRowError, match="the chat template"):
        written(text)


# --- limits -----------------------------------------------------------------------------------------------


def test_one_that_never_ends_is_stopped_and_the_next_row_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TIME_LIMIT", 0.2)
    text = "{% if messages[0]['content'] == 'loop' %}" + NESTED + "{% endif %}" + named_template("chatml")
    rows = [Conversation(({"role": "user", "content": shown}, ANSWER)) for shown in ("loop", "a")]
    began = time.process_time()
    shown, made = Renderer(byte_level_tokenizer(), text, name="loop.jinja").render(rows)
    assert isinstance(shown, str)
    assert shown.startswith(
        "the chat template loop.jinja takes more than 10 seconds of CPU time for one row; "
    )
    assert isinstance(made, Rendered)
    assert time.process_time() - began < 4, "stopped once, and not once for each of its renderings"


def test_template_that_exceeds_its_limits_is_given_up_after_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thousand rows would take a thousand times the limit."""
    monkeypatch.setattr(limits, "TIME_LIMIT", 0.2)
    text = "{% if messages[0]['content'] | length > 1 %}" + NESTED + "{% endif %}" + named_template("chatml")
    rows = [Conversation(({"role": "user", "content": f"row {number}"}, ANSWER)) for number in range(1000)]
    began = time.process_time()
    with pytest.raises(
        DataError, match=r"for one row; .*; these are rows that begin with 'row 0' and 'row 1'"
    ):
        Renderer(byte_level_tokenizer(), text, name="loop.jinja").render(rows)
    assert time.process_time() - began < 4, "stopped once for each of the two rows"


UNCOMPILABLE = {
    "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}": "maximum recursion depth exceeded",
    "{% if messages %}" * 120 + "{% endif %}" * 120: "too many levels of indentation",
    "{% for i in messages %}" * 25 + "{% endfor %}" * 25: "too many statically nested blocks",
    "{{ x(a=1, a=2) }}": "keyword argument repeated: a",
    "{% break %}": "'break' outside loop",
    "{{ " + "9" * 5_000 + " }}": "Exceeds the limit (4300 digits)",
}


@pytest.mark.parametrize(("text", "reason"), UNCOMPILABLE.items(), ids=UNCOMPILABLE.values())
def test_template_that_cannot_be_compiled_is_refused(text: str, reason: str) -> None:
    template = ChatTemplate(text, {})
    for use in (lambda: template.literals, lambda: template.render([QUESTION])):
        with pytest.raises(
            DataError, match=f"Jinja cannot compile it.*{re.escape(reason)}.*correct the Jinja text"
        ):
            use()
    with pytest.raises(DataError, match=re.escape(reason)):
        Renderer(byte_level_tokenizer(), text).render([Conversation((QUESTION, ANSWER))])


def test_a_template_that_renders_no_row_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found on a talk of dsft's own, so that no file is read to its end with it."""
    monkeypatch.setattr(limits, "TIME_LIMIT", 0.2)
    rows = [Conversation((QUESTION, ANSWER))] * 1000
    for text in (NESTED, NESTED + named_template("chatml"), "{{ 'A' * 5000000000 }}"):
        with pytest.raises(DataError, match=r"chat template: the chat template loop\.jinja takes more than"):
            Renderer(byte_level_tokenizer(), text, name="loop.jinja").render(rows)


def test_limits_that_were_there_are_put_back() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    written("{{ messages }}")
    with pytest.raises(EndlessTemplateError):
        written("{{ 'A' * 5000000000 }}")
    assert resource.getrlimit(resource.RLIMIT_DATA) == (soft, hard)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_in_another_thread_it_is_rendered_without_bounds() -> None:
    found: list[Any] = []
    renderer = Renderer(byte_level_tokenizer())
    row = Conversation((QUESTION, ANSWER))
    thread = threading.Thread(target=lambda: found.extend(renderer.render([row])))
    thread.start()
    thread.join()
    assert isinstance(found[0], Rendered)


LOOP = "{% set n = namespace(s='abc', l=['x']) %}{% for i in range(60) %}BODY{% endfor %}"
LARGE = "{% set a = 'x' * 99999 %}"
ENDLESS = {
    "three loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "loops over constants": "{% for i in [1, 2, 3, 4, 5, 6, 7, 8, 9] %}" * 12 + "{% endfor %}" * 12,
    "a recursive loop": "{% for x in range(999) recursive %}{% if loop.depth < 9 %}{{ loop(range(999)) }}"
    "{% endif %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "filters": "{% for i in range(99999) %}{% set y = range(99999) | select('odd') | select('even') | list %}"
    "{% endfor %}",
    "a block": "{% set x %}{% for i in range(99999) %}{{ 'A' * 99999 }}{% endfor %}{% endset %}",
    "text in a block": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}" + "A" * 5000
    + "{% endfor %}{% endfor %}{% endset %}",
    "a text": "{{ 'A' * 5000000000 }}",
    "a list": "{{ ([1] * 5000000000) | length }}",
    "a number": "{{ 10 ** 10000000000 }}",
    "numbers": "{% set n = namespace(i=9) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "+": LOOP.replace("BODY", "{% set n.s = n.s + n.s %}"),
    "~": LOOP.replace("BODY", "{% set n.s = n.s ~ n.s %}"),
    "lists in lists": LOOP.replace("BODY", "{% set n.l = [n.l, n.l] %}") + "{{ n.l }}",
    "dicts in dicts": LOOP.replace("BODY", "{% set n.l = {'a': n.l, 'b': n.l} %}") + "{{ n.l | tojson }}",
    "kept texts": "{% set n = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set n.l = n.l + ['x' * 99999 ~ i] %}{% endfor %}",
    "%": "{{ '%9999999999d' % 1 }}",
    "% of a given width": "{{ '%*d' % (5000000000, 1) }}",
    "the filter format": "{{ '%9999999999d' | format(1) }}",
    "format": "{{ '{:>9999999999}'.format('x') }}",
    "format of a given width": "{{ '{:{}}'.format('x', 5000000000) }}",
    "format_map": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 5000000000}) }}",
    "ljust": "{{ 'x'.ljust(5000000000) }}",
    "to_bytes": "{{ (1).to_bytes(5000000000, 'big') }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "translate": LARGE + "{{ a.translate({120: a}) }}",
    "replace": LARGE + "{{ a.replace('x', a) }}",
    "join": LARGE + "{{ a.join(a) }}",
    "the filter join": LARGE + "{{ range(99999) | map('string') | join(a) }}",
    "the filter replace": LARGE + "{{ a | replace('x', a) }}",
    "the filter center": "{{ 'x' | center(5000000000) }}",
    "the filter indent": "{{ 'x' | indent(5000000000, true) }}",
    "the filter batch": "{{ [1] | batch(5000000000, 'x') | list | length }}",
    "the filter slice": "{{ [1] | slice(5000000000) | list | length }}",
    "the filter wordwrap": LARGE + "{{ a | wordwrap(1, wrapstring=a) }}",
    "the filter tojson": "{{ messages | tojson(indent=5000000000) }}",
    "the filter sum": "{{ ([messages] * 30000) | sum(start=[]) | length }}",
}  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_loops_and_values_without_end_are_stopped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TIME_LIMIT", 0.3)
    monkeypatch.setattr(limits, "_AGAIN", 0.1)
    monkeypatch.setattr(limits, "MEMORY_LIMIT", 2**26)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        EndlessTemplateError, match=r"chat template of the tokenizer (takes|writes) more than"
    ):
        written(text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 100_000  # KiB


def test_time_has_run_out_also_where_another_error_replaces_the_timers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As C functions do that call back into Python."""
    monkeypatch.setattr(limits, "TIME_LIMIT", 0.05)
    with pytest.raises(limits.OutOfTimeError), limits.RenderLimits():
        try:
            while True:
                pass
        except limits.OutOfTimeError:
            raise TypeError("replaced") from None


def test_no_row_is_too_long_for_what_templates_do() -> None:
    """Ten megabytes in an answer, and a thousand turns, each with a loop over all of them."""
    long = [QUESTION, {"role": "assistant", "content": "0123456789\n" * 10**6}]
    many = [QUESTION, {"role": "assistant", "content": "an answer of some words, " * 4}] * 500
    text = (
        "{% for m in messages %}{% set c = m.content | trim %}{% set ns = namespace(s='', l=[]) %}"
        "{% for n in messages %}{% if n.role == 'system' %}{{ n.content }}{% endif %}{% endfor %}"
        "{% set ns.s = ns.s + c %}{% set ns.l = ns.l + [c] %}"
        "{{ '%s: ' % m.role ~ ns.l | join('') | replace('0', 'o') }}\n{% endfor %}{{ messages | tojson }}"
    )
    for messages in (long, many):
        made = written(text, messages)
        assert len(made) > 2 * sum(len(one["content"]) for one in messages)


def test_far_more_text_than_the_row_has_is_refused() -> None:
    text = "{% for i in range(9999) %}{{ 'x' * 99 }}{% endfor %}"
    with pytest.raises(BadRowError, match="writes more than 200,000 characters for one row"):
        written(text)
    long = [{"role": "user", "content": "y" * 100_000}]
    assert len(written(text, long)) == 9999 * 99
