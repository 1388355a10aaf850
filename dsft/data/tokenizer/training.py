"""The command `dsft tokenizer train`: train a tokenizer on text files and write it as a Hugging Face folder.

The files are read once. Before the folder is written, held-out lines and some hard texts are encoded and
decoded, and all must come back unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from dsft.data.formats.convert import file_rows
from dsft.data.read.files import DataFile, data_files, file_notes
from dsft.data.rows import MAX_SHOWN, Sample, Text, data_error
from dsft.data.tokenizer.load import MODEL_FILE, PAD_TOKEN, TURN_END_TOKEN, TURN_START_TOKEN, chatml_tokenizer
from dsft.errors import DataError, LockedError, Problem, SpecError, StorageError
from dsft.spec.schema import Source

KINDS = ("unigram", "bpe", "byte_bpe")
UNKNOWN_TOKEN = "<unk>"
SPACE = "\u2581"
HELD_OUT = 1000
"""Maximum number of held-out lines; it is also limited to a twentieth of all lines."""
MAX_LINE = 1 << 24  # bytes; sentencepiece skips longer lines
THREADS = 8
"""Number of threads, the same on every machine because sentencepiece's sums depend on it."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""cl100k's pattern (https://github.com/openai/tiktoken): words with the space before them, digits in groups
of three, the rest."""
HARD = (
    "", " ", "  two  spaces ", "\n", "\r\n\r\n", "\ttab\t", "a\n\n\n  b\n", "\u00a0\u3000\u2003",
    "e\u0301 \u00e9 \ufb01 \u00bd \uff21", "\u65e5\u672c\u8a9e\u3002", "\u0627\u0644\u0639\u0631",
    "\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467", "\U00020000\U0010ffff",
    "\ufeff\u200b\ufffd\u0001", "<0x41> <unk> </s> [INST]", "if (x<=3) {\n\treturn x**2;  // ok\n}\n",
)  # fmt: skip
"""Texts for the round trip that the files may not have: white space, line breaks, scripts, emoji, and text
that looks like a token."""


@dataclass(frozen=True)
class TokenizerOptions:
    """The tokenizer to train. model: one of KINDS; special: special tokens besides those of the chat
    template; sample_mb: most text to train on, in 10^6 bytes."""

    files: Sequence[str]
    out: Path
    vocab_size: int
    model: str
    character_coverage: float = 0.9995
    special: Sequence[str] = ()
    sample_mb: float = 200.0


def train_tokenizer(options: TokenizerOptions, log: Callable[[str], None]) -> None:
    """Train a tokenizer, write its folder and report progress.

    Raises LockedError if the folder exists, MissingInputError for missing files, DataError for lines that are
    not text or do not come back from their ids, SpecError for options that are refused.
    """
    if options.model not in KINDS:
        raise _refused("--model", f"{options.model!r} is not supported; choose {', '.join(KINDS)}")
    if options.out.exists():
        raise LockedError(f"--out {options.out} exists already; give another folder.")
    held_out, texts = _texts(options, log)
    log(f"training {options.vocab_size:,} tokens ({options.model})")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=f"{options.out.name}.tmp-", dir=options.out.parent))
    except OSError as error:
        raise StorageError(
            f"--out {options.out} cannot be created ({error.strerror}); give another folder."
        ) from None
    try:
        tokenizer = (_byte_bpe if options.model == "byte_bpe" else _sentencepiece)(texts, options, folder)
        for line in check(tokenizer, held_out, options):
            log(line)
        tokenizer.save_pretrained(folder)
        folder.chmod(0o755)
        folder.rename(options.out)
    except OSError as error:
        raise StorageError(f"{options.out} cannot be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log(f"{options.out}: {options.vocab_size:,} tokens, for AutoTokenizer and dsft")
    log(f"to train a model: model: {{tokenizer: {options.out}, from_config: {{model_type: llama, …}}}}")


def _refused(option: str, reason: str) -> SpecError:
    return SpecError("The tokenizer cannot be trained.", [Problem(option, reason)])


def _texts(options: TokenizerOptions, log: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Return the held-out texts and those to train on: every second, fourth, … of too many lines.

    Raises DataError for lines that are not text, or if there is no text at all.
    """
    problems: list[Problem] = []
    texts: list[str] = []
    lines = total = used = mistakes = 0
    step = 1
    files = [file for name in options.files for file in data_files(name)]
    for note in (note for file in files for note in file_notes(file)):
        log(note)
    for where, text, mistake in _lines(files):
        if mistake is None and options.model != "byte_bpe" and SPACE in text:
            mistake = "U+2581 is sentencepiece's sign for a space and would become one; use --model byte_bpe"
        if mistake is not None:
            mistakes += 1
            problems += [Problem(where, mistake)] * (mistakes <= MAX_SHOWN)
            continue
        texts += [text] * (lines % step == 0)
        used += len(text.encode()) * (lines % step == 0)
        total += len(text.encode())
        lines += 1
        if used > options.sample_mb * 1e6 and len(texts) > 1:
            texts, step = texts[::2], 2 * step
            used = sum(len(one.encode()) for one in texts)
    if problems:
        raise data_error(problems, f"{mistakes:,} mistake{'s' * (mistakes > 1)} in the data:", mistakes)
    if not lines:
        blank = Problem(", ".join(options.files), "every line is blank; give files with text")
        raise DataError("There is no text to train on.", [blank])
    number = "1 file" if len(files) == 1 else f"{len(files):,} files"
    log(f"{lines:,} lines of {total:,} bytes in {number}" + (f"; 1 of {step} is used" if step > 1 else ""))
    held_out = set(texts[19::20][:HELD_OUT])
    return sorted(held_out), [text for text in texts if text not in held_out]


def _lines(files: Sequence[DataFile]) -> Iterator[tuple[str, str, str | None]]:
    """Yield ("file:line", text, mistake) of each line that is not blank. Rows are converted as in training;
    the turns of a conversation are joined by line breaks."""
    for file in files:
        for place, row, mistake in file_rows(file, Source(path=file.name), ("sft",)):
            yield place, "" if row is None else _text(row.samples[0]), mistake or None


def _text(sample: Sample) -> str:
    if isinstance(sample, Text):
        return "".join(text for text, _ in sample.parts)
    contents = [message.get("content") for message in sample.messages]
    return "\n".join(content for content in contents if isinstance(content, str))


def _sentencepiece(texts: Sequence[str], options: TokenizerOptions, folder: Path) -> Any:
    """Train a sentencepiece model and convert it. The model file is also written to the folder."""
    import sentencepiece

    from dsft.data.tokenizer.spm import converted, parse

    model = BytesIO()
    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, model_type=options.model,
            vocab_size=options.vocab_size, character_coverage=options.character_coverage, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=True, max_sentence_length=MAX_LINE, num_threads=THREADS,
            unk_id=0, unk_piece=UNKNOWN_TOKEN, pad_id=1, pad_piece=PAD_TOKEN, eos_id=2,
            eos_piece=TURN_END_TOKEN, bos_id=-1, minloglevel=2,
            control_symbols=list(dict.fromkeys((TURN_START_TOKEN, *options.special))),
        )  # fmt: skip
    except (
        RuntimeError,
        OSError,
    ) as error:  # OSError: of its own, for a character coverage outside of 0.98 to 1
        reason = " ".join(str(error).split()).rpartition("] ")[2]
        raise _refused(
            "--vocab_size", f"{options.vocab_size:,} is refused by sentencepiece: {reason}"
        ) from None
    (folder / MODEL_FILE).write_bytes(model.getvalue())
    more: dict[str, Any] = {"unk_token": UNKNOWN_TOKEN, "add_prefix_space": False}  # the latter for llama.cpp
    return chatml_tokenizer(converted(parse(model.getvalue())), options.special, **more)


def _byte_bpe(texts: Sequence[str], options: TokenizerOptions, folder: Path) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend: Any = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    special = dict.fromkeys((PAD_TOKEN, TURN_END_TOKEN, TURN_START_TOKEN, *options.special))
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size()
    if found < options.vocab_size:
        reason = f"more than this text allows; give {found:,} or less, or add text"
        raise _refused("--vocab_size", f"{options.vocab_size:,} is {reason}")
    if found > options.vocab_size:
        reason = f"less than the 256 bytes and the special tokens; give {found:,} or more"
        raise _refused("--vocab_size", f"{options.vocab_size:,} is {reason}")
    return chatml_tokenizer(backend, options.special)


def check(tokenizer: Any, held_out: Sequence[str], options: TokenizerOptions) -> Iterator[str]:
    """Yield a line on compression and one on the round trip. Raises DataError if a text does not come back
    from its ids unchanged."""
    texts = [*held_out, *HARD, *([SPACE] if options.model == "byte_bpe" else [])]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if held_out:
        size, tokens = sum(len(text.encode()) for text in held_out), sum(map(len, ids[: len(held_out)]))
        yield f"{len(held_out):,} held-out lines: {size / max(tokens, 1):.2f} bytes per token"
    lost = [(text, new) for text, new in zip(texts, map(tokenizer.decode, ids), strict=True) if text != new]
    if lost:
        raise DataError(
            f"{len(lost):,} of {len(texts):,} texts change if converted to ids and back; the tokenizer is "
            "not written; use --model byte_bpe, which preserves every text:",
            [Problem(repr(text[:60]), f"becomes {new[:60]!r}") for text, new in lost[:3]],
        )
    yield f"text to ids and back: all of {len(texts):,} texts are unchanged, difficult ones included"
