"""The command `dsft tokenizer train`: train a tokenizer on text files and write it as a Hugging Face folder.

The files are read twice, line by line: first to count lines, find every mistake and choose the held-out
lines; then to train, on a sample if there is more text than that. Before the folder is written, the held-out
lines and some hard texts are encoded and decoded, and all must come back unchanged.
"""

from __future__ import annotations

import hashlib
import heapq
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal

from dsft.data.formats import Format, choose, convert
from dsft.data.read.files import DataFile, blocks, data_files, file_notes, read_block
from dsft.data.render.template import named_template
from dsft.data.rows import BadRowError, Line, Text, data_error
from dsft.data.tokenizer.load import PAD_TOKEN, TURN_END_TOKEN, TURN_START_TOKEN, num_ids
from dsft.data.tokenizer.spm import MODEL_FILE, converted, parse
from dsft.errors import DataError, LockedError, Problem, SpecError, StorageError
from dsft.spec.schema import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["unigram", "bpe", "byte_bpe"]
KINDS: tuple[Kind, ...] = ("unigram", "bpe", "byte_bpe")
UNKNOWN_TOKEN = "<unk>"
SPACE = "\u2581"
HELD_OUT = 1000
"""Maximum number of held-out lines; it is also limited to a twentieth of all lines."""
LONGEST = 10_000
"""Maximum characters of a held-out line."""
PIECE = 2000
"""Characters of the pieces that longer lines are split into, since sentencepiece skips long lines."""
THREADS = 8
"""Number of threads, the same on every machine because sentencepiece's sums depend on it."""
FIRST = 100
"""Rows from which a file's format is detected."""
SHOWN = 3

# cl100k's pattern (https://github.com/openai/tiktoken): words with the space before them, digits in groups of
# three, the rest.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

HARD = (
    "", " ", "  two  spaces ", "\n", "\r\n\r\n", "\ttab\t", "a\n\n\n  b\n", "\u00a0\u3000\u2003",
    "e\u0301 \u00e9 \ufb01 \u00bd \uff21", "\u65e5\u672c\u8a9e\u3002", "\u0627\u0644\u0639\u0631",
    "\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467", "\U00020000\U0010ffff",
    "\ufeff\u200b\ufffd\u0001", "<0x41> <unk> </s> [INST]", "if (x<=3) {\n\treturn x**2;  // ok\n}\n",
    "3.14159265, 1,000,000",
)  # fmt: skip
"""Texts for the round trip that the files may not have: white space, line breaks, scripts, emoji, and text
that looks like a token."""


@dataclass(frozen=True)
class TokenizerOptions:
    """The tokenizer to train. special: special tokens besides those of the chat template; sample_mb: text to
    train on, in 10^6 bytes."""

    files: Sequence[str]
    out: Path
    vocab_size: int
    model: Kind
    character_coverage: float = 0.9995
    special: Sequence[str] = ()
    sample_mb: float = 200.0
    seed: int = 0

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((PAD_TOKEN, TURN_END_TOKEN, TURN_START_TOKEN, *self.special)))


@dataclass(frozen=True)
class TextCounts:
    """The counts of the files. held_out: the held-out lines; limit: the largest of their hashes, or -1."""

    lines: int
    num_bytes: int
    held_out: tuple[str, ...]
    limit: int


def train_tokenizer(wanted: TokenizerOptions, say: Callable[[str], None]) -> None:
    """Train a tokenizer, write its folder and report progress.

    Raises LockedError if the folder exists, MissingInputError for missing files, DataError for lines that are
    not text or do not come back from their ids, SpecError for a vocabulary size that this text does not
    allow.
    """
    _check(wanted)
    files = [file for name in wanted.files for file in data_files(name)]
    counted = count(files, wanted, say)
    share = min(1.0, wanted.sample_mb * 1e6 / max(counted.num_bytes, 1))
    part = "" if share == 1 else f", {share:.1%} of them learned from"
    number = "1 file" if len(files) == 1 else f"{len(files):,} files"
    say(f"{counted.lines:,} lines of {counted.num_bytes:,} bytes in {number}{part}")
    say(f"learning {wanted.vocab_size:,} tokens ({wanted.model})")
    began = time.monotonic()
    texts = _learned(files, wanted, counted, share)
    aside = _aside(wanted.out)
    try:
        tokenizer = (
            _byte_bpe(texts, wanted) if wanted.model == "byte_bpe" else _sentencepiece(texts, wanted, aside)
        )
        say(f"learned in {time.monotonic() - began:.1f} s")
        for line in check(tokenizer, counted.held_out, wanted):
            say(line)
        tokenizer.save_pretrained(aside)
        aside.chmod(0o755)
        aside.rename(wanted.out)
    except OSError as error:
        raise StorageError(f"{wanted.out} cannot be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    say(f"{wanted.out}: {num_ids(tokenizer):,} tokens, for AutoTokenizer and dsft")
    say(f"train a model with it: model: {{tokenizer: {wanted.out}, from_config: {{model_type: llama, …}}}}")


def kind_named(name: str) -> Kind:
    """Return the kind of that name. Raises SpecError for an unknown name."""
    for kind in KINDS:
        if kind == name:
            return kind
    message = f"{name!r} is none; give {', '.join(KINDS)}"
    raise SpecError("No tokenizer can be made.", [Problem("--model", message)])


def _check(wanted: TokenizerOptions) -> None:
    if wanted.out.exists():
        raise LockedError(f"--out {wanted.out} is there already; give another folder.")
    if not 0.9 <= wanted.character_coverage <= 1:
        message = f"{wanted.character_coverage} is no share of characters; give 0.98 to 1"
        raise SpecError("No tokenizer can be made.", [Problem("--character_coverage", message)])
    if "" in wanted.special:
        raise SpecError("No tokenizer can be made.", [Problem("--special", "the name is empty; give one")])
    least = 256 + len(wanted.special_tokens) + (wanted.model != "byte_bpe")
    if wanted.vocab_size < least:
        raise _wrong_size(wanted, f"less than the 256 bytes and the special tokens; give {least:,} or more")


def _wrong_size(wanted: TokenizerOptions, why: str) -> SpecError:
    message = f"{wanted.vocab_size:,} is {why}"
    return SpecError("No tokenizer of this size can be made.", [Problem("--vocab_size", message)])


def _aside(out: Path) -> Path:
    """Create a temporary folder beside `out`. Raises StorageError if that fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix=f"{out.name}.tmp-", dir=out.parent))
    except OSError as error:
        raise StorageError(f"--out {out} cannot be made ({error.strerror}); give another folder.") from None


# --- reading ------------------------------------------------------------------------------------------------


def count(files: Sequence[DataFile], wanted: TokenizerOptions, say: Callable[[str], None]) -> TextCounts:
    """Count the text and choose the held-out lines, those with the smallest hashes. Raises DataError for
    lines that are not text, or if there is no text at all."""
    lines = num_bytes = mistakes = 0
    problems: list[Problem] = []
    drawn: list[tuple[int, str]] = []  # a heap of the smallest hashes, negated
    told = time.monotonic()
    for note in (note for file in files for note in file_notes(file)):
        say(note)
    for where, text, mistake in _lines(files):
        if mistake is None and wanted.model != "byte_bpe" and SPACE in text:
            mistake = (
                "U+2581 is sentencepiece's sign for a space and would come back as one; use --model byte_bpe"
            )
        if mistake is not None:
            mistakes += 1
            problems += [Problem(where, mistake)] if len(problems) < 20 else []
            continue
        lines, num_bytes = lines + 1, num_bytes + len(text.encode())
        if len(text) <= LONGEST:
            push = heapq.heappush if len(drawn) < HELD_OUT else heapq.heappushpop
            push(drawn, (-_hash(text), text))
        if time.monotonic() - told >= 10:
            told = time.monotonic()
            say(f"{lines:,} lines of {num_bytes:,} bytes are read")
    if problems:
        raise data_error(problems, "mistake in the data", "mistakes in the data", mistakes)
    if not lines:
        raise DataError(
            "There is no text to learn from.",
            [Problem(", ".join(wanted.files), "every line is blank; give files with text")],
        )
    smallest = sorted(drawn, reverse=True)[: lines // 20]
    return TextCounts(
        lines, num_bytes, tuple(text for _, text in smallest), -smallest[-1][0] if smallest else -1
    )


def _lines(files: Sequence[DataFile]) -> Iterator[tuple[str, str, str | None]]:
    """Yield ("file:line", text, mistake) for each line that is not blank. Rows are converted as
    in training."""
    for file in files:
        before, found = 0, _format(file)
        for block in blocks(file):
            number = 0
            for line in read_block(block):
                number = line.number
                if line.row is not None or line.mistake is not None:
                    yield f"{file.name}:{before + number}", *_text(line, found)
            before += number


def _format(file: DataFile) -> Format | str:
    """Return the format of a file, detected from its first rows, or the reason why there is none."""
    rows = (line for block in blocks(file) for line in read_block(block) if line.row is not None)
    first = list(islice(rows, FIRST))
    try:
        return choose(Source(path=file.name), first, "sft") if first else "no row can be read"
    except BadRowError as error:
        return str(error)


def _text(line: Line, found: Format | str) -> tuple[str, str | None]:
    """Return the text of a row, (text, None), or the reason why it has none, ("", reason). A conversation's
    turns are joined by line breaks."""
    if line.mistake is not None or line.row is None:
        return "", line.mistake
    if isinstance(found, str):
        return "", found
    try:
        (sample, *_) = convert(line.row, found).samples
    except BadRowError as error:
        return "", str(error)
    if isinstance(sample, Text):
        return "".join(text for text, _ in sample.parts), None
    said = [message.get("content") for message in sample.messages]
    return "\n".join(content for content in said if isinstance(content, str)), None


def _learned(
    files: Sequence[DataFile], wanted: TokenizerOptions, counted: TextCounts, share: float
) -> Iterator[str]:
    """Yield all lines except the held-out ones, or a uniform sample of them, in pieces."""
    for _, text, _ in _lines(files):
        value = _hash(text)
        is_drawn = share == 1 or _hash(f"{wanted.seed}/{value}") < share * 2**64
        if value > counted.limit and is_drawn:
            yield from _pieces(text)


def _pieces(text: str) -> Iterator[str]:
    """Split a text into pieces of at most PIECE characters, before a space if possible."""
    start = 0
    while len(text) - start > PIECE:
        cut = text.rfind(" ", start + 1, start + PIECE)
        stop = cut if cut > 0 else start + PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# --- learning -----------------------------------------------------------------------------------------------


def _sentencepiece(texts: Iterator[str], wanted: TokenizerOptions, folder: Path) -> PreTrainedTokenizerBase:
    """Train a sentencepiece model and convert it. The model file is also written to the folder."""
    import sentencepiece

    model = BytesIO()
    sentencepiece.set_random_generator_seed(wanted.seed)
    _, _, *control = wanted.special_tokens
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=model, model_type=wanted.model,
            vocab_size=wanted.vocab_size, character_coverage=wanted.character_coverage, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=True, max_sentence_length=4 * PIECE + 8, num_threads=THREADS,
            unk_id=0, unk_piece=UNKNOWN_TOKEN, pad_id=1, pad_piece=PAD_TOKEN, eos_id=2,
            eos_piece=TURN_END_TOKEN, bos_id=-1, control_symbols=list(control), minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise _refused(wanted, str(error)) from None
    (folder / MODEL_FILE).write_bytes(model.getvalue())
    return _wrapped(converted(parse(model.getvalue())), wanted, unk_token=UNKNOWN_TOKEN)


def _refused(wanted: TokenizerOptions, message: str) -> SpecError:
    """Return the error for sentencepiece's message, in one sentence."""
    if found := re.search(r"too high .*<= (\d+)", message):
        return _wrong_size(wanted, f"more than this text gives; give {int(found[1]):,} or less, or more text")
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return _wrong_size(
            wanted,
            f"less than the bytes and characters of this text need; give {int(found[1]):,} or more, or a "
            "smaller --character_coverage",
        )
    reason = " ".join(message.split())
    return SpecError("No tokenizer can be made.", [Problem("sentencepiece", f"refuses the text: {reason}")])


def _byte_bpe(texts: Iterator[str], wanted: TokenizerOptions) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in wanted.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size()
    if found < wanted.vocab_size:
        raise _wrong_size(wanted, f"more than this text gives; give {found:,} or less, or more text")
    return _wrapped(backend, wanted)


def _wrapped(backend: Any, wanted: TokenizerOptions, **special: str) -> PreTrainedTokenizerBase:
    """Return a transformers tokenizer with dsft's chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_class: Any = PreTrainedTokenizerFast
    return tokenizer_class(  # type: ignore[no-any-return]
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=TURN_END_TOKEN,
        additional_special_tokens=[TURN_START_TOKEN, *wanted.special],
        chat_template=named_template("chatml"),
        clean_up_tokenization_spaces=False,
        **special,
    )


# --- what came of it ----------------------------------------------------------------------------------------


def check(tokenizer: Any, held_out: Sequence[str], wanted: TokenizerOptions) -> Iterator[str]:
    """Yield a line on compression and one on the round trip. Raises DataError if a text does not come back
    from its ids unchanged."""
    texts = [*held_out, "\n".join(held_out), *HARD]
    if wanted.model == "byte_bpe":
        texts.append(SPACE)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    back = [tokenizer.decode(one) for one in ids]
    lost = [(text, came) for text, came in zip(texts, back, strict=True) if text != came]
    share = 1 - len(lost) / len(texts)
    if held_out:
        size, tokens = sum(len(text.encode()) for text in held_out), sum(map(len, ids[: len(held_out)]))
        yield f"{len(held_out):,} held-out lines: {size / max(tokens, 1):.2f} bytes per token"
    if lost:
        shown = [Problem(repr(text[:60]), f"came back as {came[:60]!r}") for text, came in lost[:SHOWN]]
        raise DataError(
            f"{len(lost):,} of {len(texts):,} texts ({1 - share:.2%}) do not come back from their ids, so no "
            "folder is written; use --model byte_bpe, which keeps every text:",
            shown,
        )
    yield f"text to ids and back: {share:.0%} of {len(texts):,} texts are as they were, hard ones among them"
