"""`dsft answer`: batches answer as single prompts do, a stop loses nothing, and processes share the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsft.commands import answer as command
from dsft.commands.chat import Sampling, load
from dsft.errors import DataError, MissingInputError, StorageError
from dsft.spec.schema import Source
from tests.integration.runs import dsft, trained, write_spec

pytestmark = pytest.mark.filterwarnings("ignore")
GREEDY = Sampling(0.0, 1.0, 12, 0)
QUESTIONS = [
    "What colour is it?",
    "How many legs?",
    "Name it, in as few words as you can, please.",
    "Why?",
    "No",
]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(write_spec(folder), "train.max_steps=4")
    return folder / "runs" / "small" / "export"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{number} legs"}]}
        for number, text in enumerate(QUESTIONS)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(
    export: Path,
    data: Path,
    out: Path,
    sampling: Sampling = GREEDY,
    batch: int = 2,
    system: str | None = None,
) -> list[dict[str, Any]]:
    command.answer(export, Source(path=str(data)), out, sampling, system, batch, 1)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_are_those_of_single_prompts(export: Path, data: Path, tmp_path: Path) -> None:
    found = answers(export, data, tmp_path / "out.jsonl")
    model = load(export, GREEDY)
    for number, (line, text) in enumerate(zip(found, QUESTIONS, strict=True)):
        assert line["prompt"] == [{"role": "user", "content": text}] and line["reference"] == f"{number} legs"
        assert line["answer"] == model.answer(line["prompt"], lambda piece: None)
        assert line["source"].endswith(f"rows.jsonl:{number + 1}")
    assert [path.name for path in tmp_path.glob("out*")] == ["out.jsonl"]


def test_a_stopped_command_continues(
    export: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a torn line, with the draws of an uninterrupted one."""
    sampling = Sampling(1.0, 0.9, 12, 7)
    whole = answers(export, data, tmp_path / "whole.jsonl", sampling)
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part-0"
    asked, real = [], command.ChatModel.answers

    def stopping(self: Any, prompts: list[str]) -> list[str]:
        asked.append(len(prompts))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(self, prompts)

    monkeypatch.setattr(command.ChatModel, "answers", stopping)
    with pytest.raises(KeyboardInterrupt):
        answers(export, data, out, sampling)
    with part.open("a") as file:
        file.write('[[3, "to')
    with pytest.raises(StorageError, match="made with other rows or settings"):
        answers(export, data, out, GREEDY)
    assert answers(export, data, out, sampling) == whole and sum(asked) == len(QUESTIONS) + 2


def test_processes_share_the_rows(export: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["answer", str(export), "--data", str(data), "--out", str(out), "--max-new-tokens", "12"]
    done = dsft("--fork", *words, "--batch-size", "2", "--processes", "2")
    assert done.returncode == 0, done.stderr
    alone = answers(export, data, tmp_path / "alone.jsonl")
    assert [json.loads(line) for line in out.read_text().splitlines()] == alone
    assert "answers to 5 rows" in done.stdout and "1 of 2 batches" in done.stderr


def test_a_system_prompt_changes_the_prompts(export: Path, data: Path, tmp_path: Path) -> None:
    found = answers(export, data, tmp_path / "out.jsonl", system="Be brief.")
    assert all(line["prompt"][0] == {"role": "system", "content": "Be brief."} for line in found)


def test_prompts_alone_are_answered_and_answers_again(export: Path, data: Path, tmp_path: Path) -> None:
    found = answers(export, data, tmp_path / "out.jsonl")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    alone = answers(export, prompts, tmp_path / "alone.jsonl")
    again = answers(export, tmp_path / "out.jsonl", tmp_path / "again.jsonl")
    assert [one["answer"] for one in found] == [one["answer"] for one in alone]
    keys = ("prompt", "answer", "reference")
    assert [[one[key] for key in keys] for one in found] == [[one[key] for key in keys] for one in again]
    assert {one["reference"] for one in alone} == {None}


def test_what_cannot_be_answered(export: Path, data: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a text"}) + "\n")
    with pytest.raises(DataError, match="it is plain text, which is trained on without"):
        answers(export, texts, tmp_path / "out.jsonl")
    texts.write_text('{"prompt": "a", "cho\n')
    with pytest.raises(DataError, match="cut off: the JSON ends before it is complete"):
        answers(export, texts, tmp_path / "out.jsonl")
    texts.write_text("\n")
    with pytest.raises(DataError, match="has no rows"):
        answers(export, texts, tmp_path / "out.jsonl")
    texts.write_text(json.dumps({"prompt": "long " * 500}) + "\n")
    with pytest.raises(DataError, match="and the model 256 positions"):
        answers(export, texts, tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl.part-0").write_text("{no\n")
    with pytest.raises(StorageError, match="is damaged"):
        answers(export, data, tmp_path / "out.jsonl")
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(StorageError, match="exists; remove it"):
        answers(export, data, tmp_path / "there.jsonl")


def test_by_default_the_held_out_rows_of_a_run_are_answered_into_its_folder(
    export: Path, tmp_path: Path
) -> None:
    run = export.parent
    data, out = command.defaults(run, None, None)
    assert (data.path, out) == ("builtin:quickstart-heldout", run / "answers.jsonl")
    command.answer(run, data, out, Sampling(0.0, 1.0, 1, 0), None, 64, 1)
    sources = [json.loads(line)["source"] for line in out.read_text().splitlines()]
    assert sources == [f"{data.path}:{number}" for number in range(1, 17)]
    with pytest.raises(MissingInputError, match=r"export is no run, so give --data FILE and --out FILE"):
        command.defaults(export, None, tmp_path / "out.jsonl")
    values = yaml.safe_load((run / "spec.yaml").read_text())
    without = {"data": values["data"] | {"eval": []}, "train": values["train"] | {"eval_every": None}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(values | without))
    with pytest.raises(MissingInputError, match=r"the spec of .* has no data\.eval to answer"):
        command.defaults(tmp_path, None, None)


def test_rows_are_read_as_the_source_says(export: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "reply": str(number)} for number in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"instruction": "question", "output": "reply"}
    source = Source(path=str(path), format="alpaca", columns=columns, max_rows=2)
    found, _ = command.read_prompts(source, None)
    assert [(one.messages[0]["content"], one.reference) for one in found] == [("0?", "0"), ("1?", "1")]
    path.write_text('{"prompt": "a", "reference": "b"}\n{"prompt": "a", "response": "b"}\n')
    with pytest.raises(DataError, match='completion" is missing; the row has'):
        command.read_prompts(Source(path=str(path)), None)
    path.write_text('{"prompt": "a", "reference": "b"}\n')
    assert command.read_prompts(Source(path=str(path)), None)[0][0].reference == "b"
