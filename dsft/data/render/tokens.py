"""Tokenize rendered texts, and map the mask from characters to tokens.

A text is tokenized once. For each border of the mask, it is checked that the tokens of text[:end] are the
first tokens of the text. Added tokens (`<|im_start|>`, …) split a text before anything else is tokenized, so
what comes before the last of them has the same tokens in the text and in text[:end]; only the piece from
there on is tokenized again. If a row's added tokens cannot all be found in its text, or the tokenizer is a
slow one, whole prefixes are tokenized.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsft.data.render.masks import MaskedText, TextSpan, any_of
from dsft.data.rows import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_CACHED = 10_000  # pieces whose tokens are cached
_SHORT = 200  # characters below which a piece is cached, such as a generation prompt
_MERGED = (
    "{name}: the tokenizer merges its first or last characters with what the chat template writes next to "
    "them into one token, which the model never gets at inference; remove white space from the start of the "
    "content, or use another chat template"
)
_PANICKED = (
    "the tokenizer fails on the row ({error}); shorten the row, or correct the pattern in tokenizer.json "
    "that takes too long for it"
)
_NOT_AS_TEXT = (
    "its contents spell {names}, which the chat template writes and this tokenizer cannot encode as plain "
    "text; remove them"
)


class TokenizerPanic(Exception):
    """The tokenizers library panicked on a text; the message is its own."""


R = TypeVar("R")


def encode_or_explain(
    encode: Callable[[Sequence[R]], list[Rendered | str]], rows: Sequence[R]
) -> list[Rendered | str]:
    """Return `encode(rows)`. If the tokenizer panics, encode row by row, and return the reason for each row
    that it panics on."""
    try:
        return encode(rows)
    except TokenizerPanic as error:
        if len(rows) == 1:
            return [_PANICKED.format(error=" ".join(str(error).split())[:200])]
    return [one for row in rows for one in encode_or_explain(encode, [row])]


class SampleEncoder:
    """A tokenizer that encodes texts and conversations. special: its special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content}
        special = {token.content for token in added.values() if token.special}
        self.special = frozenset(filter(str.strip, special | set(tokenizer.all_special_tokens)))
        self._twins: dict[frozenset[tuple[str, str]], MaskedTextEncoder | None] = {}
        self._encode = (
            _fast_encode(tokenizer.backend_tokenizer) if tokenizer.is_fast else _slow_encode(tokenizer)
        )
        # These are matched in the text before it is normalized.
        raw = {
            token.content: index
            for index, token in added.items()
            if tokenizer.is_fast and not token.normalized and not token.single_word
        }
        self._encoder = MaskedTextEncoder(self._encode, raw, self.special)

    def of_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts, with the tokens that the tokenizer itself adds around a text."""
        return self._encode(texts, True) if texts else []

    @cached_property
    def around(self) -> list[int]:
        """The tokens that the tokenizer itself adds around a text."""
        return self.of_texts([""])[0]

    def conversations(self, rows: Sequence[MaskedText]) -> list[Rendered | str]:
        """Tokenize rendered conversations. None of the tokenizer's own tokens are added around them, since a
        template writes the beginning-of-text token itself."""
        rendered = iter(self._encoder.encode([row for row in rows if not row.stand_ins]))
        return [self._as_text(row) if row.stand_ins else next(rendered) for row in rows]

    # --- contents that spell a token of the template --------------------------------------------------------

    def _as_text(self, row: MaskedText) -> Rendered | str:
        """Tokenize a row so that tokens spelled in its contents become plain text: swap the stand-ins with
        the tokens that they represent, and use a twin tokenizer, whose tokens are named by the stand-ins."""
        twin = self._twin_encoder(row.stand_ins)
        if twin is None:
            spelled = [name for name, stand_in in row.stand_ins.items() if stand_in in row.text]
            return _NOT_AS_TEXT.format(names=" and ".join(map(repr, sorted(spelled))))
        swap = {**row.stand_ins, **{stand_in: name for name, stand_in in row.stand_ins.items()}}
        pattern = any_of(swap)

        def swapped(text: str) -> str:
            return pattern.sub(lambda found: swap[found[0]], text)

        def moved(end: int) -> int:
            return len(swapped(row.text[:end]))

        spans = [TextSpan(name, moved(start), moved(stop)) for name, start, stop in row.spans]
        rendered = twin.encode([row._replace(text=swapped(row.text), spans=spans)])[0]
        return rendered if isinstance(rendered, str) else replace(rendered, spelled=True)

    def _twin_encoder(self, stand_ins: Mapping[str, str]) -> MaskedTextEncoder | None:
        """Return the encoder of the twin: the same tokenizer, in which each token that a content spells has
        the name of its stand-in and the same id. None if its tokens cannot be renamed."""
        key = frozenset(stand_ins.items())
        if key not in self._twins:
            self._twins[key] = self._build_twin(stand_ins) if self.tokenizer.is_fast else None
        return self._twins[key]

    def _build_twin(self, stand_ins: Mapping[str, str]) -> MaskedTextEncoder | None:
        from tokenizers import Tokenizer

        def renamed(name: Any) -> Any:
            return stand_ins.get(name, name)

        backend: Any = self.tokenizer.backend_tokenizer
        state = json.loads(backend.to_str())
        state["added_tokens"] = [{**one, "content": renamed(one["content"])} for one in state["added_tokens"]]
        state["post_processor"] = None  # it adds tokens by name, which is not needed here
        model = state["model"]
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            model["vocab"] = {renamed(name): index for name, index in vocab.items()}
        elif isinstance(vocab, list):  # unigram: [piece, score]
            model["vocab"] = [[renamed(piece), score] for piece, score in vocab]
        if "unk_token" in model:
            model["unk_token"] = renamed(model["unk_token"])
        try:
            twin: Any = Tokenizer.from_str(json.dumps(state))
        except Exception:  # the library raises no subclass, such as for a name that results from merges
            return None
        ids = [(backend.token_to_id(name), twin.token_to_id(new)) for name, new in stand_ins.items()]
        if any(before is None or before != after for before, after in ids):
            return None
        added = {renamed(name): index for name, index in self._encoder.added.items()}
        return MaskedTextEncoder(_fast_encode(twin), added, map(renamed, self.special))


Encode = Callable[[list[str], bool], list[list[int]]]
"""(texts, whether to add the tokens that begin and end every text) -> ids of each text."""


def _fast_encode(backend: Any) -> Encode:
    """Return an Encode that computes no offsets. It raises TokenizerPanic if one of the texts makes the
    tokenizers library panic, such as when a pattern takes too many steps on it."""

    def encode(texts: list[str], around: bool) -> list[list[int]]:
        backend.no_padding()  # both may have been set by a file, or by other code that uses the tokenizer
        backend.no_truncation()
        try:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=around)]
        except BaseException as error:  # PanicException is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerPanic(str(error)) from None

    return encode


def _slow_encode(tokenizer: PreTrainedTokenizerBase) -> Encode:
    def encode(texts: list[str], around: bool) -> list[list[int]]:
        encoded = tokenizer(texts, add_special_tokens=around, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    return encode


class _Positions(NamedTuple):
    """Where a row's added tokens are: start and stop in characters, and index among the row's tokens."""

    starts: list[int]
    stops: list[int]
    tokens: list[int]


class MaskedTextEncoder:
    """Tokenizes rendered texts.

    added  name in the text -> id, of the added tokens that split a text before it is normalized
    ends   names of the special tokens, which can end a turn
    """

    def __init__(self, encode: Encode, added: Mapping[str, int], ends: Iterable[str]) -> None:
        self._encode = encode
        self.added = added
        self._ends = tuple(ends)
        self._names = {index: name for name, index in added.items()}
        self._is_added = np.zeros(max(self._names, default=0) + 2, dtype=np.bool_)  # last: all higher ids
        self._is_added[list(self._names)] = True
        self._cached: dict[str, list[int]] = {}

    def encode(self, rows: Sequence[MaskedText]) -> list[Rendered | str]:
        def encode(some: Sequence[MaskedText]) -> list[Rendered | str]:
            whole = self._encode([row.text for row in some], False) if some else []
            return [self._row(row, ids) for row, ids in zip(some, whole, strict=True)]

        return encode_or_explain(encode, rows)

    def _row(self, row: MaskedText, ids: list[int]) -> Rendered | str:
        tokens = np.array(ids, dtype=np.int32)
        trained = np.full(len(ids), not row.trained)
        at = self._positions(row.text, tokens)
        for part in row.spans:
            start = self._prefix_length(row.text, part.start, ids, at)
            stop = self._prefix_length(row.text, part.stop, ids, at)
            if start is None or stop is None:
                return _MERGED.format(name=part.name)
            trained[start:stop] = row.trained
        return Rendered(tokens, trained, self._is_ended(row))

    def _positions(self, text: str, tokens: NDArray[np.int32]) -> _Positions | None:
        """Return where the added tokens are in the text and among the tokens; None if one is not found."""
        if not self.added:
            return None
        among = np.flatnonzero(self._is_added[np.minimum(tokens, len(self._is_added) - 1)])
        # The tokenizer matches added tokens from left to right, so each is the next occurrence of its name.
        starts, stops, end = [], [], 0
        for name in map(self._names.__getitem__, tokens[among].tolist()):
            start = text.find(name, end)
            if start < 0:
                return None
            end = start + len(name)
            starts.append(start)
            stops.append(end)
        return _Positions(starts, stops, among.tolist())

    def _prefix_length(self, text: str, end: int, ids: list[int], at: _Positions | None) -> int | None:
        """Return how many of a row's tokens are those of text[:end]; None if it does not begin with them."""
        start = first = 0
        if at is not None:
            last = bisect_right(at.stops, end) - 1  # the last added token in text[:end]
            if last >= 0:
                start, first = at.starts[last], at.tokens[last]
        piece = text[start:end]
        alone = self._cached.get(piece)
        if alone is None:
            alone = self._encode([piece], False)[0] if piece else []
            if len(piece) < _SHORT and len(self._cached) < _MAX_CACHED:
                self._cached[piece] = alone
        stop = first + len(alone)
        return stop if ids[first:stop] == alone else None

    def _is_ended(self, row: MaskedText) -> bool:
        """Return whether the last part that is trained on ends with a special token (and white space)."""
        if row.trained and not row.spans:
            return False
        last = row.text[row.spans[-1].start : row.spans[-1].stop] if row.trained else row.text
        return last.rstrip().endswith(self._ends)
