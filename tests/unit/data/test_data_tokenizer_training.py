"""`dsft tokenizer train`: round trips, what is written, what is refused."""

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
Trained = dict[str, tuple[Path, list[str]]]
"""Kind -> its folder, and what was logged."""


def lines() -> list[str]:
    rows = [m["content"] for row in builtin_rows(QUICKSTART) for m in row["messages"]]
    return [f"  {text}\t{number}" if number % 7 == 0 else text for number, text in enumerate(rows[:2000])]


def wanted(folder: Path, model: str, **keys: Any) -> TokenizerOptions:
    text = folder / "a.txt"
    if not text.exists():
        text.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    return replace(TokenizerOptions((str(text),), folder / model, SIZE, model), **keys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("tokenizers")
    made: Trained = {}
    for kind in KINDS:
        logged: list[str] = []
        train_tokenizer(wanted(folder, kind, special=("<think>",)), logged.append)
        made[kind] = (folder / kind, logged)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_tokenizer_and_its_report(kind: str, trained: Trained) -> None:
    folder, logged = trained[kind]
    tokenizer: Any = load_tokenizer(folder)
    assert len(tokenizer) == SIZE == max(tokenizer.get_vocab().values()) + 1
    assert (
        tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|pad|>" and not tokenizer.bos_token
    )
    assert len(tokenizer("<think>")["input_ids"]) == 1
    assert any("are unchanged" in line for line in logged) and any(
        "bytes per token" in line for line in logged
    )
    assert (folder / "tokenizer.model").exists() == (kind != "byte_bpe")
    number = next(float(line.split(": ")[1].split()[0]) for line in logged if "bytes per token" in line)
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
def test_every_text_is_unchanged(kind: str, trained: Trained, text: str) -> None:
    tokenizer: Any = load_once(trained[kind][0])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


KNOWN: dict[Path, Any] = {}


def load_once(folder: Path) -> Any:
    if folder not in KNOWN:
        KNOWN[folder] = load_tokenizer(folder)
    return KNOWN[folder]


@given(text=TEXT.filter(lambda text: "<|im_end|>" not in text and "<unk>" not in text))
@settings(max_examples=100, deadline=None)
def test_a_trained_bpe_model_equals_sentencepiece(trained: Trained, text: str) -> None:
    folder = trained["bpe"][0]
    own = KNOWN.setdefault(
        folder / "own", sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    )
    assert load_once(folder)(text)["input_ids"] == own.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_are_rendered_at_once(kind: str, trained: Trained) -> None:
    tokenizer: Any = load_once(trained[kind][0])
    talk = Conversation(({"role": "user", "content": "A cat?"}, {"role": "assistant", "content": " Yes.\n"}))
    (row,) = Renderer(tokenizer).render([talk])
    assert not isinstance(row, str)
    logged = "<|im_start|>user\nA cat?<|im_end|>\n<|im_start|>assistant\n Yes.\n<|im_end|>\n"
    assert tokenizer.decode(row.input_ids) == logged
    assert tokenizer.decode(row.input_ids[row.trained]) == " Yes.\n<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_gives_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    for name, sample in (("one", 0.02), ("two", 0.02), ("other", 0.01)):
        train_tokenizer(
            wanted(tmp_path, kind, vocab_size=310, out=tmp_path / name, sample_mb=sample), lambda _: None
        )
    one, two, other = ((tmp_path / n / "tokenizer.json").read_bytes() for n in ("one", "two", "other"))
    assert one == two and other != one, "of another sample"


def test_held_out_lines_are_not_trained_on(tmp_path: Path) -> None:
    held_out, texts = tokenizer_training._texts(wanted(tmp_path, "byte_bpe"), lambda _: None)
    assert 20 < len(held_out) <= 100
    assert not set(texts) & set(held_out)
    assert set(texts) | set(held_out) == set(lines())


def test_of_much_text_every_nth_line_is_used(tmp_path: Path) -> None:
    logged: list[str] = []
    held_out, texts = tokenizer_training._texts(wanted(tmp_path, "byte_bpe", sample_mb=0.02), logged.append)
    assert "1 of 4 is used" in logged[-1]
    assert {*held_out, *texts} == set(lines()[::4])
    assert 0.01e6 < sum(len(text.encode()) for text in lines()[::4]) <= 0.02e6


def test_rows_of_any_format(tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {i}", "output": f"It is {i}."} for i in range(400)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logged: list[str] = []
    given = wanted(tmp_path, "byte_bpe", files=(str(tmp_path / "*.jsonl"),), vocab_size=280)
    train_tokenizer(given, logged.append)
    assert any("400 lines of" in line for line in logged)


@pytest.mark.parametrize(("model", "size", "logged"), [
    ("byte_bpe", 258, "give 259 or more"),
    ("unigram", 200, "required_chars"),
    ("bpe", 265, "required_chars"),
    ("unigram", 10**6, "Please set it to a value <="),
    ("bpe", 10**6, "Please set it to a value <="),
    ("byte_bpe", 10**6, "more than this text allows; give"),
])  # fmt: skip
def test_impossible_vocabulary_sizes(model: str, size: int, logged: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=logged) as error:
        train_tokenizer(wanted(tmp_path, model, vocab_size=size), lambda _: None)
    assert "--vocab_size" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_bad_files_and_options(tmp_path: Path) -> None:
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
    (tmp_path / "byte_bpe").mkdir()
    with pytest.raises(LockedError, match="exists already"):
        of("bad.txt")


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    for out in (tmp_path / "a.txt" / "tok", Path("/proc/tok")):
        with pytest.raises(StorageError, match=r"^--out .*tok cannot be created \(.*\); give another folder"):
            train_tokenizer(wanted(tmp_path, "byte_bpe", out=out), lambda _: None)


def test_no_tokenizer_that_changes_text_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_training, "HARD", ("a\u2581b", "c"))
    with pytest.raises(DataError, match=r"1 of .* change if(.|\n)*becomes 'a b'"):
        train_tokenizer(wanted(tmp_path, "bpe"), lambda _: None)
    assert not (tmp_path / "bpe").exists()
