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
from typing import TYPE_CHECKING, Any

from dsft.data.formats import Format, choose, convert
from dsft.data.read.files import DataFile, data_files, file_lines, file_notes
from dsft.data.render.template import named_template
from dsft.data.rows import BadRowError, Line, Text, data_error
from dsft.data.tokenizer.load import PAD_TOKEN, TURN_END_TOKEN, TURN_START_TOKEN, num_ids
from dsft.data.tokenizer.spm import MODEL_FILE, converted, parse
from dsft.errors import DataError, LockedError, Problem, SpecError, StorageError
from dsft.spec.schema import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("unigram", "bpe", "byte_bpe")
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
_CANNOT = "The tokenizer cannot be trained."

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
    """The tokenizer to train. model: one of KINDS; special: special tokens besides those of the chat
    template; sample_mb: text to train on, in 10^6 bytes."""

    files: Sequence[str]
    out: Path
    vocab_size: int
    model: str
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


def train_tokenizer(options: TokenizerOptions, log: Callable[[str], None]) -> None:
    """Train a tokenizer, write its folder and report progress.

    Raises LockedError if the folder exists, MissingInputError for missing files, DataError for lines that are
    not text or do not come back from their ids, SpecError for a vocabulary size that this text does not
    allow.
    """
    _check(options)
    files = [file for name in options.files for file in data_files(name)]
    counts = count(files, options, log)
    share = min(1.0, options.sample_mb * 1e6 / max(counts.num_bytes, 1))
    part = "" if share == 1 else f", of which {share:.1%} are used"
    number = "1 file" if len(files) == 1 else f"{len(files):,} files"
    log(f"{counts.lines:,} lines of {counts.num_bytes:,} bytes in {number}{part}")
    log(f"training {options.vocab_size:,} tokens ({options.model})")
    began = time.monotonic()
    texts = _training_texts(files, options, counts, share)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(mkdtemp(prefix=f"{options.out.name}.tmp-", dir=options.out.parent))
    except OSError as error:
        raise StorageError(
            f"--out {options.out} cannot be created ({error.strerror}); give another folder."
        ) from None
    try:
        is_bytes = options.model == "byte_bpe"
        tokenizer = _byte_bpe(texts, options) if is_bytes else _sentencepiece(texts, options, temporary)
        log(f"trained in {time.monotonic() - began:.1f} s")
        for line in check(tokenizer, counts.held_out, options):
            log(line)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)
        temporary.rename(options.out)
    except OSError as error:
        raise StorageError(f"{options.out} cannot be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log(f"{options.out}: {num_ids(tokenizer):,} tokens, for AutoTokenizer and dsft")
    log(f"to train a model: model: {{tokenizer: {options.out}, from_config: {{model_type: llama, …}}}}")


def _check(options: TokenizerOptions) -> None:
    wrong: tuple[str, str] | None = None
    if options.model not in KINDS:
        wrong = "--model", f"{options.model!r} is not supported; choose {', '.join(KINDS)}"
    elif not 0.9 <= options.character_coverage <= 1:
        wrong = "--character_coverage", f"{options.character_coverage} is outside 0.9 to 1; give 0.98 to 1"
    elif "" in options.special:
        wrong = "--special", "the name is empty; give a name"
    if wrong is not None:
        raise SpecError(_CANNOT, [Problem(*wrong)])
    least = 256 + len(options.special_tokens) + (options.model != "byte_bpe")
    if options.vocab_size < least:
        raise _wrong_size(options, f"less than the 256 bytes and the special tokens; give {least:,} or more")
    if options.out.exists():
        raise LockedError(f"--out {options.out} exists already; give another folder.")


def _wrong_size(options: TokenizerOptions, why: str) -> SpecError:
    return SpecError(_CANNOT, [Problem("--vocab_size", f"{options.vocab_size:,} is {why}")])


# --- reading ------------------------------------------------------------------------------------------------


def count(files: Sequence[DataFile], options: TokenizerOptions, log: Callable[[str], None]) -> TextCounts:
    """Count the text and choose the held-out lines, those with the smallest hashes. Raises DataError for
    lines that are not text, or if there is no text at all."""
    lines = num_bytes = mistakes = 0
    problems: list[Problem] = []
    heap: list[tuple[int, str]] = []  # a heap of the smallest hashes, negated
    reported = time.monotonic()
    for note in (note for file in files for note in file_notes(file)):
        log(note)
    for where, text, mistake in _lines(files):
        if mistake is None and options.model != "byte_bpe" and SPACE in text:
            mistake = "U+2581 is sentencepiece's sign for a space and would become one; use --model byte_bpe"
        if mistake is not None:
            mistakes += 1
            problems += [Problem(where, mistake)] if len(problems) < 20 else []
            continue
        lines, num_bytes = lines + 1, num_bytes + len(text.encode())
        if len(text) <= LONGEST:
            push = heapq.heappush if len(heap) < HELD_OUT else heapq.heappushpop
            push(heap, (-_hash(text), text))
        if time.monotonic() - reported >= 10:
            reported = time.monotonic()
            log(f"read {lines:,} lines of {num_bytes:,} bytes")
    if problems:
        raise data_error(problems, f"{mistakes:,} mistake{'s' * (mistakes > 1)} in the data:", mistakes)
    if not lines:
        raise DataError(
            "There is no text to train on.",
            [Problem(", ".join(options.files), "every line is blank; give files with text")],
        )
    smallest = sorted(heap, reverse=True)[: lines // 20]
    return TextCounts(
        lines, num_bytes, tuple(text for _, text in smallest), -smallest[-1][0] if smallest else -1
    )


def _lines(files: Sequence[DataFile]) -> Iterator[tuple[str, str, str | None]]:
    """Yield ("file:line", text, mistake) for each line that is not blank. Rows are converted as
    in training."""
    for file in files:
        first = list(islice((line for line in file_lines(file) if line.row is not None), FIRST))
        try:
            format = choose(Source(path=file.name), first, "sft") if first else "no row can be read"
        except BadRowError as error:
            format = str(error)
        for line in file_lines(file):
            if line.row is not None or line.mistake is not None:
                yield f"{file.name}:{line.number}", *_text(line, format)


def _text(line: Line, format: Format | str) -> tuple[str, str | None]:
    """Return the text of a row, (text, None), or the reason why it has none, ("", reason). A conversation's
    turns are joined by line breaks."""
    if line.mistake is not None or line.row is None:
        return "", line.mistake
    if isinstance(format, str):
        return "", format
    try:
        (sample, *_) = convert(line.row, format).samples
    except BadRowError as error:
        return "", str(error)
    if isinstance(sample, Text):
        return "".join(text for text, _ in sample.parts), None
    contents = [message.get("content") for message in sample.messages]
    return "\n".join(content for content in contents if isinstance(content, str)), None


def _training_texts(
    files: Sequence[DataFile], options: TokenizerOptions, counts: TextCounts, share: float
) -> Iterator[str]:
    """Yield all lines except the held-out ones, or a uniform sample of them, in pieces."""
    for _, text, _ in _lines(files):
        value = _hash(text)
        is_sampled = share == 1 or _hash(f"{options.seed}/{value}") < share * 2**64
        if value > counts.limit and is_sampled:
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


# --- training -----------------------------------------------------------------------------------------------


def _sentencepiece(texts: Iterator[str], options: TokenizerOptions, folder: Path) -> PreTrainedTokenizerBase:
    """Train a sentencepiece model and convert it. The model file is also written to the folder."""
    import sentencepiece

    model = BytesIO()
    sentencepiece.set_random_generator_seed(options.seed)
    _, _, *control = options.special_tokens
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=model, model_type=options.model,
            vocab_size=options.vocab_size, character_coverage=options.character_coverage, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=True, max_sentence_length=4 * PIECE + 8, num_threads=THREADS,
            unk_id=0, unk_piece=UNKNOWN_TOKEN, pad_id=1, pad_piece=PAD_TOKEN, eos_id=2,
            eos_piece=TURN_END_TOKEN, bos_id=-1, control_symbols=list(control), minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise _refused(options, str(error)) from None
    (folder / MODEL_FILE).write_bytes(model.getvalue())
    return _wrapped(converted(parse(model.getvalue())), options, unk_token=UNKNOWN_TOKEN)


def _refused(options: TokenizerOptions, message: str) -> SpecError:
    """Return the error for sentencepiece's message, in one sentence."""
    if found := re.search(r"too high .*<= (\d+)", message):
        return _wrong_size(
            options, f"more than this text allows; give {int(found[1]):,} or less, or add text"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return _wrong_size(
            options,
            f"less than the bytes and characters of this text need; give {int(found[1]):,} or more, or a "
            "smaller --character_coverage",
        )
    reason = " ".join(message.split())
    return SpecError(_CANNOT, [Problem("sentencepiece", f"refuses the text: {reason}")])


def _byte_bpe(texts: Iterator[str], options: TokenizerOptions) -> PreTrainedTokenizerBase:
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
        vocab_size=options.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in options.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size()
    if found < options.vocab_size:
        raise _wrong_size(options, f"more than this text allows; give {found:,} or less, or add text")
    return _wrapped(backend, options)


def _wrapped(backend: Any, options: TokenizerOptions, **special: str) -> PreTrainedTokenizerBase:
    """Return a transformers tokenizer with dsft's chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_class: Any = PreTrainedTokenizerFast
    return tokenizer_class(  # type: ignore[no-any-return]
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=TURN_END_TOKEN,
        additional_special_tokens=[TURN_START_TOKEN, *options.special],
        chat_template=named_template("chatml"),
        clean_up_tokenization_spaces=False,
        **special,
    )


# --- the check ----------------------------------------------------------------------------------------


def check(tokenizer: Any, held_out: Sequence[str], options: TokenizerOptions) -> Iterator[str]:
    """Yield a line on compression and one on the round trip. Raises DataError if a text does not come back
    from its ids unchanged."""
    texts = [*held_out, "\n".join(held_out), *HARD]
    if options.model == "byte_bpe":
        texts.append(SPACE)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    back = [tokenizer.decode(one) for one in ids]
    lost = [(text, new) for text, new in zip(texts, back, strict=True) if text != new]
    share = 1 - len(lost) / len(texts)
    if held_out:
        size, tokens = sum(len(text.encode()) for text in held_out), sum(map(len, ids[: len(held_out)]))
        yield f"{len(held_out):,} held-out lines: {size / max(tokens, 1):.2f} bytes per token"
    if lost:
        shown = [Problem(repr(text[:60]), f"becomes {new[:60]!r}") for text, new in lost[:3]]
        raise DataError(
            f"{len(lost):,} of {len(texts):,} texts ({1 - share:.2%}) change if converted to ids and back; "
            "the tokenizer is not written; use --model byte_bpe, which preserves every text:",
            shown,
        )
    yield f"text to ids and back: {share:.0%} of {len(texts):,} texts are unchanged, difficult ones included"
