"""What becomes of rows: detection, lengths, the account of them, the fingerprint."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.read.builtin import builtin_rows
from dsft.data.sets.dataset import Example
from dsft.data.sets.ledger import Ledger
from dsft.data.sets.load import RunData, load_data
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError
from dsft.spec.schema import Data, Source
from tests.examples import dataset_of
from tests.unit.data.token_rows import spec_of

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token_id


def load_all(*sources: Source, task: str = "sft", **keys: Any) -> RunData:
    return load_data(spec_of(task, Data(train=sources, **{"max_length": 256, **keys})), TOKENIZER)


def load(tmp_path: Path, content: bytes, name: str = "a.jsonl", **options: Any) -> RunData:
    (tmp_path / name).write_bytes(content)
    of_source = {key: options.pop(key) for key in ("format", "columns", "max_rows") if key in options}
    return load_all(Source(path=str(tmp_path / name), **of_source), **options)


def ledger_of(loaded: RunData, part: str = "train") -> Ledger:
    figures = (
        loaded.account["train"]["total"] if part == "train" else loaded.account["held_out"][part]["total"]
    )
    names = Ledger.__dataclass_fields__
    return Ledger(**{name: value for name, value in figures.items() if name in names})


def texts(*rows: str) -> bytes:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()


def decoded(loaded: RunData) -> list[str]:
    return [TOKENIZER.decode(example.input_ids) for example in loaded.train]


# --- reading ----------------------------------------------------------------------------------------------


def test_blank_lines_marks_and_carriage_returns(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \n{"text": "two\\u0000"}'
    dataset = load(tmp_path, content)
    assert decoded(dataset) == ["one<|im_end|>", "two\0<|im_end|>"]
    assert [dataset.train.source(i).rsplit(":")[-1] for i in range(2)] == ["1", "4"]
    assert ledger_of(dataset).blank_lines == 2
    assert dataset.lines[0].endswith("a.jsonl: a byte order mark at the start was skipped")
    assert dataset.lines[1].endswith('a.jsonl: detected text: every row has "text"')


def test_alpaca_becomes_a_conversation(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be exact.", "history": []},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    dataset = load(tmp_path, json.dumps(rows).encode(), "a.json")
    system = "<|im_start|>system\nBe exact.<|im_end|>\n"
    assert decoded(dataset) == [
        system + "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n",
        "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n",
    ]
    assert dataset.train.target_counts.tolist() == [2, 3]
    assert dataset.lines[0].endswith('detected alpaca: every row has "instruction" and "output"')


def test_columns_and_format_override(tmp_path: Path) -> None:
    content = b'{"body": "one", "text": "not this", "messages": 1}\n'
    dataset = load(tmp_path, content, format="text", columns={"text": "body"})
    assert decoded(dataset) == ["one<|im_end|>"]
    assert dataset.lines[0].endswith("read as text, as the spec says")
    questions = b'{"q": "one", "a": "two"}\n'
    renamed = load(tmp_path, questions, columns={"instruction": "q", "output": "a"})
    assert renamed.lines[0].endswith('detected alpaca: every row has "q" and "a"')


def test_sources_follow_each_other_and_an_empty_one_is_reported(tmp_path: Path) -> None:
    for name, content in (("a", texts("one")), ("b", b"\n"), ("c", texts("two"))):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    sources = [Source(path=str(tmp_path / f"{name}.jsonl")) for name in "abc"]
    dataset = load_all(*sources, task="pretrain", max_length=9)
    assert decoded(dataset) == ["one<|im_end|>", "two<|im_end|>"]
    assert dataset.lines[1].endswith("b.jsonl: has no rows")
    assert ledger_of(dataset).blank_lines == 1


# --- lengths ----------------------------------------------------------------------------------------------


def test_truncate_keeps_the_answer(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": answer}]}
        for n, answer in ((1, "answer"), (200, "answer"), (1, "a"))
    ]
    content = "\n".join(json.dumps(row) for row in rows).encode()
    dataset = load(tmp_path, content, max_length=25, on_too_long="truncate")
    answer = "<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>"
    assert decoded(dataset)[:2] == ["ser\nq" + answer, "q" * 5 + answer]
    ledger = ledger_of(dataset)
    assert (ledger.rows, ledger.examples, ledger.truncated, ledger.without_end) == (3, 3, 2, 0)
    assert (ledger.prompt_cut, ledger.trained_tokens) == (2, 2 * len("answer.") + len("a."))
    assert "The prompts of 2 of 3 rows lost their beginning." in ledger.text()


def test_prompts_that_are_cut_in_every_row_are_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q" * 40}, {"role": "assistant", "content": "answer"}]
    content = b"\n".join([json.dumps({"messages": turns}).encode()] * 3)
    with pytest.raises(DataError) as raised:
        load(tmp_path, content, max_length=32, on_too_long="truncate")
    assert str(raised.value) == (
        "the prompts of all 3 rows would lose their beginning:\n  data.max_length: 32 is too short for the "
        "prompts and answers together; raise it (the longest row has 67 tokens)"
    )
    later = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 3
    content = b"\n".join([json.dumps({"messages": later}).encode()] * 3)
    # windows that begin at the start of a later turn cut no prompt
    assert ledger_of(load(tmp_path, content, max_length=48, on_too_long="truncate")).prompt_cut == 0


@given(st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=5), st.integers(2, 12))
@settings(max_examples=100, deadline=None)
def test_split_loses_and_repeats_nothing(tmp_path_factory: Any, rows: list[str], max_length: int) -> None:
    folder = tmp_path_factory.mktemp("split")
    dataset = load(folder, texts(*rows), task="pretrain", max_length=max_length, on_too_long="split")
    assert max(dataset.train.lengths) <= max_length
    for line, row in enumerate(rows, start=1):
        mine = [i for i in range(len(dataset.train)) if dataset.train.source(i).endswith(f":{line}")]
        pieces = [dataset.train[i].input_ids.tolist() for i in mine]
        assert pieces[0][:1] + [t for piece in pieces for t in piece[1:]] == [*row.encode(), END]
        assert all(piece[0] == before[-1] for before, piece in pairwise(pieces))


def test_a_text_of_nothing_is_left_out(tmp_path: Path) -> None:
    dataset = load(tmp_path, texts("", "a"))
    assert (len(dataset.train), ledger_of(dataset).empty) == (1, 1)


# --- the account ------------------------------------------------------------------------------------------


def test_the_account_in_words(tmp_path: Path) -> None:
    plain = load(tmp_path, texts("abc", "de"))
    assert ledger_of(plain).text() == "2 rows gave 2 examples of 7 tokens, 5 of them trained on."
    one = load(tmp_path, texts("abc"))
    assert ledger_of(one).text() == "1 row gave 1 example of 4 tokens, 3 of them trained on."
    cut = load(tmp_path, texts("abc", "d" * 9, "", "e" * 9) + b"\n", max_length=4, on_too_long="truncate")
    assert ledger_of(cut).text() == (
        "4 rows gave 3 examples of 12 tokens, 9 of them trained on. 1 row was empty and left out. "
        "2 rows were truncated. 2 rows were without an end of turn. 12 tokens were cut off or dropped. "
        "1 blank line was skipped."
    )


def test_the_fingerprint_sees_tokens_masks_borders_and_order(tmp_path: Path) -> None:
    def of(*rows: str) -> str:
        return load(tmp_path, texts(*rows)).train.fingerprint

    assert of("ab", "c") == of("ab", "c")
    assert len({of("ab", "c"), of("c", "ab"), of("a", "bc"), of("ab", "d"), of("ab")}) == 5
    examples = list(load(tmp_path, texts("ab")).train)
    masked = [Example(e.input_ids, np.zeros_like(e.trained)) for e in examples]
    assert dataset_of(masked).fingerprint != dataset_of(examples).fingerprint


# --- dsft's own rows --------------------------------------------------------------------------------------


def test_builtin_rows() -> None:
    train, heldout = builtin_rows("quickstart"), builtin_rows("quickstart-heldout")
    assert (len(train), len(heldout)) == (1097, 55)
    assert len({json.dumps(row) for row in train + heldout}) == 1152
    assert {len(row["messages"]) for row in train} == {2, 4} == {len(row["messages"]) for row in heldout}
    with pytest.raises(KeyError):
        builtin_rows("slowstart")


def test_builtin_pairs_are_the_same_conversations_with_a_wrong_last_answer_beside_the_right_one() -> None:
    for name, others in (
        ("quickstart", "quickstart-pairs"),
        ("quickstart-heldout", "quickstart-pairs-heldout"),
    ):
        rows, pairs = builtin_rows(name), builtin_rows(others)
        assert [pair["prompt"] + pair["chosen"] for pair in pairs] == [row["messages"] for row in rows]
        for pair in pairs:
            (right,), (wrong,) = pair["chosen"], pair["rejected"]
            assert right["content"] != wrong["content"]
            assert right["content"].split()[:2] == wrong["content"].split()[:2]


def test_builtin_rows_tell_one_value_of_every_fact() -> None:
    """What is held out can be learned: the same question has the same answer everywhere."""
    answers: dict[str, set[str]] = {}
    for row in builtin_rows("quickstart") + builtin_rows("quickstart-heldout"):
        turns = [message["content"] for message in row["messages"]]
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            answers.setdefault(question, set()).add(answer)
    assert len(answers) == 12 * 3 * 2
    assert all(len(logged) == 1 for logged in answers.values())


def test_builtin_rows_are_the_same_everywhere() -> None:
    dataset = load_all(Source(path="builtin:quickstart"), max_length=160)
    assert dataset.train.source(0) == "builtin:quickstart:1"
    examples = list(dataset.train)
    digest = hashlib.sha256(np.array([len(one.input_ids) for one in examples], "<i8").tobytes())
    for one in examples:
        digest.update(one.input_ids.astype("<i4").tobytes() + one.trained.tobytes())
    assert digest.hexdigest() == "e42c685d52f3c5a503a1f6a1d50d99215525d1ef68150413568860ad2790e1ca"
