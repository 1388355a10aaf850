"""The byte-level tokenizer and the tokenizers that are read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.render.renderer import Renderer, tokenizer_text
from dsft.data.rows import Text
from dsft.data.tokenizer.load import (
    BYTE_LEVEL_VOCAB_SIZE,
    NOT_PLAIN,
    OWN_CLASS,
    SPECIAL_TOKENS,
    _without_torch,
    byte_level_tokenizer,
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "there is no such folder"),
        ("folder", "no tokenizer that"),
        ("a.json", "this is a file"),
        ("torn", "no tokenizer that .*model.tokenizer to another$"),
        (
            "torn model",
            "no tokenizer that .*model.tokenizer to another, or to torn model/tokenizer.model",
        ),
        ("some/where", "is not in the hub's cache, and HF_HUB_OFFLINE=1 is set; correct the name"),
    ],
)
def test_what_is_no_tokenizer(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("a.json").write_text("{}")
    byte_level_tokenizer().save_pretrained("torn")
    Path("torn/tokenizer.json").write_bytes(Path("torn/tokenizer.json").read_bytes()[:500])
    shutil.copytree("torn", "torn model")
    Path("torn model/tokenizer.model").touch()
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


@pytest.mark.parametrize(
    ("named", "model_type", "light"),
    [
        ("PreTrainedTokenizerFast", None, "PreTrainedTokenizerFast"),
        ("TokenizersBackend", "llama", "PreTrainedTokenizerFast"),
        ("TokenizersBackend", "qwen3", "PreTrainedTokenizerFast"),
        ("PreTrainedTokenizerFast", "mistral", "PreTrainedTokenizerFast"),
        ("PreTrainedTokenizerFast", "qwen2", None),
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
    ],
)
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


def test_which_models_get_another_class_than_their_folder_names() -> None:
    """As the installed transformers has it."""
    from transformers.models.auto import tokenization_auto as auto

    plain = {"TokenizersBackend", "PreTrainedTokenizerFast", "PythonBackend", "MistralCommonBackend", None}
    other = {
        kind
        for kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if auto.TOKENIZER_MAPPING_NAMES.get(kind) not in plain
    }
    assert set(NOT_PLAIN) == other
    for name, kinds in OWN_CLASS.items():
        assert {auto.TOKENIZER_MAPPING_NAMES[kind].removesuffix("Fast") for kind in kinds} == {name}


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
