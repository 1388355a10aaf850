"""Load a bare sentencepiece model (`tokenizer.model`) as a transformers tokenizer with the ids of
sentencepiece's own encode.

A BPE model that does not normalize text is converted to a fast tokenizer. For all others, sentencepiece
itself encodes, and only exports are converted, since a converted tokenizer may give other ids: for unigram
models, sentencepiece adds up scores in float32 and the tokenizers library in float64, so that they resolve
ties ("--------") differently; for models that normalize, the library does so grapheme by grapheme. Special
tokens are those that the model names. The text between two special tokens is encoded like a separate text.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.errors import MissingInputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

MODEL_FILE = "tokenizer.model"
OTHER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
"""With one of these files beside it, a `tokenizer.model` is not bare: transformers can load the folder."""

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType of sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # ModelProto.SentencePiece.Type
SPACE = "▁"
PROBES = (
    "", " ", "  a  b ", "\n", "a\tb\r\n\n c", "Hello, world! It's 12:30.", "--------", "aaaaaaaaaaaaa",
    "ababababa", "na\u00efve \ufb01anc\u00e9e \u00bd \uff21\uff22", "\u65e5\u672c\u8a9e\u3002",
    "\u041f\u0440\u0438\u0432\u0435\u0442", "\u0627\u0644\u0639",
    "\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469", "\u00a0\u3000x", "\u2581a", "<0x41>", "x <0x0A> y",
    "e\u0301 \u200b \ufeff \ufffd", "f(x):\n    return x ** 2  # ok\n",
)  # fmt: skip
"""Texts to compare tokenizers on: ligatures, full-width letters, scripts, emoji, unusual spaces, and text
that looks like sentencepiece's own symbols."""


def bare_model(name: str | Path) -> Path | None:
    """Return the path of the bare sentencepiece model that `name` is, or that is in the folder `name` without
    any of OTHER_FILES; else None."""
    path = Path(name)
    if path.is_file() and path.suffix == ".model":
        return path
    if (path / MODEL_FILE).is_file() and not any((path / other).exists() for other in OTHER_FILES):
        return path / MODEL_FILE
    return None


def load_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    """Load a sentencepiece model. Raises MissingInputError for a file that is not one, and for a kind of
    model that cannot be exported."""
    model = _read(path)
    reason = _unsupported(model)
    if reason is not None:
        raise MissingInputError(
            f"tokenizer {path}: {reason}, which is not supported; give a folder with the tokenizer.json into "
            "which transformers converts it"
        )
    rules = model.normalizer_spec
    if _kind(model) == BPE and not rules.precompiled_charsmap and not rules.remove_extra_whitespaces:
        tokenizer = as_fast(path)
        if not _differs(path, tokenizer):
            return tokenizer
    from dsft.data.tokenizer.spm_tokenizer import SentencePieceTokenizer

    tokenizer_class: Any = SentencePieceTokenizer
    special = {name: None for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return tokenizer_class(vocab_file=str(path), **(special | _special_tokens(model)))  # type: ignore[no-any-return]


def as_fast(path: Path) -> PreTrainedTokenizerBase:
    """Return the model converted to a fast tokenizer, which transformers can load anywhere."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_class: Any = PreTrainedTokenizerFast
    model = _read(path)
    return tokenizer_class(  # type: ignore[no-any-return]
        tokenizer_object=converted(model), clean_up_tokenization_spaces=False, **_special_tokens(model)
    )


def converted(model: Any) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    symbols = sorted(pieces_of(model, USER_DEFINED), key=len, reverse=True)
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    backend: Any
    if _kind(model) == UNIGRAM:
        backend = Tokenizer(
            models.Unigram(_unigram_scores(model.pieces), unknown, model.trainer_spec.byte_fallback)
        )
    else:
        backend = Tokenizer(
            models.BPE(
                {piece.piece: index for index, piece in enumerate(model.pieces)},
                list(_merges(model.pieces)),
                unk_token=model.pieces[unknown].piece,
                fuse_unk=True,
                byte_fallback=model.trainer_spec.byte_fallback,
                ignore_merges=bool(symbols),
            )
        )
    splits: list[Any] = []
    if symbols and _kind(model) == BPE:  # each is a separate segment that is not split (ignore_merges)
        codes = ("".join(f"\\x{{{ord(character):x}}}" for character in symbol) for symbol in symbols)
        splits.append(pre_tokenizers.Split(Regex("|".join(codes)), "isolated"))
    if model.trainer_spec.byte_fallback:
        # "<0x41>" spelled out is not a byte token: as a whole segment (BPE), or anywhere (unigram)
        spelled = Regex(r"<(?=0x[0-9A-F]{2}>)" if _kind(model) == UNIGRAM else r"\A<(?=0x[0-9A-F]{2}>\z)")
        splits.append(pre_tokenizers.Split(spelled, "isolated"))
    backend.normalizer = normalizers.Sequence(_normalizers(model))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if model.normalizer_spec.add_dummy_prefix else [])
    )
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in pieces_of(model, CONTROL, UNKNOWN)]
    )
    return backend  # type: ignore[no-any-return]


def _normalizers(model: Any) -> list[Any]:
    """Return normalizers in the order of sentencepiece's normalizer.cc: its table, extra spaces, the dummy
    prefix, then the symbol for a space."""
    from tokenizers import Regex, normalizers

    rules, steps = model.normalizer_spec, list[Any]()
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE if rules.escape_whitespaces else " "))
    if rules.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return steps


def _merges(pieces: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield each merge of two pieces into a third, by descending score of the third, then by the length of
    the left piece."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    for joined in sorted(scores, key=lambda piece: -scores[piece]):
        for cut in range(1, len(joined)):
            if joined[:cut] in scores and joined[cut:] in scores:
                yield joined[:cut], joined[cut:]


def _unigram_scores(pieces: Sequence[Any]) -> list[tuple[str, float]]:
    """Return (piece, score). User-defined symbols are preferred to their parts, as in unigram_model.cc; other
    pieces that are no text have the lowest score."""
    scores = [piece.score for piece in pieces if piece.type == NORMAL]
    low, high = min(scores, default=0.0), max(scores, default=0.0)

    def score(piece: Any) -> float:
        if piece.type == NORMAL:
            return float(piece.score)
        return max(high, 0.0) * len(piece.piece) - 0.1 if piece.type == USER_DEFINED else low

    return [(piece.piece, score(piece)) for piece in pieces]


def _special_tokens(model: Any) -> dict[str, str]:
    ids = {name: getattr(model.trainer_spec, f"{name}_id") for name in ("unk", "bos", "eos", "pad")}
    return {f"{name}_token": model.pieces[i].piece for name, i in ids.items() if 0 <= i < len(model.pieces)}


def save_converted(path: Path, tokenizer: Any, folder: Path) -> None:
    """Save `tokenizer`, which calls the sentencepiece model at `path`, as a converted one that transformers
    can load, with its added tokens and chat template."""
    from tokenizers import AddedToken

    fast: Any = as_fast(path)
    added = [
        AddedToken(token.content, special=token.special, normalized=False)
        for _, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.content not in fast.get_vocab()
    ]
    fast.add_tokens(added)
    fast.chat_template = tokenizer.chat_template
    fast.save_pretrained(folder)
    shutil.copyfile(path, folder / MODEL_FILE)


def _differs(path: Path, tokenizer: Any) -> bool:
    """Return whether the ids of the converted tokenizer and of sentencepiece differ for one of many texts."""
    import sentencepiece

    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    names = [own.id_to_piece(i) for i in range(own.get_piece_size()) if not own.is_control(i)]
    words = [name.replace(SPACE, " ") for name in names if not name.startswith("<0x")]
    texts = [*PROBES, *words, *(" ".join(words[i :: len(words) // 100 + 1]) for i in range(20))]
    special = pieces_of(_read(path), CONTROL, UNKNOWN)
    plain = [text for text in texts if not any(token in text for token in special)]
    ids = tokenizer(plain, add_special_tokens=False)["input_ids"]
    return any(own.encode(text) != found for text, found in zip(plain, ids, strict=True))


def _unsupported(model: Any) -> str | None:
    """Return why a model cannot be converted; None if it can."""
    if _kind(model) not in (UNIGRAM, BPE):
        return "it is a word or character model of sentencepiece"
    if model.trainer_spec.treat_whitespace_as_suffix:
        return "it has spaces after words (treat_whitespace_as_suffix)"
    if _kind(model) == BPE and pieces_of(model, UNUSED):
        return "it has unused pieces"
    if len(pieces_of(model, UNKNOWN)) != 1:
        return "it has more or less than one piece for unknown text"
    return None


def parse(data: bytes) -> Any:
    """Return the ModelProto of a model file. Raises ValueError if it is not one."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    message: Any = sentencepiece_model_pb2
    try:
        model = message.ModelProto.FromString(data)
        if model.pieces:
            return model
    except DecodeError as error:
        raise ValueError(error) from None
    raise ValueError("it has no pieces")


def pieces_of(model: Any, *kinds: int) -> list[str]:
    """Return the texts of the pieces of these kinds."""
    return [piece.piece for piece in model.pieces if piece.type in kinds]


def _kind(model: Any) -> int:
    return int(model.trainer_spec.model_type)


def _read(path: Path) -> Any:
    try:
        return parse(path.read_bytes())
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MissingInputError(
            f"tokenizer {path}: this is not a sentencepiece model ({reason}); give the complete file"
        ) from None
