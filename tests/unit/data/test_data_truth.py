"""Masks against the truth: what each template writes, written out by hand with ⟦what is trained on⟧.

`truth/NAME.txt` holds a text per case. The templates are our own, on a tokenizer of bytes, and the published
ones that lie beside the checkout, on the tokenizer there.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.render.masks import TrainOn
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import named_template
from dsft.data.rows import Conversation, Message, Rendered
from dsft.data.tokenizer.load import byte_level_tokenizer, load_tokenizer
from dsft.errors import DataError
from dsft.spec.files import CHAT_TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUTH, LAYOUT = Path(__file__).parent / "truth", Path(__file__).parent / "layouts"
SHARED = Path(__file__).parents[4] / "shared" / "data"
SPECIAL = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|end|user|assistant|system|observation)\|>"
    r"|<\|[A-Z_]+_TOKEN\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"
)
"""Of the tokenizers that the templates were made for; <s> and </s> begin and end a text in all of them."""
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<｜end▁of▁sentence｜>", "gemma": "<end_of_turn>",
    "glm": "<|user|>", "llama2": "</s>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "mistral": "</s>",
    "phi3": "<|end|>", "zephyr": "</s>",
}  # fmt: skip
"""What ends a turn; <|im_end|> in all others."""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}],
}


def talk(*turns: tuple[str, str] | Message, tools: tuple[Any, ...] = ()) -> Conversation:
    messages = ({"role": t[0], "content": t[1]} if isinstance(t, tuple) else t for t in turns)
    return Conversation(tuple(messages), tools)


ASKED, ANSWERED = ("user", "How many?"), ("assistant", "Twelve.")
TOOLS = (("user", "1 + 1?"), CALL, ("tool", "2"), ("assistant", "Two."))
THOUGHTS = talk(
    ASKED,
    ("assistant", "<think>\nI count.\n</think>\n\nTwelve."),
    ("user", "Why?"),
    ("assistant", "<think>\nHm.\n</think>\n\nDozen."),
)


def conversation(case: str, end: str) -> tuple[Conversation, TrainOn]:
    given = {
        "single": talk(ASKED, ANSWERED),
        "talk": talk(ASKED, ANSWERED, ("user", "Why?"), ("assistant", "Two\n\ndozen")),
        "system": talk(("system", "Be brief."), ASKED, ANSWERED),
        "forged": talk(("user", f"What is {end}?"), ("assistant", f"{end} ends{end}")),
        "tools": talk(*TOOLS, tools=(ADD,)),
        "calls": talk(*TOOLS),
        "thoughts": THOUGHTS,
        "last": THOUGHTS,
        "reasoning": talk(
            ASKED,
            {"role": "assistant", "content": "Twelve.", "reasoning_content": "I count."},
            ("user", "Why?"),
            ("assistant", "So."),
        ),
    }
    return given[case], "last" if case == "last" else "assistant"


def truths(name: str) -> dict[str, str]:
    text = (TRUTH / f"{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"=== (\w+)\n(.*?)\n(?==== |\Z)", text, flags=re.DOTALL))


def with_specials(tokenizer: PreTrainedTokenizerBase, template: str, bos: str | None) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    if "<|im_end|>" not in template:
        tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.bos_token = bos


def shown(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> str:
    pairs = zip(rendered.trained.tolist(), rendered.input_ids.tolist(), strict=True)
    runs = [(trained, list(run)) for trained, run in groupby(pairs, key=lambda pair: pair[0])]
    texts = [(trained, tokenizer.decode([token for _, token in run])) for trained, run in runs]
    return "".join(f"⟦{text}⟧" if trained else text for trained, text in texts)


def check(case: str, truth: str, end: str, template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    row, train_on = conversation(case, end)
    rendered = Renderer(tokenizer, template, train_on).render([row])[0]
    assert not isinstance(rendered, str), rendered
    assert shown(rendered, tokenizer) == truth
    assert rendered.ended
    end_id = tokenizer.convert_tokens_to_ids(end)
    if case == "forged":
        plain = Renderer(tokenizer, template).render([talk(("user", "What is?"), ("assistant", "x ends"))])[0]
        ends = (plain.input_ids == end_id).sum()
        assert (rendered.input_ids == end_id).sum() == ends, "what a content spells is no token"
        assert rendered.input_ids[rendered.trained].tolist().count(end_id) == 1
    elif case != "calls":
        own_messages: Any = list(row.messages)
        own_tools: Any = list(row.tools)
        own = tokenizer.apply_chat_template(own_messages, tools=own_tools or None, chat_template=template)
        assert rendered.input_ids.tolist() == own["input_ids"]


# --- the newest layouts -----------------------------------------------------------------------------------

LAYOUTS = {
    "gemma4": (
        "<turn|>",
        r"<\|(?:turn|tool(?:_call|_response)?)>|<(?:turn|tool(?:_call|_response)?)\|>|<\|\"\|>",
    ),
    "gpt_oss": ("<|return|>", r"<\|(?:start|end|message|channel|call|return)\|>"),
    "mistral_tekken": ("</s>", r"\[/?[A-Z_]+\]"),
    "qwen3_5": ("<|im_end|>", r"<\|im_(?:start|end)\|>|</?think>|</?tool_call>"),
}
"""What ends a turn, and the special tokens. Each file in layouts/ is ours, and writes the tokens of turns,
calls and results in the order in which the family's published template does; it says what it leaves out."""
OF_LAYOUTS = [(name, case) for name in LAYOUTS for case in truths(name)]


@cache
def layout(name: str) -> tuple[str, PreTrainedTokenizerBase]:
    template, tokenizer = (LAYOUT / f"{name}.jinja").read_text(encoding="utf-8"), byte_level_tokenizer()
    written = template.partition("-#}")[2]
    tokens = sorted(set(re.findall(LAYOUTS[name][1], written)))
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    if "bos_token" in written:
        tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return template, tokenizer


@pytest.mark.parametrize(("name", "case"), OF_LAYOUTS, ids=[f"{name}-{case}" for name, case in OF_LAYOUTS])
def test_the_newest_layouts(name: str, case: str) -> None:
    template, tokenizer = layout(name)
    check(case, truths(name)[case], LAYOUTS[name][0], template, tokenizer)


MISFITS = [
    ("gemma4", "tools", r"turn 2: the chat template does not end it with '<turn\|>\\n', with which it ends"),
    ("gpt_oss", "tools", r"turn 2: the chat template does not end it with '<\|return\|>', with which it"),
    ("gpt_oss", "talk",
     r"turn 2: the chat template writes 'return\|>' if the conversation ends with this answer, but "
     r"'end\|>.* in the row; train only on the last turn \(data.train_on: last\)"),
    ("qwen3_5", "talk",
     r"turn 2: the chat template writes '<think>\\n\\n</think>\\n\\n' before this answer at "
     "inference, but 'Twelve.* in the row, so the model would be trained on a prompt that it never gets"),
    ("qwen3_5", "last",
     r"turn 4: the chat template writes '\\n</think>\\n\\n' before this answer at inference, but 'Hm"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "case", "reason"), MISFITS)
def test_what_the_newest_layouts_have_refused(name: str, case: str, reason: str) -> None:
    template, tokenizer = layout(name)
    row, train_on = conversation(case, "")
    printed = Renderer(tokenizer, template, train_on, thinking="as_in_template").render([row])[0]
    assert isinstance(printed, str)
    assert re.match(reason, printed), printed


# --- our own ----------------------------------------------------------------------------------------------


OURS = [(name, case) for name in CHAT_TEMPLATES for case in truths(name)]


@cache
def ours(name: str) -> tuple[str, PreTrainedTokenizerBase]:
    template, tokenizer = named_template(name), byte_level_tokenizer()
    with_specials(tokenizer, template, None if "<|im_end|>" in template else "<s>")
    return template, tokenizer


@pytest.mark.parametrize(("name", "case"), OURS, ids=[f"{name}-{case}" for name, case in OURS])
def test_our_own_templates(name: str, case: str) -> None:
    template, tokenizer = ours(name)
    check(case, truths(name)[case], ENDS.get(name, "<|im_end|>"), template, tokenizer)


def test_every_file_has_its_name_and_its_truth() -> None:
    folder = Path(named_template.__code__.co_filename).parent / "templates"
    assert sorted(CHAT_TEMPLATES) == sorted(file.stem for file in folder.iterdir())
    for name in CHAT_TEMPLATES:
        assert {"single", "talk", "system", "forged"} <= truths(name).keys()


# --- the published ones -----------------------------------------------------------------------------------

PUBLISHED = {
    "chatml": "chatml", "cohere": "cohere", "gemma": "gemma", "gemma3": "gemma", "llama-2-chat": "llama2",
    "llama3": "llama3", "llama3_1": "llama3_1", "llama3_training": "llama3", "mistral-instruct": "mistral",
    "phi3": "phi3", "qwen2_5": "qwen2_5", "qwen3": "qwen3_published", "qwen3_training": "qwen3",
    "zephyr": "zephyr", "tokenizer": "minimind",
}  # fmt: skip
"""The truth that each is held to; "tokenizer" is the one of the tokenizer there."""
THEIRS = [(name, case) for name, truth in PUBLISHED.items() for case in truths(truth)]


@cache
def published(name: str) -> tuple[str, PreTrainedTokenizerBase]:
    """A template, and the shared tokenizer with the special tokens that the template's own one has."""
    path = SHARED / "templates" / f"{name}.jinja"
    if not SHARED.exists():
        pytest.skip("the published templates (../shared/data) are not beside this checkout")
    tokenizer = load_tokenizer(SHARED / "tokenizer")
    if name == "tokenizer":
        return tokenizer.chat_template, tokenizer
    text = path.read_text(encoding="utf-8")
    if name in ("chatml", "llama-2-chat", "mistral-instruct", "zephyr"):
        text = text.replace("    ", "").replace("\n", "")  # laid out for reading; so their authors load them
    with_specials(tokenizer, text, None if "<|im_end|>" in text else "<s>")
    return text, tokenizer


@pytest.mark.parametrize(("name", "case"), THEIRS, ids=[f"{name}-{case}" for name, case in THEIRS])
def test_published_templates(name: str, case: str) -> None:
    template, tokenizer = published(name)
    truth = truths(PUBLISHED[name])[case]
    if name == "gemma" and case == "system":
        pytest.skip("it has no system turn: test_what_is_refused")
    if name == "qwen3_training":
        truth = truth.replace("⟧\n", "\n⟧")  # its marks hold the line break
    check(case, truth, ENDS.get(PUBLISHED[name], "<|im_end|>"), template, tokenizer)


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="⟦⟧"), max_size=10)
SPELLED = st.sampled_from(["x</s>", "<|im_end|>", "\n\n", " y "])
SAID = st.lists(st.tuples(WORDS | SPELLED, WORDS | SPELLED), min_size=1, max_size=3)


@pytest.mark.parametrize("name", PUBLISHED)
@given(SAID)
@settings(max_examples=20, deadline=None)
def test_any_talk_with_a_published_template(name: str, turns: list[tuple[str, str]]) -> None:
    """The text is the tokenizer's own rendering, and a part per answer is trained on; or a token lies across
    the border of an answer, which is reported."""
    template, tokenizer = published(name)
    messages = [
        {"role": role, "content": printed}
        for turn in turns
        for role, printed in zip(("user", "assistant"), turn, strict=True)
    ]
    rendered = renderer(name).render([Conversation(tuple(messages))])[0]
    if isinstance(rendered, str):
        assert re.match(r"turn \d+: the tokenizer merges its first or last characters", rendered)
        return
    own = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert tokenizer.decode(rendered.input_ids) == own
    parts = re.findall("⟦(.*?)⟧", shown(rendered, tokenizer), flags=re.DOTALL)
    for part, (_, answer) in zip(parts, turns, strict=True):
        ending = part.rstrip("\n")
        assert ending.endswith(ENDS.get(PUBLISHED[name], "<|im_end|>"))
        assert answer.strip() in part


@cache
def renderer(name: str) -> Renderer:
    template, tokenizer = published(name)
    return Renderer(tokenizer, template)


WRITES = "the chat template writes"
NO_END = "writes nothing after an assistant's turn, so a model trained with it would not learn to stop"
REFUSED = [
    ("gemma", "system", "the chat template refuses the row: System role not supported"),
    ("llama-2-chat", "tools", "the row has tools, which the chat template leaves out; remove them"),
    ("phi3", "calls", "the row has tool calls, which the chat template leaves out; remove them"),
    ("qwen3", "thoughts",
     rf"turn 2: {WRITES} '<think>\\nI count.* if the conversation ends with this answer, but "
     r"'Twelve.* in the row; train only on the last turn \(data.train_on: last\), keep the thoughts"),
    ("qwen3", "reasoning", rf"turn 2: {WRITES} '<think>\\nI count.* if the conversation ends with this"),
    ("deepseekv3", "single",
     rf"turn 2: {WRITES} '<think>\\n' before this answer at inference, but 'Twelve.*, "
     "so the model would be trained on a prompt that it never gets; set data.chat_template"),
    ("deepseekv3", "talk", rf"turn 2: {WRITES} '<think>\\n' before this answer at inference"),
    ("deepseekv3", "last", rf"turn 4: {WRITES} '<think>\\n' before this answer at inference"),
    ("deepseekv3", "calls", rf"turn 2: {WRITES} 'think>\\n' before this answer at inference"),
    ("deepseekv3", "tools", "the row has tools, which the chat template leaves out; remove them"),
    ("tokenizer", "thoughts", rf"turn 2: {WRITES} '\\n</think>.*' before this answer at inference"),
    ("glm4moe", "single", NO_END),
    ("glm4moe", "last", NO_END),
]  # fmt: skip


@pytest.mark.parametrize(("name", "case", "reason"), REFUSED)
def test_what_is_refused(name: str, case: str, reason: str) -> None:
    template, tokenizer = published(name)
    row, train_on = conversation(case, "")
    try:
        printed = Renderer(tokenizer, template, train_on, thinking="as_in_template").render([row])[0]
    except DataError as error:  # of a template that no row can be rendered with
        printed = str(error)
    assert isinstance(printed, str)
    assert re.search(reason, printed), printed


OUR_OWN = {"deepseekv3": "deepseek", "glm4moe": "glm", "qwen3": "qwen3", "tokenizer": "qwen3"}


@pytest.mark.parametrize("name", OUR_OWN)
def test_the_way_out_is_one(name: str) -> None:
    """What a published template refuses, ours of the same family trains on, with the same tokenizer."""
    _, tokenizer = published(name)
    template = named_template(OUR_OWN[name])
    rendered = Renderer(tokenizer, template).render([THOUGHTS])[0]
    assert isinstance(rendered, Rendered)
    assert [
        part.count("Twelve.") + part.count("Dozen.")
        for part in re.findall("⟦(.*?)⟧", shown(rendered, tokenizer), flags=re.DOTALL)
    ] == [1, 1]
