"""data.thinking: what becomes of thoughts, in templates of reasoning models, and what is then trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from tokenizers import AddedToken

from dsft.data.cache.store import Cache
from dsft.data.render.masks import TrainOn
from dsft.data.render.renderer import Renderer, pair_mistake
from dsft.data.render.template import choose_template, named_template
from dsft.data.render.thoughts import Thinking, split_thought
from dsft.data.rows import Conversation, Message, Rendered
from dsft.data.sets.load import load_data
from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.data.steps.steps import TrainSteps
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Data, Source
from tests.unit.data.token_rows import spec_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARED = Path(__file__).parents[4] / "shared" / "data" / "templates"
TURNS = r"""
{%- set last = namespace(question=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set last.question = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content, thought = message.content or '', THOUGHT %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {{- '<think>\n' + thought + '\n</think>\n\n' if WRITES and loop.index0 > last.question else '' }}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}PROMPT
{%- endif %}
"""
WITHOUT = (
    r"{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else %s }}"
)
_READS = TURNS.replace("THOUGHT", "message.reasoning_content or ''").replace("WRITES", "true")
TEMPLATES = {
    # drops all thoughts, also of the last answer, and prompts with the beginning of one
    "R1": TURNS.replace("THOUGHT", "''").replace("WRITES", "false").replace("PROMPT", r"{{- '<think>\n' }}"),
    # writes the thoughts of the answers after the last question, and leaves <think> to the model
    "Qwen 3": _READS.replace("PROMPT", WITHOUT % "''"),
    # the same, but prompts with the beginning of a thought
    "Qwen 3.5": _READS.replace("PROMPT", WITHOUT % r"'<think>\n'"),
}
USER, ASSISTANT, END = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
EVERY = pytest.mark.parametrize("name", TEMPLATES)
EACH_PROMPT = pytest.mark.parametrize("name", ["R1", "Qwen 3.5"])


@cache
def tokens() -> PreTrainedTokenizerBase:
    """Bytes; two line breaks are one token, as with real tokenizers."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT, END]})
    tokenizer.add_tokens(
        [AddedToken("\n\n", normalized=False), AddedToken("<think>"), AddedToken("</think>")]
    )
    return tokenizer


def renderer(name: str, thinking: Thinking, train_on: TrainOn = "assistant") -> Renderer:
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATES.get(name, name)
    choose_template(tokenizer, None, thinking)
    return Renderer(tokens(), tokenizer.chat_template, train_on, thinking=thinking)


def talk(*turns: str | Message, trained: tuple[bool | None, ...] = ()) -> Conversation:
    """ "u:words" is the user's, "a:" the assistant's, "t:" a tool's."""
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    messages = ({"role": roles[t[0]], "content": t[2:]} if isinstance(t, str) else t for t in turns)
    return Conversation(tuple(messages), (), trained)


def reasoned(content: str, thought: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": thought, **more}


def shown(name: str, thinking: Thinking, row: Conversation, train_on: TrainOn = "assistant") -> str:
    """The row, with ⟦what is trained on⟧, 'U' for a question of the user and 'A' for an answer's header."""
    rendered = renderer(name, thinking, train_on).render([row])[0]
    assert isinstance(rendered, Rendered), rendered
    assert rendered.ended
    pairs = zip(rendered.trained.tolist(), rendered.input_ids.tolist(), strict=True)
    runs = [(trained, list(run)) for trained, run in groupby(pairs, key=lambda pair: pair[0])]
    texts = [(trained, tokens().decode([token for _, token in run])) for trained, run in runs]
    text = "".join(f"⟦{text}⟧" if trained else text for trained, text in texts)
    text = text.replace("<|im_start|>assistant\n", "A ").replace("<|im_start|>user\n", "U ")
    return text.replace("<|im_end|>⟧\n", ".⟧ ").replace("<|im_end|>\n", ". ").strip()


def refused(name: str, thinking: Thinking, row: Conversation, train_on: TrainOn = "assistant") -> str:
    printed = renderer(name, thinking, train_on).render([row])[0]
    assert isinstance(printed, str)
    return printed


PLAIN = talk("u:q", "a:one")
PLAINS = talk("u:q", "a:one", "u:r", "a:two")
IN_CONTENT = talk("u:q", "a:<think>\nhm\n</think>\n\none", "u:r", "a:<think>\nso\n</think>\n\ntwo")
APART = talk("u:q", reasoned("one", "hm"), "u:r", reasoned("two", "so"))
CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
NONE, OPENED = "<think>\n\n</think>\n\n", "<think>\n"


def test_the_values_are_those_of_the_spec() -> None:
    assert get_args(Data.model_fields["thinking"].annotation) == get_args(Thinking)
    assert Data.model_fields["thinking"].default == Renderer(tokens()).thinking == "empty"


def test_only_line_breaks_are_taken_from_the_ends_of_a_thought() -> None:
    written = {"role": "assistant", "content": "<think>\n  I count. \n\n</think>\n\nTwelve."}
    for message in (written, reasoned("Twelve.", "\n  I count. \n")):
        assert split_thought(message) == ("  I count. ", {"role": "assistant", "content": "Twelve."})


# --- rows without thoughts --------------------------------------------------------------------------------


@EACH_PROMPT
def test_as_in_template_refuses_what_the_prompt_does_not_begin(name: str) -> None:
    reason = refused(name, "as_in_template", PLAINS)
    assert reason.startswith("turn 2: the chat template writes '<think>\\n' before this answer at inference")


@EACH_PROMPT
@pytest.mark.parametrize("thinking", ["empty", "keep"])
def test_an_empty_thought_ends_what_the_prompt_opens(name: str, thinking: Thinking) -> None:
    """The prompt is the one at inference, as tokens too: its line break is one of its own."""
    one = f"U q. A {OPENED}⟦</think>\n\none.⟧"
    assert shown(name, thinking, PLAIN) == one
    assert shown(name, thinking, PLAINS) == f"{one} U r. A {OPENED}⟦</think>\n\ntwo.⟧"
    prompt = tokens().apply_chat_template(
        [dict(PLAIN.messages[0])], chat_template=TEMPLATES[name], add_generation_prompt=True
    )["input_ids"]
    (row,) = renderer(name, thinking).render([PLAIN])
    assert row.input_ids[: row.trained.argmax()].tolist() == prompt


@EACH_PROMPT
def test_history_is_what_the_template_writes_where_only_the_last_answer_is_trained_on(name: str) -> None:
    last = f"A {OPENED}⟦</think>\n\ntwo.⟧"
    assert shown(name, "empty", PLAINS, "last") == f"U q. A one. U r. {last}"
    assert shown(name, "keep", PLAINS, "last") == f"U q. A {OPENED}</think>\n\none. U r. {last}"
    flags = talk("u:q", "a:one", "u:r", "a:two", trained=(None, False, None, None))
    assert shown(name, "empty", flags) == f"U q. A one. U r. {last}"


def test_a_template_that_opens_no_thought() -> None:
    as_written = f"U q. A ⟦one.⟧ U r. A ⟦{NONE}two.⟧"
    assert shown("Qwen 3", "as_in_template", PLAINS) == as_written
    assert shown("Qwen 3", "empty", PLAINS) == as_written
    assert shown("Qwen 3", "keep", PLAINS) == f"U q. A ⟦{NONE}one.⟧ U r. A ⟦{NONE}two.⟧"


def test_templates_that_write_no_empty_thought_or_only_begin_one() -> None:
    """keep writes an empty thought as the template writes others; an opened one is ended."""
    never_empty = TURNS.replace("THOUGHT", "message.reasoning_content or ''").replace("WRITES", "thought")
    never_empty = never_empty.replace("PROMPT", "")
    assert shown(never_empty, "keep", PLAINS) == f"U q. A ⟦{NONE}one.⟧ U r. A ⟦{NONE}two.⟧"
    only_begins = (
        r"{% for m in messages %}"
        r"{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    assert shown(only_begins, "empty", PLAIN) == f"U q. A {OPENED}⟦</think>\n\none.⟧"


@pytest.mark.parametrize("row", [PLAINS, IN_CONTENT, APART], ids=["plain", "content", "apart"])
def test_strip(row: Conversation) -> None:
    """A template with a switch prompts with an empty thought, which is then no target; without one, the model
    learns to end what the prompt opens."""
    for name in ("Qwen 3", "Qwen 3.5"):
        assert shown(name, "strip", row) == f"U q. A {NONE}⟦one.⟧ U r. A {NONE}⟦two.⟧"
        assert shown(name, "strip", row, "last") == f"U q. A one. U r. A {NONE}⟦two.⟧"
    ended = f"U q. A {OPENED}⟦</think>\n\none.⟧ U r. A {OPENED}⟦</think>\n\ntwo.⟧"
    assert shown("R1", "strip", row) == ended


def test_strip_changes_the_prompt_of_exports_and_chats() -> None:
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATES["Qwen 3"], "other": named_template("chatml")}
    for _ in range(2):  # a second time, as when an export is trained on
        choose_template(tokenizer, None, "strip")
    assert tokenizer.chat_template["other"] == named_template("chatml")
    tokenizer.chat_template = tokenizer.chat_template["default"]
    assert tokenizer.chat_template.count("default(false)") == 1

    def prompt(**more: Any) -> Any:
        messages = [dict(PLAIN.messages[0])]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)

    assert prompt().endswith(f"assistant\n{NONE}")
    assert prompt(enable_thinking=True).endswith("assistant\n")


# --- rows with thoughts -----------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("row", [IN_CONTENT, APART], ids=["content", "apart"])
def test_keep_has_the_thoughts_of_all_turns(name: str, row: Conversation) -> None:
    opened = "" if name == "Qwen 3" else OPENED
    first, second = (f"{OPENED}{thought}\n</think>\n\n".removeprefix(opened) for thought in ("hm", "so"))
    text = f"U q. A {opened}⟦{first}one.⟧ U r. A {opened}⟦{second}two.⟧"
    assert shown(name, "keep", row) == text
    only_last = (
        text.replace("⟦", "").replace(".⟧ U", ". U").replace(f"{opened}{second}", f"{opened}⟦{second}")
    )
    assert shown(name, "keep", row, "last") == only_last


@EVERY
@pytest.mark.parametrize("row", [IN_CONTENT, APART], ids=["content", "apart"])
def test_thoughts_that_the_template_drops_are_refused(name: str, row: Conversation) -> None:
    reason = refused(name, "empty", row)
    assert reason.startswith("turn 2: the chat template ")
    assert "(data.train_on: last), keep the thoughts of all turns (data.thinking: keep), or set" in reason
    opened = "" if name == "Qwen 3" else OPENED
    thought = f"{OPENED}so\n</think>\n\n".removeprefix(opened)
    assert shown(name, "empty", row, "last") == f"U q. A one. U r. A {opened}⟦{thought}two.⟧"


def test_a_thought_whose_opening_was_in_the_prompt() -> None:
    """As answers are that a model with such a prompt has written."""
    row = talk("u:q", "a:hm\n</think>\n\none")
    assert shown("R1", "empty", row) == f"U q. A {OPENED}⟦hm\n</think>\n\none.⟧"
    assert shown("Qwen 3", "keep", row) == f"U q. A ⟦{OPENED}hm\n</think>\n\none.⟧"


def test_a_mixture() -> None:
    row = talk("s:S", "u:q", "a:one", "u:r", reasoned("two", "so"))
    system = "<|im_start|>system\nS. "
    both = f"A {OPENED}⟦</think>\n\none.⟧ U r. A {OPENED}⟦so\n</think>\n\ntwo.⟧"
    assert shown("R1", "empty", row) == f"{system}U q. {both}"
    assert (
        shown("Qwen 3", "keep", row) == f"{system}U q. A ⟦{NONE}one.⟧ U r. A ⟦{OPENED}so\n</think>\n\ntwo.⟧"
    )


def test_several_ends_of_a_thought() -> None:
    row = talk("u:q", "a:<think>hm</think>one</think>two")
    assert "an answer has </think> after its thought" in refused("R1", "empty", row)


def test_a_thought_after_a_prompt_without_one() -> None:
    """A template that only ever prompts with an empty thought."""
    template = _READS.replace("PROMPT", r"{{- '<think>\n\n</think>\n\n' }}")
    assert shown(template, "empty", PLAINS) == f"U q. A {NONE}⟦one.⟧ U r. A {NONE}⟦two.⟧"
    reason = refused(template, "empty", talk("u:q", reasoned("one", "hm")))
    assert "train without thoughts (data.thinking: strip)" in reason
    assert shown(template, "strip", APART) == f"U q. A {NONE}⟦one.⟧ U r. A {NONE}⟦two.⟧"


# --- calls ------------------------------------------------------------------------------------------------


def calls(*thoughts: str) -> Conversation:
    first, second = ({"reasoning_content": thought} if thought else {} for thought in thoughts)
    call = {"role": "assistant", "content": "", "tool_calls": CALL, **first}
    return talk("u:q", call, "t:1", {"role": "assistant", "content": "one", **second})


def test_calls() -> None:
    result, call = "<|im_start|>tool\n1. ", "<tool_call>f</tool_call>.⟧ "
    for name in ("R1", "Qwen 3.5"):
        assert shown(name, "empty", calls("", "")) == (
            f"U q. A {OPENED}⟦</think>\n\n{call}{result}A {OPENED}⟦</think>\n\none.⟧"
        )
        assert shown(name, "keep", calls("hm", "so")) == (
            f"U q. A {OPENED}⟦hm\n</think>\n\n{call}{result}A {OPENED}⟦so\n</think>\n\none.⟧"
        )
    # after the last question this template keeps the thought of a call
    assert shown("Qwen 3.5", "empty", calls("hm", "")) == (
        f"U q. A {OPENED}⟦hm\n</think>\n\n{call}{result}A {OPENED}⟦</think>\n\none.⟧"
    )
    assert "leaves out its thought" in refused("R1", "empty", calls("hm", ""))
    assert shown("Qwen 3", "keep", calls("", "so")) == (
        f"U q. A ⟦{NONE}{call}{result}A ⟦{OPENED}so\n</think>\n\none.⟧"
    )
    assert shown("Qwen 3", "strip", calls("hm", "so")) == f"U q. A {NONE}⟦{call}{result}A {NONE}⟦one.⟧"


def test_a_prompt_that_opens_no_thought_after_a_result() -> None:
    template = TEMPLATES["R1"].replace(
        r"{{- '<think>\n' }}", r"{{- '<think>\n' if messages[-1].role != 'tool' else '' }}"
    )
    result, call = "<|im_start|>tool\n1. ", "<tool_call>f</tool_call>.⟧ "
    opened = f"U q. A {OPENED}⟦</think>\n\n{call}{result}A "
    assert shown(template, "empty", calls("", "")) == f"{opened}⟦one.⟧"
    assert shown(template, "empty", calls("", "so")) == f"{opened}⟦{OPENED}so\n</think>\n\none.⟧"


# --- all, and words that spell tokens ---------------------------------------------------------------------


@EACH_PROMPT
def test_all_turns(name: str) -> None:
    first, second = (f"A {OPENED}</think>\n\n{word}. " for word in ("one", "two"))
    assert shown(name, "empty", PLAINS, "all") == f"⟦U q. {first}U r. {second}⟧"
    flags = talk("u:q", "a:one", "u:r", "a:two", trained=(None, False, None, None))
    out = f"⟦U q. A {OPENED}⟧</think>\n\none<|im_end|>⟦\nU r. {second}⟧"
    assert shown(name, "empty", flags, "all") == out


@EVERY
def test_a_thought_that_spells_a_token(name: str) -> None:
    row = talk("u:q", reasoned("one", "what is <|im_end|>?"))
    end = tokens().convert_tokens_to_ids("<|im_end|>")
    (rendered,) = renderer(name, "keep").render([row])
    assert isinstance(rendered, Rendered) and rendered.spelled
    assert rendered.input_ids.tolist().count(end) == 2  # of the two turns
    assert "what is <|im_end|>?\n</think>\n\none" in tokens().decode(rendered.input_ids[rendered.trained])


# --- pairs, and packed rows -------------------------------------------------------------------------------


@EACH_PROMPT
def test_the_answers_of_a_pair_have_the_same_prompt(name: str) -> None:
    pair = talk("u:q", reasoned("one", "hm")), talk("u:q", "a:two")
    chosen, rejected = renderer(name, "empty").render(pair)
    assert isinstance(chosen, Rendered) and isinstance(rejected, Rendered)
    assert pair_mistake(chosen, rejected) is None
    prompts = [row.input_ids[: row.trained.argmax()].tolist() for row in (chosen, rejected)]
    assert prompts[0] == prompts[1]
    assert tokens().decode(prompts[0]).endswith(f"assistant\n{OPENED}")


@pytest.mark.parametrize("thinking", ["empty", "strip", "keep"])
@EVERY
def test_packed_and_padded_rows_train_on_the_same(name: str, thinking: Thinking, tmp_path: Path) -> None:
    talks = [PLAIN, PLAINS, calls("", ""), *([APART, IN_CONTENT] if thinking != "empty" else [])]
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": [dict(message) for message in talk.messages]} for talk in talks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: Any = deepcopy(tokens())
    tokenizer.chat_template = TEMPLATES[name]
    choose_template(tokenizer, None, thinking)
    data = Data(train=(Source(path=str(path)),), max_length=512, thinking=thinking)
    loaded = load_data(spec_of("sft", data), tokenizer, Cache(tmp_path / "cache", 0))
    wanted = []
    for row in renderer(name, thinking).render(talks):
        wanted.append((row.input_ids.tolist(), row.input_ids[row.trained].tolist()))
    for packed in (4096, None):
        sizes = BatchSizes(len(talks), len(talks), 1, 1, packed)
        step = TrainSteps(loaded.train, sizes, 0, 3, tokenizer.pad_token_id).step(0)
        found = [one for batch in step.micro_batches for one in _examples(batch, tokenizer.pad_token_id)]
        assert sorted(found) == sorted(wanted), packed


def _examples(batch: MicroBatch, pad: int) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, targets) of each example of a packed or a padded micro-batch."""
    ids, targets = batch.tokens.input_ids, batch.tokens.targets
    if batch.segments is not None:
        parts = zip(
            ids[0].split(batch.segments.lengths), targets[0].split(batch.segments.lengths), strict=True
        )
    else:
        parts = zip(ids, targets, strict=True)
    for tokens_of, targets_of in parts:
        real = tokens_of[tokens_of != pad].tolist()
        if real:
            yield real, targets_of[targets_of != NO_TARGET].tolist()


# --- other templates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", get_args(Thinking))
@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "llama3", "qwen3"])
def test_templates_without_a_thought_in_the_prompt_stay_as_they_are(name: str, thinking: Thinking) -> None:
    template, tokenizer = named_template(name), byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    one, other = (
        Renderer(tokenizer, template, thinking=value).render([PLAINS])[0]
        for value in (thinking, "as_in_template")
    )
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.trained.tolist() == other.trained.tolist()


def test_the_key_covers_it() -> None:
    digests = {Renderer(tokens(), thinking=thinking).digest for thinking in get_args(Thinking)}
    assert len(digests) == 4


DEEPSEEK = "".join(
    f"{USER}{q}{ASSISTANT}{OPENED}⟦</think>\n\n{a}{END}⟧" for q, a in (("q", "one"), ("r", "two"))
)
PUBLISHED: Mapping[tuple[str, Thinking], str] = {
    ("qwen3", "empty"): f"U q. A ⟦one.⟧ U r. A ⟦{NONE}two.⟧",
    ("qwen3", "keep"): f"U q. A ⟦{NONE}one.⟧ U r. A ⟦{NONE}two.⟧",
    ("qwen3", "strip"): f"U q. A {NONE}⟦one.⟧ U r. A {NONE}⟦two.⟧",
    ("deepseekv3", "empty"): DEEPSEEK,
    ("deepseekv3", "keep"): DEEPSEEK,
    ("deepseekv3", "strip"): DEEPSEEK,
}


@pytest.mark.parametrize(("name", "thinking"), PUBLISHED)
def test_published_templates(name: str, thinking: Thinking) -> None:
    path = SHARED / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    assert shown(path.read_text(encoding="utf-8"), thinking, PLAINS) == PUBLISHED[name, thinking]
