"""Bad data files: each one's message is in golden/NAME.txt. DSFT_UPDATE_GOLDEN=1 rewrites them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsft.data.sets.load import load_data
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError, DsftError, MissingInputError
from dsft.spec.schema import Data, Source
from tests.unit.data.token_rows import spec_of

GOLDEN = Path(__file__).parent / "golden"
GOOD_CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
REFUSING = "{{ raise_exception('system is not known') if messages[0]['role'] == 'system' }}" + (
    "{%- for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Case:
    name: str
    files: Mapping[str, bytes]
    sources: tuple[Source, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    error: type[DsftError] = DataError
    template: str | None = "own"


def lines(*rows: object) -> bytes:
    """JSON Lines; bytes stand for themselves."""
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows)


def rows(*rows: object) -> dict[str, bytes]:
    return {"a.jsonl": lines(*rows)}


def chat(*turns: object, **more: object) -> dict[str, object]:
    return {"messages": list(turns), **more}


def turn(role: object, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


ASKED, ANSWERED = turn("user", "a"), turn("assistant", "b")


def calling(**call: object) -> dict[str, object]:
    return turn("assistant", None, tool_calls=[call])


def shared(*turns: tuple[str, object], **more: object) -> dict[str, object]:
    return {"conversations": [{"from": name, "value": value} for name, value in turns], **more}


TEXT = {"text": "some text"}
CASES = (
    Case("cut_line", rows(TEXT, b'{"text": "ends in the midd')),
    Case("not_utf8", rows(TEXT, b'{"text": "caf\xe9"}', TEXT, b'\xff\xfe{"text": 1}')),
    Case("nul_byte", rows(TEXT, b"\0\0\0\0", b'{"text": "a\0b"}')),
    Case("wrong_type", rows({"text": 5}, TEXT, {"text": None}, {"text": ["a"]}, {"text": True})),
    Case("missing_key", rows(TEXT, {"txt": "x"}, {}, b"   ", {"label": 1, "id": 2})),
    Case("not_a_number", rows(TEXT, b'{"text": "x", "score": NaN}', b'{"text": -Infinity}')),
    Case("not_an_object", rows([1, 2], "text", 3, TEXT, b"null")),
    Case("surrogate", rows(TEXT, b'{"text": "half \\ud83d of it"}')),
    Case("syntax", rows(b"{'text': 'x'}", b'{"text": "x"} {"text": "y"}', b'{"text": "x" "y"}', TEXT)),
    Case("repeated_key", rows(b'{"text": "x", "text": "y"}', TEXT)),
    Case("nested", rows(TEXT, b'{"text": ' + b"[" * 200_000)),
    Case(
        "several_mistakes_in_two_files",
        {
            "a.jsonl": lines(
                TEXT, b'{"text": ', {"text": 1}, b'{"text": "\xff"}', {"x": 1}, b'{"text": NaN}'
            ),
            "b.jsonl": lines(GOOD_CHAT, chat(turn("user", "only asked")), [1]),
        },
    ),
    Case("more_than_are_shown", rows(TEXT, *({"text": n} for n in range(50)))),
    Case("mixed_formats", rows(GOOD_CHAT, {"instruction": "a", "output": "b"}, TEXT, GOOD_CHAT)),
    Case("first_row_bad", rows({"id": 1}, TEXT, {"text": 2})),
    Case("no_format_fits", rows({"prompt": "a", "label": "b"})),
    Case("columns_meant", rows({"question": "a", "answer": "b"})),
    Case("two_formats_fit", rows({**GOOD_CHAT, "text": "x"})),
    Case("format_does_not_fit", rows(TEXT, TEXT), (Source(path="a.jsonl", format="messages"),)),
    Case("column_unknown", rows(TEXT), (Source(path="a.jsonl", columns={"body": "text"}),)),
    Case(
        "column_missing",
        rows({"body": "x"}, {"text": "taken from body, which is not here"}),
        (Source(path="a.jsonl", columns={"text": "body"}),),
    ),
    Case(
        "messages",
        rows(
            GOOD_CHAT,
            {"messages": "hi"},
            chat(),
            chat("hi"),
            chat(turn("user", "a"), {"role": "assistant"}),
            chat(turn("human", "a"), turn("gpt", "b")),
            chat(turn("user", [{"type": "text", "text": "a"}]), turn("assistant", "b")),
            chat(turn("user", "a"), turn("assistant", None)),
            chat(turn("user", "a"), turn("assistant", "b", tool_calls=[{"nam": "f"}])),
        ),
    ),
    Case(
        "message_keys",
        rows(
            GOOD_CHAT,
            chat(turn("user", "a", mood="sad", id=5, none=None, empty=[]), ANSWERED),
            chat(turn("user", "a", reasoning_content="c"), ANSWERED),
            chat(ASKED, turn("assistant", "b", thinking="c", reasoning="c")),
            chat(ASKED, turn("assistant", "b", name=5)),
            chat(turn("user", [{"type": "image_url", "image_url": {"url": "x"}}]), ANSWERED),
            chat(turn("user", [{"type": "tool_use", "id": "x"}]), ANSWERED),
            chat(turn("user", [{"type": "text", "text": "x", "cache": 1}]), ANSWERED),
            chat(turn("user", ["x"]), ANSWERED),
            chat({"from": "human", "value": "a"}),
            chat(turn(None, "a")),
            {**GOOD_CHAT, "messages": '[{"role": "user"'},
            {**GOOD_CHAT, "system": ["x"]},
            chat(turn("system", "x"), ASKED, ANSWERED) | {"system": "y"},
            chat(ASKED, turn("system", "x"), ANSWERED),
            chat(ASKED, turn("tool", "1"), ANSWERED),
            chat(turn("user", "half \ud83d"), ANSWERED),
        ),
    ),
    Case(
        "flags",
        rows(
            GOOD_CHAT,
            chat(ASKED, turn("assistant", "b", train=False)),
            chat(ASKED, turn("assistant", "b", weight=0), ASKED, turn("assistant", "b", train=False)),
            chat(ASKED, turn("assistant", "b", weight=0.5)),
            chat(ASKED, turn("assistant", "b", train="yes")),
            chat(ASKED, turn("assistant", "b", train=True, weight=1)),
            chat(ASKED, turn("assistant", "b", train_detail=[{"begin_offset": 0}])),
        ),
    ),
    Case(
        "calls",
        rows(
            GOOD_CHAT,
            chat(ASKED, turn("assistant", None, tool_calls={"name": "f"})),
            chat(ASKED, calling(type="function", function={"arguments": "{}"})),
            chat(ASKED, calling(type="retrieval", function={"name": "f", "arguments": "{}"})),
            chat(ASKED, calling(function={"name": "f", "arguments": 5})),
            chat(ASKED, calling(name="f", arguments={}, result=7)),
            chat(turn("user", "a", tool_calls=[{"name": "f", "arguments": {}}]), ANSWERED),
            chat(ASKED, calling(name="f", arguments={}, id="1"), turn("tool", "x", tool_call_id="2")),
            chat(ASKED, turn("assistant", None, tool_calls=[])),
            {**GOOD_CHAT, "tools": "no JSON"},
            {**GOOD_CHAT, "tools": {"name": "f"}},
            {**GOOD_CHAT, "tools": [{"type": "web_search"}]},
            {**GOOD_CHAT, "tools": [{"type": "function", "function": {"parameters": {}}}]},
            {**GOOD_CHAT, "tools": [5]},
        ),
    ),
    Case(
        "sharegpt",
        rows(
            shared(("human", "a"), ("gpt", "b")),
            {"conversations": []},
            {"conversations": [{"human": "a", "assistant": "b"}]},
            shared(("human", "a"), ("bot", "b")),
            shared(("human", "a")),
            shared(("human", "a"), ("gpt", 5)),
            shared(("human", "a"), ("function_call", "f(x)")),
            shared(("human", "a"), ("function_call", "[]")),
            shared(("human", "a"), ("function_call", '{"arguments": {}}')),
            shared(("human", "a"), ("observation", "1")),
            shared(("human", "a"), ("gpt", "b"), system=5),
            {"conversations": [{"from": "human", "role": "user", "value": "a"}]},
        ),
    ),
    Case(
        "prompts",
        rows(
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": None},
            {"prompt": 5, "completion": "b"},
            {"prompt": [], "completion": "b"},
            {"prompt": [ASKED], "completion": [ASKED]},
            {"prompt": [ASKED], "completion": {"role": "assistant"}},
            {"prompt": "a", "completion": "b", "system": "s"},
            {"prompt": {"messages": [ASKED], "model": "x"}, "completion": "b"},
            {"prompt": "a"},
        ),
    ),
    Case(
        "pairs",
        rows(
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            {"prompt": "a", "chosen": "b", "rejected": ""},
            {"prompt": "a", "chosen": "b", "rejected": None},
            {"prompt": "a", "chosen": "b", "rejected": [ANSWERED]},
            {"chosen": "ab", "rejected": "ac"},
            {"question": "a", "chosen": "b", "rejected": "c"},
            {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, ANSWERED]},
            {"chosen": [ASKED, ANSWERED], "rejected": [turn("user", "c"), ANSWERED]},
            {
                "chosen": [ASKED, ANSWERED, ASKED],
                "rejected": [ASKED, ANSWERED, turn("user", "c"), ANSWERED],
            },
            {"prompt": "c", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, turn("assistant", "c")]},
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [turn("assistant", "")]},
            shared(("human", "a"), chosen={"from": "human", "value": "b"}, rejected=ANSWERED),
            chat(ASKED, rejected_response="c"),
            chat(ASKED, ANSWERED, rejected_response="b"),
            {"prompt": "a", "chosen": "b"},
        ),
        (Source(path="a.jsonl", format="preference"),),
    ),
    Case(
        "labels",
        rows(
            {"prompt": "a", "completion": "b", "label": True},
            {"prompt": "a", "completion": "b", "label": "good"},
            {"prompt": "a", "completion": "b", "label": 0.5},
            {"prompt": "a", "completion": "b", "label": None},
            chat(ASKED, ANSWERED, ASKED, label=True),
            chat(ASKED, ANSWERED),
            {"messages": None, "label": True},
        ),
        (Source(path="a.jsonl", format="kto"),),
    ),
    Case("messages_and_labels", rows({**GOOD_CHAT, "label": True})),
    Case(
        "alpaca",
        {
            "a.json": json.dumps(
                [
                    {"instruction": "a", "input": "", "output": "b"},
                    {"instruction": "a", "output": None},
                    {"instruction": 1, "output": "b"},
                    {"instruction": "a", "input": 2, "output": "b"},
                    {"instruction": "a", "output": "b", "history": [["c", "d"], ["e"], "f"]},
                    {"instruction": "a", "output": "b", "history": "c"},
                    {"instruction": "a"},
                ],
                indent=1,
            ).encode()
        },
    ),
    Case("preference_rows", rows({"prompt": "a", "chosen": "b", "rejected": "c"})),
    Case("labelled_rows", rows({"prompt": "a", "completion": "b", "label": True})),
    Case(
        "margin_not_there",
        rows({"prompt": "a", "chosen": "b", "rejected": "c", "by": 1}),
        (Source(path="a.jsonl", columns={"margin": "byy"}),),
        {"task": "reward"},
    ),
    Case("columns_not_there", rows({"body": "x"}), (Source(path="a.jsonl", columns={"text": "bdy"}),)),
    Case(
        "over_several_lines",
        {"a.json": b'\n{\n "data": [{"text": "x"}]\n}', "b.jsonl": b'[\n{"text": "x"},\n{"text": "y"}\n]'},
    ),
    Case("upper_case_ending", {"A.JSON": b'[{"text": 1}]'}),
    Case("list_cut", {"a.json": b'[\n {"text": "x"},\n {"text": "y"},\n {"text": "z'}),
    Case("list_not_closed", {"a.json": b'[\n {"text": "x"},\n {"text": "y"}\n'}),
    Case("list_without_comma", {"a.json": b'[\n {"text": "x"}\n {"text": "y"}\n]'}),
    Case("list_with_last_comma", {"a.json": b'[\n {"text": "x"},\n]'}),
    Case("list_and_more", {"a.json": b'[\n {"text": "x"}\n]\n[]\n'}),
    Case(
        "list_elements", {"a.json": b'[\n {"text": "x"},\n 5,\n {"text": NaN}, {"text": 1},\n\n {"id": 1}]'}
    ),
    Case("list_not_utf8", {"a.json": b'[\n {"text": "\xe9"},\n {"text": "x"},\n {"text": "\xe8"}]'}),
    Case("empty_file", {"a.jsonl": b""}),
    Case("blank_lines_only", {"a.jsonl": b"\n  \n\n"}),
    Case("empty_list", {"a.json": b"[]"}),
    Case("task_takes_labels", rows(GOOD_CHAT), options={"task": "kto"}),
    Case("task_takes_other_rows", rows(GOOD_CHAT), options={"task": "pretrain"}),
    Case("missing_file", {}, (Source(path="nowhere.jsonl"),), error=MissingInputError),
    Case("missing_in_a_folder", {"a/b.txt": b""}, (Source(path="a/train"),), error=MissingInputError),
    Case("other_ending", {"a.xlsx": b"PK"}, error=MissingInputError),
    Case(
        "folder_without_data",
        {"a/b.md": b"", "a/.c.jsonl": b""},
        (Source(path="a"),),
        error=MissingInputError,
    ),
    Case("pattern_of_nothing", {}, (Source(path="a/*.jsonl"),), error=MissingInputError),
    Case("pattern_without_data", {"a/b.md": b""}, (Source(path="a/*"),), error=MissingInputError),
    Case(
        "saved_splits",
        {f"a/{name}": b"{}" for name in ("dataset_dict.json", "test/state.json", "train/state.json")},
        (Source(path="a"),),
        error=MissingInputError,
    ),
    Case(
        "saved_without_file",
        {"a/dataset_info.json": b"{}", "a/state.json": b'{"_data_files": [{"filename": "data.arrow"}]}'},
        (Source(path="a"),),
        error=MissingInputError,
    ),
    Case("parquet_damaged", {"a.parquet": b"PAR1"}),
    Case("arrow_damaged", {"a.arrow": b"ARROW1"}),
    Case("gzip_damaged", {"a.jsonl.gz": gzip.compress(lines(TEXT))[:-4], "b.json.gz": b"[]"}),
    Case(
        "csv",
        {
            "a.csv": b'id,text\n1,good\n2\n3,a,b\n\n4,"two\nlines"\n5,"x"y\n6,\xff\n7,"not closed\n',
            "b.csv": b"text,text\na,b\n",
            "c.tsv": b"text\t\na\tb\n",
        },
    ),
    Case("long_line", rows(TEXT, {"text": "x" * (64 << 20)}, {"text": 1})),
    Case("builtin_unknown", {}, (Source(path="builtin:slowstart"),), error=MissingInputError),
    Case("too_long", rows(TEXT, {"text": "x" * 40}, {"text": "y" * 32}), options={"max_length": 32}),
    Case(
        "nothing_left",
        rows({"text": ""}, {"text": "x" * 40}),
        options={"max_length": 32, "on_too_long": "drop"},
    ),
    Case("no_chat_template", rows(GOOD_CHAT), template=None),
    Case(
        "template_refuses",
        rows(GOOD_CHAT, chat(turn("system", "x"), *GOOD_CHAT["messages"])),
        template=REFUSING,
    ),
    Case(
        "template_without_end",
        rows(GOOD_CHAT),
        template="{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
    ),
    Case("template_broken", rows(GOOD_CHAT), template="{% for m in messages %}{{ m['role'] }"),
)


def message(case: Case) -> str:
    """What a user reads. The files lie in the working folder."""
    for name, content in case.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    tokenizer = byte_level_tokenizer()
    if case.template != "own":
        tokenizer.chat_template = case.template
    sources = case.sources or tuple(Source(path=name) for name in case.files)
    keys: dict[str, Any] = {"train": sources, "max_length": 512, **case.options}
    task = keys.pop("task", "sft")
    with pytest.raises(case.error) as caught:
        load_data(spec_of(task, Data(**keys)), tokenizer)
    return f"{caught.value}\n"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_mistake_has_its_message(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = message(case)
    golden = GOLDEN / f"{case.name}.txt"
    if os.environ.get("DSFT_UPDATE_GOLDEN") == "1":
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")
    assert "Traceback" not in shown


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {case.name for case in CASES}
