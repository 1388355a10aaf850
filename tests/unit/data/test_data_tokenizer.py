"""The byte-level tokenizer and the tokenizers that are read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from dsft.data.render.renderer import Renderer, tokenizer_text
from dsft.data.rows import Text
from dsft.data.tokenizer.load import (
    BYTE_LEVEL_VOCAB_SIZE,
    OWN_CLASS,
    SPECIAL_TOKENS,
    _without_torch,
    byte_level_tokenizer,
    is_unchanged,
    keep_tokens,
    load_tokenizer,
    pad_id,
)
from dsft.errors import MissingInputError

TOKENIZER = byte_level_tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(st.one_of(TEXT, st.sampled_from(SPECIAL_TOKENS))).map("".join))
@settings(max_examples=300, deadline=None)
def test_every_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@given(TEXT.filter(lambda text: "<|" not in text))
@settings(max_examples=100, deadline=None)
def test_a_byte_is_its_own_token(text: str) -> None:
    assert bytes(TOKENIZER(text)["input_ids"]) == text.encode()


def test_special_tokens() -> None:
    assert len(TOKENIZER) == BYTE_LEVEL_VOCAB_SIZE == 259
    assert TOKENIZER("<|pad|><|im_start|><|im_end|>")["input_ids"] == [256, 257, 258]
    assert (pad_id(TOKENIZER), TOKENIZER.eos_token_id) == (256, 258)


def test_saved_and_read_again(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    read = load_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "ü\n"}]
    assert read.chat_template == TOKENIZER.chat_template
    assert read.special_tokens_map == TOKENIZER.special_tokens_map
    for tokenizer in (TOKENIZER, read):
        rendered: Any = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True)
        assert tokenizer.decode(rendered["input_ids"]) == (
            "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\nü\n<|im_end|>\n"
        )
        assert sum(rendered["assistant_masks"]) == len("ü\n".encode()) + 1


def test_pad_id_without_special_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.pad_token = None
    assert pad_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert pad_id(tokenizer) == 0


def test_token_id_beyond_every_vocabulary_is_refused(tmp_path: Path) -> None:
    """The tokenizers library would allocate memory for each id up to it, and end the process."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"a": 97', '"a": 2147483648'))
    with pytest.raises(
        MissingInputError, match="has the token id 2,147,483,648, and a model has a row for each"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("name", "said"), [
    ("./nowhere", "there is no such folder"),
    ("folder", "no tokenizer that"),
    ("a.json", "this is a file"),
    ("torn", "no tokenizer that .*model.tokenizer to another$"),
    ("torn model", "no tokenizer that .*model.tokenizer to another, or to torn model/tokenizer.model"),
    ("pipe.model", "pipe.model is a named pipe, not a file"),
    ("large.model", "large.model is larger than"),
    ("some/where", "is not in the hub's cache, and HF_HUB_OFFLINE=1 is set; correct the name"),
])  # fmt: skip
def test_what_is_no_tokenizer(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("a.json").write_text("{}")
    byte_level_tokenizer().save_pretrained("torn")
    Path("torn/tokenizer.json").write_bytes(Path("torn/tokenizer.json").read_bytes()[:500])
    shutil.copytree("torn", "torn model")
    Path("torn model/tokenizer.model").touch()
    os.mkfifo("pipe.model")
    Path("large.model").touch()
    os.truncate("large.model", 2**30)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingInputError, match=said):
        load_tokenizer(name)


def test_the_vocabulary_size_costs_no_import() -> None:
    code = (
        "import sys; from dsft.data.tokenizer.load import BYTE_LEVEL_VOCAB_SIZE as n; "
        "print(n, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["259", "False", "False"]


@pytest.mark.parametrize(("named", "model_type", "light"), [
    ("PreTrainedTokenizerFast", None, "PreTrainedTokenizerFast"),
    ("TokenizersBackend", "llama", "PreTrainedTokenizerFast"),
    ("TokenizersBackend", "qwen3", "PreTrainedTokenizerFast"),
    ("PreTrainedTokenizerFast", "mistral", "PreTrainedTokenizerFast"),
    ("Qwen2Tokenizer", "qwen2", "Qwen2Tokenizer"),
    ("Qwen2TokenizerFast", "qwen3", "Qwen2Tokenizer"),
    ("Qwen2Tokenizer", None, "Qwen2Tokenizer"),
    ("Qwen2Tokenizer", "llama", None),
    ("GPT2TokenizerFast", "gpt2", "GPT2Tokenizer"),
    ("GPTNeoXTokenizer", "gpt_neox", "GPTNeoXTokenizer"),
    ("GemmaTokenizer", "gemma2", "GemmaTokenizer"),
    ("CohereTokenizerFast", "cohere", "CohereTokenizer"),
    ("LlamaTokenizer", "llama", None),
    ("LlamaTokenizerFast", None, None),
])  # fmt: skip
def test_without_torch_as_autotokenizer(
    named: str, model_type: str | None, light: str | None, tmp_path: Path
) -> None:
    """The same class, the same backend, the same ids."""
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert _without_torch(tmp_path) == light
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours.chat_template == theirs.chat_template


def test_classes_of_model_types_are_those_of_the_installed_transformers() -> None:
    from transformers.models.auto import tokenization_auto as auto

    for name, kinds in OWN_CLASS.items():
        assert {auto.TOKENIZER_MAPPING_NAMES[kind].removesuffix("Fast") for kind in kinds} == {name}


def test_autotokenizer_makes_the_tokens_of_tokenizer_json_from_an_export_of_any_model(tmp_path: Path) -> None:
    """It takes its own class, which composes characters, for the model types that are collected here."""
    from transformers import CONFIG_MAPPING, AutoTokenizer
    from transformers.models.auto import tokenization_auto as auto

    text, replaced = "cafe\u0301", []
    row = TOKENIZER(text)["input_ids"]
    named = {"llama", "qwen3", *auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS}
    for kind in sorted(named & set(CONFIG_MAPPING)):
        folder, again = tmp_path / kind, tmp_path / f"{kind} again"
        TOKENIZER.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        assert load_tokenizer(folder)(text)["input_ids"] == row, kind
        if lines := list(keep_tokens(TOKENIZER, folder, [row, row[:3]])):
            assert "rows than this run; so tokenizer_config.json has" in lines[0]
            assert kind != "qwen2" or "AutoTokenizer would read other tokens from 1 of 2 rows" in lines[0]
            replaced.append(kind)
        assert is_unchanged(folder) == bool(lines)
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == row, kind
        shutil.copytree(folder, again)
        load_tokenizer(folder).save_pretrained(again)
        list(keep_tokens(load_tokenizer(folder), again, [row]))
        assert AutoTokenizer.from_pretrained(again)(text)["input_ids"] == row, kind
    assert {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"} <= set(replaced)
    assert not {"llama", "qwen3"} & set(replaced)


def test_a_tokenizer_that_autotokenizer_cannot_read_alike_is_told(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    other = byte_level_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    before = json.loads((tmp_path / "tokenizer_config.json").read_text())
    [line] = keep_tokens(other, tmp_path, [TOKENIZER("A row")["input_ids"]])
    assert line.startswith("warning: export:") and "use the tokenizer that this run was given" in line
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == before


def test_code_that_comes_with_it_is_never_run(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    assert _without_torch(tmp_path) is None
    with pytest.raises(MissingInputError):
        load_tokenizer(tmp_path)


def test_a_plain_folder_is_read_without_torch(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    code = (
        "import sys; from dsft.data.tokenizer.load import load_tokenizer; "
        f"load_tokenizer({str(tmp_path)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_what_a_tokenizer_is_does_not_depend_on_what_it_has_encoded(tmp_path: Path) -> None:
    """Files of tokenizers may have truncation and padding, which are switched off when rows are encoded."""
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.save_pretrained(tmp_path)
    read = load_tokenizer(tmp_path)
    before = tokenizer_text(read)
    Renderer(read).render([Text((("a text", True),))])
    assert read.backend_tokenizer.truncation is None
    assert tokenizer_text(read) == before
