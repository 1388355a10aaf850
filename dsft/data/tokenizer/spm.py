"""Load a bare sentencepiece model (`tokenizer.model`) with the ids of sentencepiece's own encode.

A BPE model that does not normalize text is converted to a fast tokenizer. For all others sentencepiece itself
encodes, and only exports are converted, since a converted tokenizer may give other ids: for unigram models,
sentencepiece adds up scores in float32 and the tokenizers library in float64, so that they resolve ties
("--------") differently; for models that normalize, the library does so grapheme by grapheme. Special tokens
are those that the model names. The text between two special tokens is encoded like a separate text.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, SentencePieceBackend

from dsft.data.tokenizer.load import MODEL_FILE
from dsft.errors import MissingInputError

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType of sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # ModelProto.SentencePiece.Type
SPACE = "▁"


class SentencePieceTokenizer(SentencePieceBackend):  # type: ignore[misc]  # transformers is Any to mypy
    """A tokenizer whose ids and texts are sentencepiece's, between special tokens that are spelled out in the
    text. It is saved as a converted tokenizer, which transformers loads without this class. model_digest: an
    entry of `init_kwargs`, which identify a tokenizer."""

    def __init__(self, vocab_file: str, **special_tokens: Any) -> None:
        digest = hashlib.sha256(Path(vocab_file).read_bytes()).hexdigest()
        given = {"special_tokens_pattern": "none", "model_digest": digest} | special_tokens
        super().__init__(vocab_file=vocab_file, **given)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.sp_model.id_to_piece(index) for index in self.sp_model.encode(text)]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text: str = self.sp_model.decode_pieces(tokens)
        return text

    def save_pretrained(self, save_directory: Any, *_: Any, **__: Any) -> tuple[str, ...]:
        """Save the converted tokenizer, with added tokens and chat template, and the model file."""
        folder, file = Path(save_directory), Path(str(self.vocab_file))
        fast = as_fast(parse(file.read_bytes()))
        tokens, known = self.added_tokens_decoder.items(), fast.get_vocab()
        added = [token for _, token in sorted(tokens) if token.content not in known]
        fast.add_tokens([AddedToken(one.content, special=one.special, normalized=False) for one in added])
        fast.chat_template = self.chat_template
        fast.save_pretrained(folder)
        shutil.copyfile(file, folder / MODEL_FILE)
        return tuple(str(path) for path in folder.iterdir())


def load_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    """Load a sentencepiece model. Raises MissingInputError for a file that is not one, and for a kind of
    model that cannot be exported."""
    try:
        model = parse(path.read_bytes())
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MissingInputError(
            f"tokenizer {path}: this is not a sentencepiece model ({reason}); give the complete file"
        ) from None
    if reason := _unsupported(model):
        raise MissingInputError(
            f"tokenizer {path}: {reason}, which is not supported; give a folder with the tokenizer.json into "
            "which transformers converts it"
        )
    rules = model.normalizer_spec
    is_bpe = model.trainer_spec.model_type == BPE
    if is_bpe and not rules.precompiled_charsmap and not rules.remove_extra_whitespaces:
        tokenizer = as_fast(model)
        if not _differs(path, model, tokenizer):
            return tokenizer
    special = {name: None for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return SentencePieceTokenizer(vocab_file=str(path), **(special | _special_tokens(model)))


def as_fast(model: Any) -> PreTrainedTokenizerBase:
    """Return the model converted to a fast tokenizer, which transformers can load anywhere."""
    return PreTrainedTokenizerFast(
        tokenizer_object=converted(model), clean_up_tokenization_spaces=False, **_special_tokens(model)
    )


def converted(model: Any) -> Tokenizer:
    is_unigram, byte_fallback = model.trainer_spec.model_type == UNIGRAM, model.trainer_spec.byte_fallback
    symbols = sorted(pieces_of(model, USER_DEFINED), key=len, reverse=True)
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    splits: list[Any] = []
    of_model: Any
    if is_unigram:
        of_model = models.Unigram(list(_unigram_scores(model)), unknown, byte_fallback)
    else:
        ids = {piece.piece: index for index, piece in enumerate(model.pieces)}
        of_model = models.BPE(
            ids, list(_merges(model)), unk_token=model.pieces[unknown].piece, fuse_unk=True,
            byte_fallback=byte_fallback, ignore_merges=bool(symbols),
        )  # fmt: skip
        if symbols:  # each is a separate segment that is not split (ignore_merges)
            codes = ("".join(f"\\x{{{ord(character):x}}}" for character in symbol) for symbol in symbols)
            splits.append(pre_tokenizers.Split(Regex("|".join(codes)), "isolated"))
    if byte_fallback:
        # "<0x41>" spelled out is not a byte token: as a whole segment (BPE), or anywhere (unigram)
        spelled = Regex(r"<(?=0x[0-9A-F]{2}>)" if is_unigram else r"\A<(?=0x[0-9A-F]{2}>\z)")
        splits.append(pre_tokenizers.Split(spelled, "isolated"))
    backend: Any = Tokenizer(of_model)
    backend.normalizer = normalizers.Sequence(_normalizers(model))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = [decoders.Strip(" ", 1, 0)] if model.normalizer_spec.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(text + prefix)
    special = pieces_of(model, CONTROL, UNKNOWN)
    backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    return backend  # type: ignore[no-any-return]


def _normalizers(model: Any) -> list[Any]:
    """Return normalizers in the order of sentencepiece's normalizer.cc: its table, extra spaces, the dummy
    prefix, then the symbol for a space."""
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


def _merges(model: Any) -> Iterator[tuple[str, str]]:
    """Yield each merge of two pieces into a third, by descending score of the third, then by the length of
    the left piece."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    for joined in sorted(scores, key=lambda piece: -scores[piece]):
        pairs = ((joined[:cut], joined[cut:]) for cut in range(1, len(joined)))
        yield from (pair for pair in pairs if pair[0] in scores and pair[1] in scores)


def _unigram_scores(model: Any) -> Iterator[tuple[str, float]]:
    """Yield (piece, score). User-defined symbols are preferred to their parts, as in unigram_model.cc; other
    pieces that are no text have the lowest score."""
    scores = [piece.score for piece in model.pieces if piece.type == NORMAL]
    low, high = min(scores, default=0.0), max(scores, default=0.0)
    for piece in model.pieces:
        of_symbol = max(high, 0.0) * len(piece.piece) - 0.1 if piece.type == USER_DEFINED else low
        yield piece.piece, float(piece.score) if piece.type == NORMAL else of_symbol


def _special_tokens(model: Any) -> dict[str, str]:
    ids = {name: getattr(model.trainer_spec, f"{name}_id") for name in ("unk", "bos", "eos", "pad")}
    return {f"{name}_token": model.pieces[i].piece for name, i in ids.items() if 0 <= i < len(model.pieces)}


def _differs(path: Path, model: Any, tokenizer: Any) -> bool:
    """Return whether the ids of the converted tokenizer and of sentencepiece differ for a text of one or many
    pieces of the vocabulary."""
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    words = [name.replace(SPACE, " ") for name in pieces_of(model, NORMAL, USER_DEFINED)]
    texts = ["", "  <0x41> \n", *words, *(" ".join(words[i :: len(words) // 100 + 1]) for i in range(20))]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return any(own.encode(text) != found for text, found in zip(texts, ids, strict=True))


def _unsupported(model: Any) -> str | None:
    """Return why a model cannot be converted; None if it can."""
    rules = model.trainer_spec
    reasons = {
        "it is a word or character model of sentencepiece": rules.model_type not in (UNIGRAM, BPE),
        "it has spaces after words (treat_whitespace_as_suffix)": rules.treat_whitespace_as_suffix,
        "it has unused pieces": rules.model_type == BPE and pieces_of(model, UNUSED),
        "it has more or less than one piece for unknown text": len(pieces_of(model, UNKNOWN)) != 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def parse(data: bytes) -> Any:
    """Return the ModelProto of a model file. Raises ValueError if it is not one."""
    message: Any = sentencepiece_model_pb2
    try:
        model = message.ModelProto.FromString(data)
    except DecodeError as error:
        raise ValueError(error) from None
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def pieces_of(model: Any, *kinds: int) -> list[str]:
    """Return the texts of the pieces of these kinds."""
    return [piece.piece for piece in model.pieces if piece.type in kinds]
