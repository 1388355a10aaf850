"""Tokenizers that are learned from text: what comes back, what is written, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.read.builtin import QUICKSTART, builtin_rows
from dsft.data.render.renderer import Renderer
from dsft.data.rows import Conversation
from dsft.data.tokenizer import training as tokenizer_training
from dsft.data.tokenizer.load import load_tokenizer
from dsft.data.tokenizer.training import KINDS, TokenizerOptions, train_tokenizer
from dsft.errors import DataError, LockedError, MissingInputError, SpecError, StorageError

SIZE = 450


def lines() -> list[str]:
    rows = [m["content"] for row in builtin_rows(QUICKSTART) for m in row["messages"]]
    return [f"  {text}\t{number}" if number % 7 == 0 else text for number, text in enumerate(rows[:2000])]


def wanted(folder: Path, model: str, **keys: Any) -> TokenizerOptions:
    text = folder / "a.txt"
    if not text.exists():
        text.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    return replace(TokenizerOptions((str(text),), folder / model, SIZE, model), **keys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made: dict[str, tuple[Path, list[str]]] = {}
    for kind in KINDS:
        said: list[str] = []
        train_tokenizer(wanted(folder, kind, special=("<think>",)), said.append)
        made[kind] = (folder / kind, said)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_and_said(kind: str, trained: dict[str, tuple[Path, list[str]]]) -> None:
    folder, said = trained[kind]
    tokenizer: Any = load_tokenizer(folder)
    assert len(tokenizer) == SIZE == max(tokenizer.get_vocab().values()) + 1
    assert (
        tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|pad|>" and not tokenizer.bos_token
    )
    assert len(tokenizer("<think>")["input_ids"]) == 1
    assert any("100% of" in line for line in said) and any("bytes per token" in line for line in said)
    assert (folder / "tokenizer.model").exists() == (kind != "byte_bpe")
    number = next(float(line.split(": ")[1].split()[0]) for line in said if "bytes per token" in line)
    assert number > 1.5  # a byte is 1
    assert not list(folder.parent.glob("*.tmp-*"))


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")),
    st.lists(st.sampled_from([*" \n\t<>|", "  ", "cat", "<|im_end|>", "<0x41>", "<unk>", "\u00e9"])).map(
        "".join
    ),
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_every_text_comes_back(kind: str, trained: dict[str, tuple[Path, list[str]]], text: str) -> None:
    tokenizer: Any = load_once(trained[kind][0])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


KNOWN: dict[Path, Any] = {}


def load_once(folder: Path) -> Any:
    if folder not in KNOWN:
        KNOWN[folder] = load_tokenizer(folder)
    return KNOWN[folder]


@given(text=TEXT.filter(lambda text: "<|im_end|>" not in text and "<unk>" not in text))
@settings(max_examples=100, deadline=None)
def test_the_folder_of_a_bpe_model_cuts_as_sentencepiece(
    trained: dict[str, tuple[Path, list[str]]], text: str
) -> None:
    folder = trained["bpe"][0]
    own = KNOWN.setdefault(
        folder / "own", sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    )
    assert load_once(folder)(text)["input_ids"] == own.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_are_rendered_at_once(kind: str, trained: dict[str, tuple[Path, list[str]]]) -> None:
    tokenizer: Any = load_once(trained[kind][0])
    talk = Conversation(({"role": "user", "content": "A cat?"}, {"role": "assistant", "content": " Yes.\n"}))
    (row,) = Renderer(tokenizer).render([talk])
    assert not isinstance(row, str)
    said = "<|im_start|>user\nA cat?<|im_end|>\n<|im_start|>assistant\n Yes.\n<|im_end|>\n"
    assert tokenizer.decode(row.input_ids) == said
    assert tokenizer.decode(row.input_ids[row.trained]) == " Yes.\n<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_gives_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        given = wanted(tmp_path, kind, vocab_size=310, out=tmp_path / name, sample_mb=0.02, seed=seed)
        train_tokenizer(given, lambda _: None)
    one, two, other = ((tmp_path / n / "tokenizer.json").read_bytes() for n in ("one", "two", "other"))
    assert one == two and other != one, "of another sample"


def test_held_out_lines_are_not_learned_from(tmp_path: Path) -> None:
    given = wanted(tmp_path, "byte_bpe")
    files = tokenizer_training.data_files(given.files[0])
    counted = tokenizer_training.count(files, given, lambda _: None)
    learned = list(tokenizer_training._training_texts(files, given, counted, 1.0))
    assert len(counted.held_out) == 100 and counted.lines == 2000
    assert not set(learned) & set(counted.held_out)
    assert len(set(learned)) + len(set(counted.held_out)) == len(set(lines()))


@given(st.text(alphabet="ab \u4e2d", max_size=9000))
@settings(max_examples=50, deadline=None)
def test_pieces_together_are_the_line(text: str) -> None:
    pieces = list(tokenizer_training._pieces(text))
    assert "".join(pieces) == text and max(map(len, pieces)) <= tokenizer_training.PIECE


def test_rows_of_any_format(tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {i}", "output": f"It is {i}."} for i in range(400)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    given = wanted(tmp_path, "byte_bpe", files=(str(tmp_path / "*.jsonl"),), vocab_size=280)
    train_tokenizer(given, said.append)
    assert any("400 lines of" in line for line in said)


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        ("unigram", 200, "give 260 or more"),
        ("byte_bpe", 258, "give 259 or more"),
        ("unigram", 265, "characters of this text need"),
        ("bpe", 265, "characters of this text need"),
        ("unigram", 10**6, "more than this text allows; give"),
        ("bpe", 10**6, "more than this text allows; give"),
        ("byte_bpe", 10**6, "more than this text allows; give"),
    ],
)
def test_sizes_that_the_text_does_not_give(model: str, size: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said) as error:
        train_tokenizer(wanted(tmp_path, model, vocab_size=size), lambda _: None)
    assert "--vocab_size" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_what_cannot_be_learned_from(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good\n\n\xff\nb\0d\n")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "sign.txt").write_text("a\u2581b\n")

    def of(name: str, model: str = "byte_bpe") -> None:
        train_tokenizer(wanted(tmp_path, model, files=(str(tmp_path / name),)), lambda _: None)

    with pytest.raises(
        DataError, match=r"^2 mistakes in the data:\n  .*bad.txt:3: not UTF-8.*\n  .*bad.txt:4: a NUL byte"
    ):
        of("bad.txt")
    with pytest.raises(DataError, match="every line is blank"):
        of("blank.txt")
    with pytest.raises(DataError, match=r"sign.txt:1: U\+2581 is sentencepiece's sign .* --model byte_bpe"):
        of("sign.txt", "unigram")
    with pytest.raises(MissingInputError, match="nothing.txt"):
        of("nothing.txt")
    with pytest.raises(SpecError, match="'wordpiece' is not supported; choose unigram, bpe, byte_bpe"):
        of("blank.txt", "wordpiece")
    with pytest.raises(SpecError, match="--special: the name is empty"):
        train_tokenizer(wanted(tmp_path, "byte_bpe", special=("",)), lambda _: None)
    (tmp_path / "byte_bpe").mkdir()
    with pytest.raises(LockedError, match="exists already"):
        of("bad.txt")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    for out in (tmp_path / "a.txt" / "tok", Path("/proc/tok")):
        with pytest.raises(StorageError, match=r"^--out .*tok cannot be created \(.*\); give another folder"):
            train_tokenizer(wanted(tmp_path, "byte_bpe", out=out), lambda _: None)


def test_text_that_does_not_come_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_training, "HARD", ("a\u2581b", "c"))
    with pytest.raises(DataError, match=r"1 of .* change if(.|\n)*becomes 'a b'"):
        train_tokenizer(wanted(tmp_path, "bpe"), lambda _: None)
    assert not (tmp_path / "bpe").exists()
