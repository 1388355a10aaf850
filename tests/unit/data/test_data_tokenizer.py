"""The byte-level tokenizer and the tokenizers that are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.tokenizer import (
    BYTE_LEVEL_VOCAB_SIZE,
    SPECIAL_TOKENS,
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
        rendered = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True)
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
        ("torn", "no tokenizer that"),
        ("some/where", "not to be had from the hub"),
    ],
)
def test_what_is_no_tokenizer(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("a.json").write_text("{}")
    byte_level_tokenizer().save_pretrained("torn")
    Path("torn/tokenizer.json").write_bytes(Path("torn/tokenizer.json").read_bytes()[:500])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingInputError, match=said):
        load_tokenizer(name)


def test_the_vocabulary_size_costs_no_import() -> None:
    code = (
        "import sys; from dsft.data.tokenizer import BYTE_LEVEL_VOCAB_SIZE as n; "
        "print(n, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["259", "False", "False"]
