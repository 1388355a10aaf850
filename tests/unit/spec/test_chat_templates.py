"""data.chat_template as validate sees it: a name of ours, of the tokenizer's, or a file."""

import json
from pathlib import Path

import pytest

from dsft.spec.load import load_spec
from tests.unit.spec.conftest import Write
from tests.unit.spec.test_load import messages


def given(name: str) -> str:
    return f"data.chat_template={name}"


def tokenizer(**config: object) -> str:
    folder = Path("tok/additional_chat_templates")
    folder.mkdir(parents=True)
    (folder / "rag.jinja").touch()
    Path("tok/tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return "model.tokenizer=tok"


def test_names_of_ours_and_files(write: Write) -> None:
    Path("sub").mkdir()
    for name in ("t.jinja", "sub/t", "word"):
        Path(name).touch()
    for name in ("llama3", "t.jinja", "sub/t", "word"):
        assert load_spec(write(), [given(name)]).data.chat_template == name


@pytest.mark.parametrize("name", ["llama9", "no.jinja", "sub/no"])
def test_what_is_neither_names_all_that_is(write: Write, name: str) -> None:
    (message,) = messages(write(), given(name))
    assert f"'{name}' does not exist" in message
    assert message.endswith("qwen2_5, qwen3, zephyr") and "give the name of one: chatml, cohere" in message


def test_a_folder(write: Write) -> None:
    Path("sub").mkdir()
    (message,) = messages(write(), given("sub"))
    assert message.endswith("'sub' is a folder, but a file is needed; give the Jinja file in it")


def test_names_among_the_tokenizers_several(write: Write) -> None:
    own = tokenizer(
        chat_template=[{"name": "tool_use", "template": ""}, {"name": "default", "template": ""}, 3]
    )
    for name in ("tool_use", "default", "rag"):
        load_spec(write(), [given(name), own])
    assert "'sums' does not exist" in messages(write(), given("sums"), own)[0]
    load_spec(write(), [given("sums"), "model.tokenizer=someone/some"])  # a hub id: known when it is read


def test_a_tokenizers_config_without_templates(write: Write) -> None:
    own = tokenizer(chat_template="{{ x }}")
    load_spec(write(), [given("rag"), own])
    load_spec(write(), [given("default"), own])
    Path("tok/tokenizer_config.json").write_text("[", encoding="utf-8")
    assert "'sums' does not exist" in messages(write(), given("sums"), own)[0]
