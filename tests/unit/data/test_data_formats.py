"""What rows mean: every format says the same, each finding and refusal by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.formats import Format, choose, content_hash, convert
from dsft.data.formats.convert import with_answer
from dsft.data.render.renderer import Renderer
from dsft.data.rows import BadRowError, Conversation, Line, Row, Text
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.spec.schema import Source, Spec
from dsft.spec.task import TASKS

TOKENIZER = byte_level_tokenizer()
REAL = Path(__file__).parents[4] / "shared" / "data"


def source(format: str | None = None, columns: Mapping[str, str] | None = None) -> Source:
    return Source.model_construct(format=format, columns=columns or {})


def found(row: Mapping[str, Any], task: str = "sft", name: str | None = None, **columns: str) -> Format:
    return choose(source(name, columns), [Line(1, row)], task)


def meant(row: Mapping[str, Any], task: str = "sft", name: str | None = None, **columns: str) -> Row:
    return convert(row, found(row, task, name, **columns))


def talk(row: Mapping[str, Any], task: str = "sft", name: str | None = None, **columns: str) -> Conversation:
    (sample,) = meant(row, task, name, **columns).samples
    assert isinstance(sample, Conversation)
    return sample


def refusal(row: Mapping[str, Any], task: str = "sft", name: str | None = None, **columns: str) -> str:
    with pytest.raises(BadRowError) as caught:
        meant(row, task, name, **columns)
    return str(caught.value)


def shown(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED, ANSWERED = shown("user", "a"), shown("assistant", "b")
PAIR = (ASKED, ANSWERED)
SCHEMA = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}

# --- one conversation, in every format --------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(
    WORDS, st.none() | st.booleans() | st.integers() | WORDS | st.lists(WORDS), max_size=2
)


@st.composite
def _turns(draw: st.DrawFn, *, plain: bool) -> list[dict[str, Any]]:
    """A user's turn, calls with their results, and an answer."""
    turns = [shown("user", draw(WORDS))]
    for _ in range(0 if plain else draw(st.integers(0, 2))):
        calls = [call(draw(WORDS), draw(ARGUMENTS)) for _ in range(draw(st.integers(1, 2)))]
        turns.append(shown("assistant", None, tool_calls=calls))
        turns += [shown("tool", draw(WORDS)) for _ in calls]
    return [*turns, shown("assistant", draw(WORDS))]


@st.composite
def talks(draw: st.DrawFn, *, plain: bool = False) -> list[dict[str, Any]]:
    system = [shown("system", draw(WORDS))] if draw(st.booleans()) else []
    turns = draw(st.lists(_turns(plain=plain), min_size=1, max_size=3))
    return [*system, *(message for some in turns for message in some)]


SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as OpenAI writes them, a text; the content as a list of parts."""
    if "tool_calls" not in message:
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    calls = [
        call(one["function"]["name"], json.dumps(one["function"]["arguments"]))
        for one in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return {"from": SHAREGPT[message["role"]], "value": message["content"]}
    return {"from": "function_call", "value": json.dumps([one["function"] for one in message["tool_calls"]])}


def forms(messages: list[dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same conversation in every way of every format: (format, row)."""
    other = shown("assistant", f"{messages[-1]['content']}!")
    prompt, answer = messages[:-1], messages[-1:]
    shared = [sharegpt(message) for message in messages]
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    without = messages[1:] if system is not None else messages
    return {
        "messages": ("messages", chat(*messages)),
        "openai": ("messages", chat(*map(openai, messages))),
        "system column": ("messages", chat(*without, system=system)),
        "sharegpt": ("sharegpt", {"conversations": shared}),
        "sharegpt system": (
            "sharegpt",
            {"conversations": [sharegpt(message) for message in without], "system": system},
        ),
        "conversations": ("sharegpt", {"conversations": messages}),
        "completion": ("prompt_completion", {"prompt": prompt, "completion": answer}),
        "one message": ("prompt_completion", {"prompt": prompt, "completion": answer[0]}),
        "a string": ("prompt_completion", {"prompt": prompt, "completion": answer[0]["content"]}),
        "pair": ("preference", {"prompt": prompt, "chosen": answer, "rejected": [other]}),
        "implicit": ("preference", {"chosen": messages, "rejected": [*prompt, other]}),
        "both": ("preference", {"prompt": prompt, "chosen": messages, "rejected": [*prompt, other]}),
        "sharegpt pair": (
            "preference",
            {"conversations": shared[:-1], "chosen": shared[-1], "rejected": sharegpt(other)},
        ),
        "replaced": ("preference", chat(*messages, rejected_response=other["content"])),
        "rejected messages": ("preference", chat(*messages, rejected_messages=[*prompt, other])),
        "labelled": ("kto", {"prompt": prompt, "completion": answer, "label": 1}),
        "tagged": ("kto", chat(*messages, kto_tag=True)),
    }


def alpaca(messages: list[dict[str, Any]]) -> dict[str, Any]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    contents = [message["content"] for message in messages if message["role"] != "system"]
    history = [list(pair) for pair in zip(contents[:-2:2], contents[1:-2:2], strict=True)]
    return {"instruction": contents[-2], "output": contents[-1], "system": system, "history": history}


@settings(deadline=None, max_examples=40)
@given(talks())
def test_every_format_says_the_same(messages: list[dict[str, Any]]) -> None:
    for form, (name, row) in forms(messages).items():
        sample = talk(row, name=name)
        assert list(sample.messages) == messages, form
        of_prompt = name in ("prompt_completion", "preference", "kto")
        assert sample.trained == ((False,) * (len(messages) - 1) + (None,) if of_prompt else ()), form


@settings(deadline=None, max_examples=30)
@given(talks(plain=True))
def test_alpaca_says_the_same(messages: list[dict[str, Any]]) -> None:
    row = alpaca(messages)
    assert list(talk(row).messages) == messages
    assert list(talk({**row, "kto_tag": "true"}, name="kto").messages) == messages
    pair = {**row, "chosen": row["output"], "rejected": row["output"] + "!"}
    assert list(talk(pair, name="preference").messages) == messages


@settings(deadline=None, max_examples=40)
@given(talks())
def test_the_format_is_found(messages: list[dict[str, Any]]) -> None:
    for form, (name, row) in forms(messages).items():
        task = "dpo" if name == "preference" else "sft"
        if name == "kto":
            assert "format: kto (trains on the answers labeled true)" in refusal(row, task), form
        else:
            assert found(row, task).name == name, form
        table = {"messages": None, "text": None, "chosen": None, "label": None} | row | {"id": 5}
        assert name in (refusal(table) if name == "kto" else found(table, task).name), form


@settings(deadline=None, max_examples=25)
@given(talks(plain=True))
def test_every_format_gives_the_tokenizers_own_text(messages: list[dict[str, Any]]) -> None:
    """And trains on the assistant's words with their end, of prompts with an answer on the answer's alone."""
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    answers = [
        f"{message['content']}{TOKENIZER.eos_token}" for message in messages if message["role"] == "assistant"
    ]
    rows = {**forms(messages), "alpaca": ("alpaca", alpaca(messages))}
    samples = [talk(row, name=name) for name, row in rows.values()]
    for (name, _), rendered in zip(rows.values(), Renderer(TOKENIZER).render(samples), strict=True):
        assert TOKENIZER.decode(rendered.input_ids) == whole
        of_prompt = name in ("prompt_completion", "preference", "kto")
        trained = TOKENIZER.decode(rendered.input_ids[rendered.trained])
        assert trained == "".join(answers[-1:] if of_prompt else answers)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a value."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [place for key, one in items for place in [(value, key), *_places(one)]]


STRANGE: tuple[Any, ...] = (None, True, 0, 2.5, float("nan"), "", "x", "[", "[1]", "{}", "\ud800", b"x")
STRANGE += ([], {}, [[]], [None], {"": 1}, (), {1: 2})


@settings(deadline=None, max_examples=80)
@given(talks(), st.data())
def test_any_change_gives_a_row_or_a_reason(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    name, row = data.draw(st.sampled_from(list(forms(messages).values())))
    changed = json.loads(json.dumps({**row, "tools": [TOOL]}))
    for _ in range(data.draw(st.integers(1, 3))):
        places = _places(changed)
        container, key = places[data.draw(st.integers(0, len(places) - 1))]
        if data.draw(st.booleans()):
            del container[key]
        else:
            container[key] = deepcopy(data.draw(st.sampled_from(STRANGE)))
        if not _places(changed):
            break
    for task, format in (("sft", None), ("sft", name), ("dpo", None)):
        try:
            result = convert(changed, choose(source(format), [Line(1, changed)], task))
        except BadRowError as error:
            assert str(error)
        else:
            json.dumps([dict(result.values), [sample_text(sample) for sample in result.samples]]).encode()
            assert content_hash(result) == content_hash(result)


def sample_text(sample: Text | Conversation) -> Any:
    return sample.parts if isinstance(sample, Text) else [sample.messages, sample.tools, sample.trained]


# --- the formats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "value", "number"),
    [
        (("a", "b"), "b", 1), (("a", "b"), 1, 1), (("a", "b"), "1", 1), (("a", "b"), 2, None),
        (("a", "b"), -1, None), (("a", "b"), True, None), (("a", "b"), None, None), (("a", "b"), 1.0, None),
        (("1", "2"), 1, 0), (("1", "2"), "2", 1), (("1", "2"), 0, None), (("a", "1"), 0, None),
    ],
)  # fmt: skip
def test_the_number_of_a_label(labels: tuple[str, ...], value: object, number: int | None) -> None:
    """Where a label is called as a whole number, numbers are names."""
    row = {"text": "red", "kind": value}
    line = Line(1, row)
    found = choose(Source(path="a", columns={"label": "kind"}), [line], "classify", labels)
    if number is not None:
        assert convert(row, found) == Row((Text((("red", True),)),), {"label": (number,)})
        return
    with pytest.raises(
        BadRowError, match=f'"kind" is .*; it must be one of classify.labels: "{labels[0]}", "'
    ):
        convert(row, found)


def test_texts_are_whole_or_a_prompt_and_what_is_trained_on() -> None:
    assert meant({"text": "a"}, "pretrain") == Row((Text((("a", True),)),))
    assert meant({"prompt": "a", "completion": "b"}) == Row((Text((("a", False), ("b", True))),))
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    chosen, rejected = Text((("a", False), ("b", True))), Text((("a", False), ("c", True)))
    assert meant(pair, "dpo") == Row((chosen, rejected))
    assert meant(pair, "sft", "preference") == Row((chosen,))


@pytest.mark.parametrize(
    ("label", "is_desirable"),
    [(True, True), (0, False), (1.0, True), ("False", False), ("true", True), ("0", False)],
)
def test_labels(label: object, is_desirable: bool) -> None:
    row = {"prompt": "a", "completion": "b", "label": label}
    assert meant(row, name="kto").values == {"label": (is_desirable,)}


def test_what_is_labelled_is_the_last_answer_alone() -> None:
    row = chat(
        shown("user", "a"), shown("assistant", "b"), shown("user", "c"), shown("assistant", "d"), label=False
    )
    kept = meant(row, name="kto")
    assert kept.values == {"label": (False,)}
    assert talk(row, name="kto").trained == (False, False, False, None)
    assert talk(row, name="messages").trained == ()


def test_a_class_is_no_label() -> None:
    assert found(chat(*PAIR, label="positive")).name == "messages"
    assert found(chat(*PAIR, label=1)).name == "messages"
    assert found({"prompt": "a", "completion": "b", "label": "good"}).name == "prompt_completion"
    assert "the keys fit messages and kto" in refusal(chat(*PAIR, label=True))


def test_a_pair_that_begins_with_its_prompt() -> None:
    """As many files have it: the prompt as a string, and again at the head of both answers."""
    row = {
        "prompt": "a ",
        "chosen": list(PAIR),
        "rejected": [ASKED, shown("assistant", "c")],
        "messages": [1],
    }
    chosen, rejected = (sample_text(sample)[0] for sample in meant(row, "dpo").samples)
    assert list(chosen) == list(PAIR)
    assert list(rejected) == [ASKED, shown("assistant", "c")]
    assert "differs from the prompt" in refusal({**row, "prompt": "another"}, "dpo")
    assert "format: messages or format: preference (trains on the chosen answers)" in refusal(row)


def test_an_answer_of_several_messages_keeps_what_it_shares() -> None:
    """Beside a prompt the answers are taken whole, though both begin with the same call."""
    turns = [shown("assistant", None, tool_calls=[call("f", {})]), shown("tool", "1")]
    row = {"prompt": [ASKED], "chosen": [*turns, ANSWERED], "rejected": [*turns, shown("assistant", "c")]}
    chosen, _ = meant(row, "dpo").samples
    assert chosen.trained == (False, None, None, None)


def test_openai_pairs() -> None:
    row = {
        "input": {"messages": [ASKED], "tools": [TOOL], "parallel_tool_calls": True},
        "preferred_output": [ANSWERED],
        "non_preferred_output": [shown("assistant", "c")],
    }
    way_out = "columns: {prompt: input, chosen: preferred_output, rejected: non_preferred_output}"
    assert refusal(row, "dpo").endswith(f"did you mean {way_out}?")
    columns = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    chosen, _ = meant(row, "dpo", None, **columns).samples
    assert chosen == Conversation(PAIR, (TOOL,), (False, None))


def test_columns_name_what_the_file_has() -> None:
    row = {"question": "q", "chosen": "a", "rejected": "b", "system": "s", "turns": [ASKED, shown("gpt", 5)]}
    assert "{prompt: question}" in refusal(row, "dpo")
    assert "columns: {instruction: question} for a chat" in refusal(row, "dpo", prompt="question")
    chosen, _ = meant(row, "dpo", None, instruction="question").samples
    assert chosen == Conversation(
        (shown("system", "s"), shown("user", "q"), shown("assistant", "a")), (), (False, False, None)
    )
    assert refusal(row, "sft", "sharegpt", conversations="turns").startswith('"turns[1].content" is a number')
    text = refusal({"instruction": "q", "output": "a"}, "sft", None, prompt="question")
    assert text.startswith('columns has "prompt", but the rows are alpaca, which have only "instruction", ')


@pytest.mark.parametrize(("keys", "chat", "text"), [
    ("prompt response", "instruction: prompt, output: response", "completion: response"),
    ("question answer", "instruction: question, output: answer", "prompt: question, completion: answer"),
    ("query response", "instruction: query, output: response", "prompt: query, completion: response"),
    ("input output", "instruction: input", "prompt: input, completion: output"),
    ("instruction context response", "output: response, input: context",
     "prompt: instruction, completion: response"),
    ("system_prompt Question Solution", "instruction: Question, output: Solution, system: system_prompt",
     "prompt: Question, completion: Solution"),
])  # fmt: skip
def test_what_to_write_for_keys_that_files_have(keys: str, chat: str, text: str) -> None:
    row = dict.fromkeys(keys.split(), "x")
    meant = f"columns: {{{chat}}} for a chat, or {{{text}}} for plain texts"
    assert refusal(row).endswith(f"did you mean {meant}?")
    for columns in (chat, text):
        found(row, "sft", None, **dict(pair.split(": ") for pair in columns.split(", ")))


def test_lists_of_messages_by_other_names() -> None:
    assert refusal({"id": 1, "dialog": list(PAIR)}).endswith("did you mean columns: {messages: dialog}?")
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert refusal({"conversation": shared}).endswith("did you mean columns: {conversations: conversation}?")
    assert talk({"conversation": shared}, conversations="conversation").messages == PAIR


def test_columns_beside_the_messages() -> None:
    assert talk(chat(*PAIR, functions=[SCHEMA])).tools == (TOOL,)
    assert refusal(chat(*PAIR, functions=[SCHEMA], tools=[TOOL])) == (
        'the row has "tools" and "functions"; give one of them'
    )
    assert talk(chat(*PAIR, images=[], id=1, source="x")) == talk(chat(*PAIR))
    assert 'has "images", which dsft does not train on' in refusal(chat(*PAIR, images=["a.png"]))
    assert meant({"text": "a", "images": ["a.png"]}, "pretrain") == meant({"text": "a"}, "pretrain")
    only_input = talk({"instruction": "", "input": "a", "output": "b"})
    assert only_input.messages == PAIR


def test_a_tables_text_is_read_where_it_is_a_list() -> None:
    assert talk(chat(*PAIR)) == talk({"messages": json.dumps(PAIR), "tools": ""})
    assert "not JSON" in refusal({"messages": "[1"})


# --- messages ---------------------------------------------------------------------------------------------


def test_calls_and_tools_in_all_their_forms() -> None:
    calls: tuple[dict[str, Any], ...] = (
        {"tool_calls": [call("f", '{"x": 1}')]},
        {"tool_calls": [call("f", {"x": 1}, index=None, id=None)]},
        {"tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"tool_calls": [{"id": None, "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"function_call": {"name": "f", "arguments": '{"x": 1}'}, "refusal": None, "annotations": []},
    )
    wanted = shown("assistant", None, tool_calls=[call("f", {"x": 1})])
    for tools in ([TOOL], [SCHEMA], json.dumps([SCHEMA]), [{"type": "function", **SCHEMA}]):
        for form in calls:
            row = chat(ASKED, {"role": "assistant", **form}, shown("function", "1", name="f"), tools=tools)
            assert talk(row) == Conversation((ASKED, wanted, shown("tool", "1", name="f")), (TOOL,))
    assert talk(chat(ASKED, ANSWERED, tools="[]")) == talk(chat(ASKED, ANSWERED, tools=None))


@pytest.mark.parametrize(
    ("written", "kept"), [("", {}), ("{}", {}), ("[1]", "[1]"), ("{x", "{x"), ('{"x": NaN}', '{"x": NaN}')]
)
def test_arguments_that_are_no_object_stay_a_text(written: str, kept: object) -> None:
    (message,) = talk(chat(shown("assistant", "", tool_calls=[call("f", written)]))).messages
    assert message["tool_calls"][0]["function"]["arguments"] == kept


def test_arguments_of_many_levels() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"k": deep}
    row = chat(shown("assistant", "", tool_calls=[call("f", deep)]))
    assert refusal(row).endswith("nested more than 100 levels deep")
    assert refusal(chat(*PAIR, tools=[{"name": "f", "parameters": deep}])).endswith("levels deep")
    written = '{"k":' * 90 + "1" + "}" * 90
    content_hash(meant(chat(shown("assistant", "", tool_calls=[call("f", written)]))))


def test_a_call_without_arguments() -> None:
    for form in ({"name": "f"}, {"function": {"name": "f", "arguments": None}}):
        (message,) = talk(chat(shown("assistant", None, tool_calls=[form]))).messages
        assert message["tool_calls"] == [call("f", {})]


def test_content_of_parts_and_reasoning() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    for name in ("reasoning_content", "reasoning", "thinking"):
        sample = talk(chat(shown("user", parts), shown("assistant", "c", **{name: "why"})))
        assert sample.messages == (shown("user", "ab"), shown("assistant", "c", reasoning_content="why"))


def test_a_weight_between_0_and_1_is_refused_by_name() -> None:
    row = chat(ASKED, shown("assistant", "b", loss_weight=0.5))
    assert refusal(row) == '"messages[1].loss_weight" is 0.5; it must be 0 or 1'
    assert '"train" and "loss_weight"' in refusal(
        chat(ASKED, shown("assistant", "b", loss_weight=1.0, train=True))
    )


def version_1(role: str, content: str, weight: float) -> dict[str, Any]:
    """A message of LLaMA-Factory's version 1."""
    return shown(role, [{"type": "text", "value": content}], loss_weight=weight)


def test_rows_of_llama_factory_version_1() -> None:
    prompt = [version_1("system", "s", 0.0), version_1("user", "a", 0.0)]
    chosen, rejected = (version_1("assistant", content, 1.0) for content in "bc")
    row = talk(chat(*prompt, chosen))
    assert row.messages == (shown("system", "s"), ASKED, ANSWERED)
    assert row.trained == (False, False, True)
    pair = {"chosen_messages": [*prompt, chosen], "rejected_messages": [*prompt, rejected]}
    assert (
        found(pair, "dpo").reason
        == 'detected preference: every row has "chosen_messages" and "rejected_messages"'
    )
    first, second = meant(pair, "dpo").samples
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert first == row
    assert second.messages == (*row.messages[:2], shown("assistant", "c"))
    assert second.trained == row.trained
    assert meant(pair, "sft", "preference").samples == (first,)


def test_a_part_has_text_or_value() -> None:
    parts = [{"type": "text", "value": "a", "text": None}, {"type": "text", "text": "b", "value": None}]
    assert talk(chat(ASKED, shown("assistant", parts))).messages[1]["content"] == "ab"
    both = [{"type": "text", "value": "a", "text": "b"}]
    assert '"text" and "value"; give one of them' in refusal(chat(ASKED, shown("assistant", both)))
    assert "is a part of type" in refusal(
        chat(ASKED, shown("assistant", [{"type": "reasoning", "value": "a"}]))
    )


def test_the_answers_of_a_pair_under_other_names() -> None:
    row = {"chosen_answer": list(PAIR), "lose": [ASKED, shown("assistant", "c")]}
    assert refusal(row, "dpo").endswith("did you mean columns: {chosen: chosen_answer, rejected: lose}?")
    assert len(meant(row, "dpo", chosen="chosen_answer", rejected="lose").samples) == 2
    assert refusal(row).endswith("did you mean columns: {messages: chosen_answer}?")
    assert "needs" in refusal({"good": "a", "better": "b"}, "dpo")


def test_roles_of_other_files() -> None:
    names = ("developer", "human", "model", "user", "function_call", "function_response", "gpt")
    values = ("s", "a", "b", "c", '{"name": "f", "arguments": {}}', "1", "d")
    turns = [{"from": name, "value": value} for name, value in zip(names, values, strict=True)]
    roles = [message["role"] for message in talk({"conversations": turns}).messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]


def test_a_call_written_in_the_answer_itself() -> None:
    """Hermes' files have no tool_calls: a result may follow any turn of the assistant."""
    row = chat(ASKED, shown("assistant", "<tool_call>{}</tool_call>"), shown("tool", "1"), shown("tool", "2"))
    assert len(talk(row).messages) == 4


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [("train", False, True), ("weight", 0, 1), ("loss", False, True), ("loss_weight", 0.0, 1.0)],
)
def test_flags(key: str, off: object, on: object) -> None:
    last = shown("assistant", "d", **{key: on})
    row = chat(ASKED, shown("assistant", "b", **{key: off}), shown("user", "c"), last)
    assert talk(row).trained == (None, False, None, True)
    assert talk(chat(shown("user", "a", **{key: on}))).trained == (True,)
    assert "every assistant turn has train: false" in refusal(
        chat(ASKED, shown("assistant", "b", **{key: off}))
    )
    prompt = {"prompt": row["messages"][:3], "completion": [last]}
    assert talk(prompt).trained == (False, False, False, True)


def test_what_is_no_list_is_detected_and_refused() -> None:
    for value in (True, 5, {}, {"a": 1}, None, "x"):
        assert refusal({"conversations": value}).startswith('"conversations" is ')


# --- which format -----------------------------------------------------------------------------------------


def test_reasons() -> None:
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert found(shared).reason == 'detected sharegpt: every row has "conversations" of from/value'
    assert found({"text": "a"}, name="text").reason == "read as text, as the spec says"
    assert found({"body": "a"}, text="body").reason == 'detected text: every row has "body"'
    strings = {"prompt": "a", "completion": "b", "label": True}
    without_template = "; the strings are used as they are, without a chat template"
    assert found(strings, name="kto").reason == f"read as kto, as the spec says{without_template}"
    assert found({**strings, "label": None}).reason.endswith(without_template)
    assert not found({**strings, "label": None, "prompt": [ASKED]}).reason.endswith(without_template)


def test_what_a_task_takes_decides() -> None:
    both = {**chat(*PAIR), "text": "a"}
    assert found(both, "pretrain").name == "text"
    assert refusal(both) == "the keys fit messages and text; choose one with format: messages or format: text"
    assert refusal(chat(*PAIR), "pretrain").startswith("the rows are messages, but task pretrain takes text")
    assert refusal(chat(*PAIR), "dpo").startswith("the rows are messages, but task dpo takes preference")
    assert list(TASKS) == Spec.model_json_schema()["properties"]["task"]["enum"]


# --- hashes -----------------------------------------------------------------------------------------------


def test_a_hash_depends_on_the_content() -> None:
    first = chat(ASKED, shown("assistant", None, tool_calls=[call("f", {"x": 1, "y": 2})]), tools=[TOOL])
    second = chat(
        {"content": "a", "role": "user"},
        {"tool_calls": [call("f", {"y": 2, "x": 1})], "content": None, "role": "assistant"},
        tools=[{"function": dict(reversed(SCHEMA.items())), "type": "function"}],
    )
    assert content_hash(meant(first)) == content_hash(meant(second))
    assert content_hash(meant({"text": "a"})) == 15907338155110884274  # the same everywhere, always


def test_a_hash_does_not_depend_on_what_is_trained_on() -> None:
    talks = [chat(*PAIR), chat(ASKED, shown("assistant", PAIR[1]["content"], train=True))]
    talks += [{"prompt": [ASKED], "completion": [PAIR[1]]}]
    assert len({content_hash(meant(talk)) for talk in talks}) == 1
    texts = [{"text": "ab"}, {"prompt": "a", "completion": "b"}, {"prompt": "ab ", "completion": "c"}]
    assert len({content_hash(meant(text)) for text in texts}) == 2


def test_hashes_differ() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [
        meant({"text": "ab"}),
        meant({"text": "a b"}),
        meant({"prompt": "a", "completion": "b", "label": True}, name="kto"),
        meant({"prompt": "a", "completion": "b", "label": False}, name="kto"),
        meant(pair, "dpo"),
        meant(chat(*PAIR)),
        meant(chat(*PAIR, tools=[TOOL])),
        meant(chat(shown("user", "a"), shown("assistant", "b", reasoning_content=""))),
        meant(chat(shown("user", ""), shown("assistant", "ab"))),
    ]
    hashes = [content_hash(row) for row in rows]
    assert len(set(hashes)) == len(rows)
    assert all(0 <= one < 2**64 for one in hashes)


# --- real files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task", "format"), [
    ("alpaca_en_demo.json", "sft", "alpaca"),
    ("dpo_en_demo.json", "dpo", "preference"),
    ("c4_demo.jsonl", "pretrain", "text"),
])  # fmt: skip
def test_real_files(name: str, task: str, format: str) -> None:
    if not (REAL / name).is_file():
        pytest.skip(f"{REAL / name} is not there")
    content = (REAL / name).read_text()
    rows = json.loads(content) if name.endswith(".json") else list(map(json.loads, content.splitlines()))
    one = choose(source(), [Line(1, rows[0])], task)
    assert one.name == format
    made = [convert(row, one) for row in rows]
    assert len({content_hash(row) for row in made}) == len({json.dumps(row) for row in rows})


SYSTEM, ASKED, DONE = shown("system", "s"), shown("user", "a"), shown("assistant", "b")
PROMPTS: list[tuple[dict[str, Any], list[Any], str | None]] = [
    ({"messages": [ASKED]}, [ASKED], ""),
    ({"messages": [ASKED], "system": "s"}, [SYSTEM, ASKED], ""),
    ({"messages": [ASKED, DONE]}, [ASKED], "b"),
    ({"conversations": [{"from": "human", "value": "a"}]}, [ASKED], ""),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [ASKED], "b"),
    ({"prompt": "a", "system": "s"}, [SYSTEM, ASKED], ""),
    ({"prompt": [ASKED, DONE, ASKED]}, [ASKED, DONE, ASKED], ""),
    ({"prompt": [ASKED], "completion": "b"}, [ASKED], "b"),
    ({"prompt": [ASKED], "chosen": "b", "rejected": "c"}, [ASKED], "b"),
    ({"instruction": "a", "input": "i", "system": "s"}, [SYSTEM, shown("user", "a\n\ni")], ""),
    ({"instruction": "a", "history": [["a", "b"]], "output": "b"}, [ASKED, DONE, ASKED], "b"),
    ({"source": "r:1", "prompt": [ASKED], "answer": "x", "reference": "b"}, [ASKED], "b"),
    ({"source": "r:1", "prompt": [ASKED], "answer": "x", "reference": None}, [ASKED], ""),
]
"""A row, the messages of its prompt, and its own answer."""


@pytest.mark.parametrize(("row", "prompt", "reference"), PROMPTS)
def test_rows_with_an_answer_and_without(row: dict[str, Any], prompt: list[Any], reference: str) -> None:
    whole = with_answer({**row, "tools": [TOOL]})
    task = "dpo" if "chosen" in row else "sft"
    sample = meant(whole, task).samples[0]
    assert isinstance(sample, Conversation) and len(sample.tools) == 1
    assert [*sample.messages] == [*prompt, shown("assistant", reference)]
