"""Bare sentencepiece models: the same ids as sentencepiece's own encode, whatever the text."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dsft.data.read.builtin import QUICKSTART, builtin_rows
from dsft.data.render.renderer import tokenizer_text
from dsft.data.tokenizer import spm
from dsft.data.tokenizer.load import AddedTokens, add_tokens, bare_model, load_tokenizer, notes
from dsft.errors import MissingInputError

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, dict[str, Any]] = {
    "llama": IDENTITY | {"byte_fallback": True, "user_defined_symbols": ["<ud>", "\u2581\u2581"]},
    "gemma": IDENTITY
    | {
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n\n", "<ud>", "<udd>", "ab"],
    },
    "nfkc": {"normalization_rule_name": "nmt_nfkc", "pad_id": 3},
}
Load = Callable[[str, str], tuple[Any, Any]]


def sentences() -> list[str]:
    rows = [m["content"] for row in builtin_rows(QUICKSTART) for m in row["messages"]]
    rng = random.Random(1)
    return [
        *rows[:1500],
        *("".join(rng.choices("aab ", k=rng.randint(1, 30))) for _ in range(300)),
        "\u00e9 \ufb01 --- --------",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    lines = sentences()
    for model_type in ("bpe", "unigram"):
        for kind, keys in KINDS.items():
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_prefix=str(made / f"{model_type}-{kind}"),
                model_type=model_type, vocab_size=600, hard_vocab_limit=False, minloglevel=2, num_threads=1,
                **keys,
            )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def load(folder: Path) -> Load:
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def loaded(model_type: str, kind: str) -> tuple[Any, Any]:
        if (model_type, kind) not in known:
            path = folder / f"{model_type}-{kind}.model"
            own = sentencepiece.SentencePieceProcessor(model_file=str(path))
            known[model_type, kind] = (own, load_tokenizer(path))
        return known[model_type, kind]

    return loaded


PARTS = (
    "a", "b", "ab", " ", "  ", "\n", "\n\n", "<", "<ud>", "<udd>", "0x41>", "\u2581", "-", "--", "dog",
    "The ", "\u4e2d", "\ufb01",
)  # fmt: skip
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.sampled_from(PARTS)).map("".join)
).filter(lambda text: not any(name in text for name in ("<s>", "</s>", "<unk>", "<pad>")))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
@example("--------" * 5)
@example("<0x41><ud><0x41>")
@example(" \u2581 a")
@example("\u3000\u0308 x \u2581")
@settings(max_examples=150, deadline=None)
def test_ids_are_sentencepieces_own(model_type: str, kind: str, load: Load, text: str) -> None:
    own, tokenizer = load(model_type, kind)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == own.encode(text)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
@given(text=TEXT.filter(lambda text: "\u2581" not in text))
@settings(max_examples=100, deadline=None)
def test_text_is_unchanged(model_type: str, kind: str, load: Load, text: str) -> None:
    _, tokenizer = load(model_type, kind)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_special_tokens_are_the_models_own(model_type: str, load: Load) -> None:
    own, tokenizer = load(model_type, "nfkc")
    ids = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (own.unk_id(), own.bos_id(), own.eos_id(), own.pad_id()) == (0, 1, 2, 3)
    assert tokenizer("<s>dog</s>")["input_ids"] == [1, *own.encode("dog"), 2]
    assert load(model_type, "llama")[1].pad_token is None
    assert load(model_type, "llama")[1].is_fast == (model_type == "bpe") and not tokenizer.is_fast


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_pickled_and_saved_tokenizers(model_type: str, folder: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(folder / f"{model_type}-gemma.model")
    assert add_tokens(tokenizer, ("<|im_end|>",)).new == ("<|im_end|>",)
    tokenizer.chat_template = "{{ messages }}"
    text = "The dog\n\n  <0x41> \u4e2d<|im_end|>\n<ud>ab"
    ids = tokenizer(text)["input_ids"]
    assert pickle.loads(pickle.dumps(tokenizer))(text)["input_ids"] == ids
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read(text)["input_ids"] == ids and read.decode(ids) == text == tokenizer.decode(ids)
    assert read.chat_template == "{{ messages }}" and len(read) == len(tokenizer)
    assert read.special_tokens_map == tokenizer.special_tokens_map


def test_a_folder_with_only_a_model_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((folder / "bpe-llama.model").read_bytes())
    assert load_tokenizer(tmp_path).get_vocab() == load_tokenizer(folder / "bpe-llama.model").get_vocab()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert bare_model(tmp_path) is None


def test_the_identity_of_a_tokenizer_does_not_depend_on_its_path(folder: Path, tmp_path: Path) -> None:
    """Hosts may have it in other folders."""
    texts = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        shutil.copy(folder / "unigram-nfkc.model", tmp_path / place / "tokenizer.model")
        tokenizer = load_tokenizer(tmp_path / place)
        assert not tokenizer.is_fast
        texts.append(json.dumps(tokenizer_text(tokenizer), default=str))
    assert texts[0] == texts[1] and str(tmp_path) not in texts[0]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff" * 40, b"\x0a\x05\x0a\x03abc"[:-1], b"\x0a\x02\x0a\x00\x98"]
)
def test_files_that_are_no_models(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(data)
    with pytest.raises(MissingInputError, match="this is not a sentencepiece model"):
        load_tokenizer(tmp_path / "a.model")


def test_word_and_character_models_are_refused(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_prefix=str(tmp_path / "w"), model_type="char",
        vocab_size=60, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(MissingInputError, match="a word or character model"):
        load_tokenizer(tmp_path / "w.model")


def test_sentencepiece_itself_encodes_where_the_conversion_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "bpe-llama.model"
    assert load_tokenizer(path).is_fast
    monkeypatch.setattr(spm, "_normalizers", lambda model: [])
    tokenizer = load_tokenizer(path)
    assert not tokenizer.is_fast
    (note,) = notes(tokenizer, AddedTokens((), (), None))
    assert note.startswith("tokenizer: sentencepiece itself tokenizes")


def test_parsed_models_equal_sentencepieces_own_reading(folder: Path) -> None:
    path = folder / "bpe-gemma.model"
    own, model = sentencepiece.SentencePieceProcessor(model_file=str(path)), spm.parse(path.read_bytes())
    assert [p.piece for p in model.pieces] == [own.id_to_piece(i) for i in range(own.get_piece_size())]
    assert [p.score for p in model.pieces] == [own.get_score(i) for i in range(own.get_piece_size())]
    assert model.trainer_spec.model_type == spm.BPE and model.trainer_spec.byte_fallback
    assert not model.normalizer_spec.add_dummy_prefix
    assert spm.pieces_of(model, spm.USER_DEFINED) == ["\n\n", "<ud>", "<udd>", "ab"]
