"""What is trained on: data.train_on, flags of messages, tools, prompts; and it is the assistant's tokens."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.cache.store import tokenized_rows
from dsft.data.render.masks import TrainOn
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import named_template
from dsft.data.rows import Conversation, Message, Rendered, Text
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError
from dsft.spec.files import CHAT_TEMPLATES
from dsft.spec.schema import Source

BYTES = byte_level_tokenizer()
END = "<|im_end|>"
UNMARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOTH = pytest.mark.parametrize("template", [None, UNMARKED], ids=["marked", "unmarked"])


def talk(*turns: str, trained: tuple[bool | None, ...] = ()) -> Conversation:
    """ "u:words" is the user's, "a:" the assistant's, "s:" the system's, "t:" a tool's."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = tuple({"role": roles[turn[0]], "content": turn[2:]} for turn in turns)
    return Conversation(messages, (), trained)


def made(row: Conversation | Text, template: str | None = None, train_on: TrainOn = "assistant") -> Rendered:
    rendered = Renderer(BYTES, template, train_on).render([row])[0]
    assert not isinstance(rendered, str), rendered
    return rendered


def parts(rendered: Rendered) -> list[str]:
    """The text of each run of trained tokens."""
    pairs = zip(rendered.trained.tolist(), rendered.input_ids.tolist(), strict=True)
    runs = groupby(pairs, key=lambda pair: pair[0])
    return [BYTES.decode([token for _, token in run]) for trained, run in runs if trained]


def refusal(row: Conversation | Text, template: str | None = None, train_on: TrainOn = "assistant") -> str:
    shown = Renderer(BYTES, template, train_on).render([row])[0]
    assert isinstance(shown, str)
    return shown


FOUR = ("s:S", "u:q", "a:one", "u:r", "a:two")


# --- train_on and flags -----------------------------------------------------------------------------------


@BOTH
def test_train_on(template: str | None) -> None:
    assert parts(made(talk(*FOUR), template)) == [f"one{END}", f"two{END}"]
    assert parts(made(talk(*FOUR), template, "last")) == [f"two{END}"]
    whole = made(talk(*FOUR), template, "all")
    assert whole.trained.all() and whole.ended


@BOTH
def test_flags_of_messages_win(template: str | None) -> None:
    def of(train_on: TrainOn, *flags: bool | None) -> list[str]:
        return parts(made(talk(*FOUR, trained=flags), template, train_on))

    assert of("assistant", None, None, False, None, None) == [f"two{END}"]
    assert of("last", None, None, True, None, None) == [f"one{END}", f"two{END}"]
    assert of("last", None, None, None, None, False) == []
    assert of("assistant", False, False, True, False, False) == [f"one{END}"]


@BOTH
def test_all_but_what_a_flag_takes_out(template: str | None) -> None:
    def of(*flags: bool | None) -> list[str]:
        return parts(made(talk(*FOUR, trained=flags), template, "all"))

    start = f"<|im_start|>system\nS{END}\n<|im_start|>user\nq{END}\n<|im_start|>assistant\n"
    rest = f"\n<|im_start|>user\nr{END}\n<|im_start|>assistant\ntwo{END}\n"
    assert of(None, None, False, None, None) == [start, rest]
    assert of(None, False, None, None, None) == [
        f"<|im_start|>system\nS{END}\n",
        f"<|im_start|>assistant\none{END}{rest}",
    ]
    assert of(False, None, True, None, None)[0].startswith("<|im_start|>user\nq")


@BOTH
def test_a_users_turn_with_a_flag_is_trained_on_whole(template: str | None) -> None:
    row = talk("s:S", "u:q", "a:one", trained=(None, True, None))
    assert parts(made(row, template)) == [f"<|im_start|>user\nq{END}\n", f"one{END}"]


@BOTH
def test_what_follows_the_last_answer_is_not_trained_on(template: str | None) -> None:
    rendered = made(talk("u:q", "a:one", "u:r", "t:x"), template)
    assert parts(rendered) == [f"one{END}"]
    assert BYTES.decode(rendered.input_ids.tolist()).endswith(f"<|im_start|>tool\nx{END}\n")


@BOTH
def test_answers_in_a_row_and_first_ones(template: str | None) -> None:
    assert parts(made(talk("a:one", "a:two", "u:q", "a:"), template)) == [f"one{END}", f"two{END}", END]


def test_last_is_a_way_out_where_earlier_turns_are_rewritten() -> None:
    shown = "(m['content'] if loop.last else m['content'].split('.')[-1])"
    template, row = UNMARKED.replace("m['content']", shown), talk("u:q", "a:hm.one", "u:r", "a:hm.two")
    refused = refusal(row, template)
    assert (
        refused.startswith("turn 2: the chat template writes 'hm.one<|im_end|>")
        and "'one<|im_end|>" in refused
    )
    assert "train only on the last turn (data.train_on: last), or set data.chat_template" in refused
    assert parts(made(row, template, "last")) == [f"hm.two{END}"]


# --- marks ------------------------------------------------------------------------------------------------

TWICE = named_template("chatml").replace(
    "{{- message['content'] + '<|im_end|>' }}\n        {%- endgeneration %}",
    "{{- message['content'] }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{%- endgeneration %}",
)


def test_marks_that_are_not_one_a_turn() -> None:
    assert parts(made(talk(*FOUR), TWICE)) == [f"one{END}", f"two{END}"]
    flagged = talk(*FOUR, trained=(None, None, False, None, None))
    for shown in (refusal(talk(*FOUR), TWICE, "last"), refusal(flagged, TWICE, "all")):
        assert shown.startswith("the chat template marks 4 parts, but the row has 2 assistant turns")


def test_marks_that_leave_the_end_of_turn_out() -> None:
    template = named_template("chatml").replace(
        "+ '<|im_end|>' }}\n        {%- endgeneration %}", "}}{%- endgeneration %}{{- '<|im_end|>' }}"
    )
    rendered = made(talk(*FOUR), template)
    assert parts(rendered) == ["one", "two"]
    assert not rendered.ended
    assert made(talk(*FOUR), None).ended


def test_marks_that_do_not_enclose_the_answer() -> None:
    """transformers counts characters from the place of the block, which has none inside a macro."""
    marked = "{% generation %}{{ m['content'] }}{% endgeneration %}"
    macro = f"{{% macro body(m) %}}<|im_start|>{marked}{{% endmacro %}}"
    for template in (
        macro + "{% for m in messages %}{{ body(m) + '<|im_end|>' }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] }}{% generation %}<|im_end|>{% endgeneration %}{% endfor %}",
    ):
        with pytest.raises(DataError, match="marks do not enclose the assistant's content"):
            made(talk("u:q", "a:one"), template)


def test_marks_whose_end_of_turn_is_no_token_of_the_tokenizer() -> None:
    """As where a template is named that was made for another tokenizer."""
    with pytest.raises(
        DataError, match=r"ends an assistant's turn with '<\|eot_id\|>', which has no special"
    ):
        made(talk("u:q", "a:one"), named_template("llama3"))


# --- tools, and what a template leaves out ----------------------------------------------------------------

CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
QUESTION, ANSWER = talk("u:q", "a:one").messages


def test_what_a_template_would_leave_out_in_silence() -> None:
    assert "the row has tools, which the chat template leaves out" in refusal(
        Conversation((QUESTION, ANSWER), (TOOL,))
    )
    assert "the row has tool calls, which the chat template leaves out" in refusal(
        Conversation((QUESTION, CALL))
    )
    assert "the row has reasoning contents, which the chat template leaves out" in refusal(
        Conversation((QUESTION, {**ANSWER, "thinking": "hm"}))
    )
    deaf = UNMARKED.replace("{%- for m in messages %}", "{%- for m in messages if m['role'] != 'system' %}")
    assert refusal(talk(*FOUR), deaf).startswith(
        "the row has a system turn, which the chat template leaves out"
    )
    assert parts(made(talk(*FOUR[1:]), deaf)) == [f"one{END}", f"two{END}"]


def test_a_system_turn_inside_the_users_is_not_distinguished() -> None:
    """Gemma 3's and Llama 2's way; else the mask would be of both, whatever the flags say."""
    joined = (
        "{%- set s = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
        "{%- for m in messages if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ (s if loop.first else '') + m['content'] + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    cases: list[tuple[tuple[bool | None, ...], TrainOn]] = [
        ((False, None), "all"), ((None, True), "last"), ((True, None), "assistant"),
    ]  # fmt: skip
    for flags, train_on in cases:
        row = talk("s:S", "u:q", "a:one", trained=(*flags, None))
        assert "writes the system turn into the user's" in refusal(row, joined, train_on)
    both = made(talk("s:S", "u:q", "a:one", trained=(True, True, None)), joined)
    assert parts(both) == [f"<|im_start|>user\nSq{END}\n", f"one{END}"]
    assert parts(made(talk("s:S", "u:q", "a:one"), joined)) == [f"one{END}"]


def test_words_beside_a_call_that_a_template_passes_over() -> None:
    written = "(m['content'] if not m.get('tool_calls') else m['tool_calls'][0]['function']['name'])"
    template, spoken = UNMARKED.replace("m['content']", written), {**CALL, "content": "I look it up."}
    refused = refusal(Conversation((QUESTION, spoken)), template)
    assert refused.startswith("the row has content beside tool calls, which the chat template leaves out")
    assert parts(made(Conversation((QUESTION, {**CALL, "content": "\n"})), template)) == [f"f{END}"]
    both = template.replace("tool_calls'][0]['function']['name']", "content'] + m['tool_calls'][0]['id']")
    called = {**spoken, "tool_calls": [{**CALL["tool_calls"][0], "id": "7"}]}
    assert parts(made(Conversation((QUESTION, called)), both)) == [f"I look it up.7{END}"]


def test_arguments_as_text_for_templates_that_want_them_so() -> None:
    """DeepSeek's join them to other text."""
    name, arguments = "c['function']['name']", "c['function']['arguments']"
    call = f"{{% for c in m['tool_calls'] or [] %}}{{{{ {name} + {arguments} }}}}{{% endfor %}}"
    template = UNMARKED.replace("+ '<|im_end|>\n' }}{%-", "}}" + call + "{{ '<|im_end|>\n' }}{%-")
    shown = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    row = Conversation((QUESTION, {**CALL, "tool_calls": [shown]}, *talk("t:x", "a:one").messages))
    assert parts(made(row, template)) == ['f{"a": "é"}' + END, f"one{END}"]


# --- prompts and completions ------------------------------------------------------------------------------


def test_a_prompt_is_not_trained_on() -> None:
    rendered = made(Text((("2 + 2 =", False), (" 4", True))))
    assert rendered.input_ids.tolist() == [*b"2 + 2 = 4", BYTES.eos_token_id]
    assert parts(rendered) == [f" 4{END}"]
    assert parts(made(Text((("a", True), ("b", False), ("c", True))))) == ["a", f"c{END}"]
    assert parts(made(Text((("", False), ("c", True))))) == [f"c{END}"]
    assert made(Text((("2 + 2 =", False), (" 4", True))), None, "all").trained.all()


def test_a_prompt_keeps_the_beginning_of_text() -> None:
    from tokenizers.processors import TemplateProcessing

    for single, closed in (("<|im_start|> $A", []), ("<|im_start|> $A <|im_end|>", [258])):
        tokenizer = byte_level_tokenizer()
        tokenizer.bos_token = "<|im_start|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258)]
        )
        texts = [Text((("ab", False), ("c", True))), Text((("<|im_start|>ab", False), ("c", True)))]
        assert tokenizer("")["input_ids"] == [257, *closed]
        for one in Renderer(tokenizer).render(texts):
            assert one.input_ids.tolist() == [257, 97, 98, 99, 258]
            assert one.trained.tolist() == [False] * 3 + [True] * 2


def test_a_token_across_the_end_of_a_prompt() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer: Any = PreTrainedTokenizerFast
    renderer = Renderer(tokenizer(tokenizer_object=backend, eos_token="</s>"))
    shown, fine = renderer.render([Text((("a", False), ("b", True))), Text((("b", False), ("a", True)))])
    assert isinstance(shown, str) and shown.startswith(
        "the tokenizer merges the last characters of the prompt"
    )
    assert isinstance(fine, Rendered) and fine.trained.tolist() == [False, True, True]


# --- any conversation -------------------------------------------------------------------------------------

SPELLED = st.sampled_from([END, " x ", "\n", "</s>", "<|user|>", "a <|eot_id|>"])
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | SPELLED
SPECIAL = re.compile(r"<\|\w+\|>|<｜[^｜]+｜>|<\w+_of_turn>|\[gMASK\]|<sop>")
TALKS = st.tuples(st.none() | WORDS, st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))


def _with(name: str) -> Any:
    tokenizer = byte_level_tokenizer()
    more = sorted(set(SPECIAL.findall(named_template(name))))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": more})
    unmarked = re.sub(r"\{%- (end)?generation %\}", "", named_template(name))
    return tokenizer, Renderer(tokenizer, named_template(name)), Renderer(tokenizer, unmarked)


TOKENIZERS = {name: _with(name) for name in CHAT_TEMPLATES}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@given(TALKS)
@settings(max_examples=25, deadline=None)
def test_any_conversation_has_the_templates_text_and_trains_its_answers(name: str, shown: Any) -> None:
    """The text is the tokenizer's own rendering; what is trained on are the answers, one part each; and the
    same is found without the marks, by prefixes."""
    tokenizer, renderer, without_marks = TOKENIZERS[name]
    system, turns = shown
    messages = [{"role": "system", "content": system}] if system is not None else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rendered = renderer.render([Conversation(tuple(messages))])[0]
    assert isinstance(rendered, Rendered), rendered
    own = tokenizer.apply_chat_template(messages, chat_template=named_template(name), tokenize=False)
    assert tokenizer.decode(rendered.input_ids) == own
    assert rendered.ended
    by_prefixes = without_marks.render([Conversation(tuple(messages))])[0]
    assert isinstance(by_prefixes, Rendered), by_prefixes
    assert by_prefixes.trained.tolist() == rendered.trained.tolist()
    pairs = zip(rendered.trained.tolist(), rendered.input_ids.tolist(), strict=True)
    runs = [list(run) for _, run in groupby(pairs, key=lambda pair: pair[0])]
    trained = [tokenizer.decode([token for _, token in run]) for run in runs if run[0][0]]
    for part, (_, answer) in zip(trained, turns, strict=True):
        assert answer.strip("\n").strip() in part or "<think>" in part


# --- what a renderer is -----------------------------------------------------------------------------------


def test_the_digest_covers_what_decides_the_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    base = Renderer(tokenizer)
    assert base.digest == Renderer(byte_level_tokenizer(), named_template("chatml")).digest
    renamed, larger = byte_level_tokenizer(), byte_level_tokenizer()
    renamed.eos_token = "<|im_start|>"
    larger.add_tokens(["x"])
    others = [Renderer(tokenizer, UNMARKED), Renderer(renamed), Renderer(larger)]
    others += [Renderer(tokenizer, None, "last"), Renderer(tokenizer, None, "all")]
    assert len({base.digest, *(other.digest for other in others)}) == len(others) + 1


def test_it_goes_to_another_process_after_use() -> None:
    row = talk("u:q", f"a:x{END}")
    renderer = Renderer(BYTES, UNMARKED, "last")
    first = renderer.render([row])[0]
    again = pickle.loads(pickle.dumps(renderer))
    second = again.render([row])[0]
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert first.trained.tolist() == second.trained.tolist()
    assert again.digest == renderer.digest


def test_no_torch_on_the_way_from_rows_to_tokens() -> None:
    code = (
        "import sys; from dsft.data.render.renderer import Renderer\n"
        "from dsft.data.rows import Conversation\n"
        "from dsft.data.tokenizer.load import byte_level_tokenizer\n"
        "rows = [Conversation(({'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}))]\n"
        "Renderer(byte_level_tokenizer()).render(rows); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_that_spell_a_token_of_the_template_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def written(*answers: str) -> list[str]:
        rows = [
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}
            for answer in answers
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        notes = tokenized_rows(Source(path=str(file)), Renderer(BYTES), task="sft").account.notes
        return [note.removeprefix(f"{file}: ") for note in notes if "(line" in note]

    plain = "; these are tokenized as plain text and end no turn"
    assert written("a", "b", f"x{END}") == [f"1 row spells tokens of the chat template (line 3){plain}"]
    assert written(*[END] * 5) == [f"5 rows spell tokens of the chat template (line 1, 2, 3, …){plain}"]
    assert written("a <|im_", "</s>", "<|pad") == []


# --- the token that ends an answer ------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "token"), [
    (None, END),
    (UNMARKED, END),
    (UNMARKED.replace(r"<|im_end|>\n", "<|im_end|><|pad|>\n"), END),
    ("{% for m in messages %}{{ m['content'] }}{% endfor %}", None),
    ("{{ raise_exception('no') }}", None),
], ids=["marked", "unmarked", "two tokens", "no token", "refuses"])  # fmt: skip
def test_the_token_that_ends_an_answer(template: str | None, token: str | None) -> None:
    found = Renderer(BYTES, template).turn_end()
    assert found == (None if token is None else BYTES.convert_tokens_to_ids(token))


def test_no_template_has_no_token_that_ends_an_answer() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    assert Renderer(tokenizer).turn_end() is None
