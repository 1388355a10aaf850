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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsft.data.render.masks import MaskedText, TextSpan, any_of
from dsft.data.rows import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REMEMBERED = 10_000  # pieces whose tokens are cached
_SHORT = 200  # characters below which a piece is cached, such as a generation prompt
_MERGED = (
    "{name}: the tokenizer makes one token of its first or last characters and what the template writes "
    "beside them, which the model would never be given; let the content not begin with white space, or take "
    "a template whose prompt the tokenizer does not join with what follows"
)
_PANICKED = (
    "the tokenizer cannot read it ({error}); shorten the row, or correct the pattern in the tokenizer's "
    "tokenizer.json that takes too long for it"
)
_NOT_AS_TEXT = (
    "its contents spell {names}, which the chat template writes, and which this tokenizer cannot read as "
    "plain text; take them out"
)


class TokenizerPanic(Exception):
    """The tokenizers library panicked on a text; the message is its own."""


R = TypeVar("R")


def unpanicked(
    read: Callable[[Sequence[R]], list[Rendered | str]], rows: Sequence[R]
) -> list[Rendered | str]:
    """Return `read(rows)`. If the tokenizer panics, read row by row, and return the reason for each row that
    it panics on."""
    try:
        return read(rows)
    except TokenizerPanic as error:
        if len(rows) == 1:
            return [_PANICKED.format(error=" ".join(str(error).split())[:200])]
    return [one for row in rows for one in unpanicked(read, [row])]


class SampleEncoder:
    """A tokenizer that encodes texts and conversations. special: its special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content}
        special = {token.content for token in added.values() if token.special}
        self.special = frozenset(filter(str.strip, special | set(tokenizer.all_special_tokens)))
        self._twins: dict[frozenset[tuple[str, str]], MaskedTextEncoder | None] = {}
        self._encode = _quickly(tokenizer.backend_tokenizer) if tokenizer.is_fast else _slowly(tokenizer)
        # These are matched in the text before it is normalized.
        raw = {
            token.content: index
            for index, token in added.items()
            if tokenizer.is_fast and not token.normalized and not token.single_word
        }
        self._reader = MaskedTextEncoder(self._encode, raw, self.special)

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
        made = iter(self._reader.read([row for row in rows if not row.stand_ins]))
        return [self._as_text(row) if row.stand_ins else next(made) for row in rows]

    # --- contents that spell a token of the template --------------------------------------------------------

    def _as_text(self, row: MaskedText) -> Rendered | str:
        """Tokenize a row so that tokens spelled in its contents become plain text: swap the stand-ins with
        the tokens that they represent, and use a twin tokenizer, whose tokens are named by the stand-ins."""
        twin = self._twin(row.stand_ins)
        if twin is None:
            spelled = [name for name, stand_in in row.stand_ins.items() if stand_in in row.text]
            return _NOT_AS_TEXT.format(names=" and ".join(map(repr, sorted(spelled))))
        other = {**row.stand_ins, **{stand_in: name for name, stand_in in row.stand_ins.items()}}
        pieces, ends, shifts, position = [], [0], [0], 0
        for found in any_of(other).finditer(row.text):
            pieces += [row.text[position : found.start()], other[found[0]]]
            position = found.end()
            ends.append(position)
            shifts.append(shifts[-1] + len(other[found[0]]) - len(found[0]))
        text = "".join([*pieces, row.text[position:]])

        def moved(end: int) -> int:
            return end + shifts[bisect_right(ends, end) - 1]

        spans = [TextSpan(name, moved(start), moved(stop)) for name, start, stop in row.spans]
        made = twin.read([row._replace(text=text, spans=spans)])[0]
        return made if isinstance(made, str) else replace(made, spelled=True)

    def _twin(self, stand_ins: Mapping[str, str]) -> MaskedTextEncoder | None:
        """Return the encoder of the twin tokenizer; None if the tokenizer's tokens cannot be renamed."""
        key = frozenset(stand_ins.items())
        if key not in self._twins:
            self._twins[key] = self._made_twin(stand_ins) if self.tokenizer.is_fast else None
        return self._twins[key]

    def _made_twin(self, stand_ins: Mapping[str, str]) -> MaskedTextEncoder | None:
        from tokenizers import Tokenizer

        def renamed(name: Any) -> Any:
            return stand_ins.get(name, name)

        backend: Any = self.tokenizer.backend_tokenizer
        said = json.loads(backend.to_str())
        said["added_tokens"] = [{**one, "content": renamed(one["content"])} for one in said["added_tokens"]]
        said["post_processor"] = None  # it adds tokens by name, which is not needed here
        model = said["model"]
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            model["vocab"] = {renamed(name): index for name, index in vocab.items()}
        elif isinstance(vocab, list):  # unigram: [piece, score]
            model["vocab"] = [[renamed(piece), score] for piece, score in vocab]
        if "unk_token" in model:
            model["unk_token"] = renamed(model["unk_token"])
        try:
            twin: Any = Tokenizer.from_str(json.dumps(said))
        except Exception:  # the library raises no subclass, such as for a name that results from merges
            return None
        ids = [(backend.token_to_id(name), twin.token_to_id(new)) for name, new in stand_ins.items()]
        if any(known is None or known != found for known, found in ids):
            return None
        added = {renamed(name): index for name, index in self._reader.added.items()}
        return MaskedTextEncoder(_quickly(twin), added, map(renamed, self.special))


Encode = Callable[[list[str], bool], list[list[int]]]
"""(texts, whether to add the tokens that begin and end every text) -> ids of each text."""


def _quickly(backend: Any) -> Encode:
    """Return an Encode that computes no offsets. It raises TokenizerPanic if one of the texts makes the
    tokenizers library panic, such as when a pattern takes too many steps on it."""

    def encode(texts: list[str], around: bool) -> list[list[int]]:
        backend.no_padding()  # both may have been set by a file, or by other code that uses the tokenizer
        backend.no_truncation()
        try:
            return [made.ids for made in backend.encode_batch_fast(texts, add_special_tokens=around)]
        except BaseException as error:  # PanicException is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerPanic(str(error)) from None

    return encode


def _slowly(tokenizer: PreTrainedTokenizerBase) -> Encode:
    def encode(texts: list[str], around: bool) -> list[list[int]]:
        encoded = tokenizer(texts, add_special_tokens=around, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    return encode


@dataclass(frozen=True, slots=True)
class _Positions:
    """Where a row's added tokens are: start and stop in characters, and index among the row's tokens."""

    starts: list[int]
    stops: list[int]
    tokens: list[int]


class MaskedTextEncoder:
    """Tokenizes rendered texts.

    added  name in the text -> id, of the added tokens that split a text before it is normalized
    ends   names of the special tokens, which can end a turn
    """

    def __init__(
        self,
        encode: Encode,
        added: Mapping[str, int],
        ends: Iterable[str],
    ) -> None:
        self._encode = encode
        self.added = added
        self._ends = tuple(ends)
        self._names = {index: name for name, index in added.items()}
        self._is_added = np.zeros(max(self._names, default=0) + 2, dtype=np.bool_)  # last: all higher ids
        self._is_added[list(self._names)] = True
        self._remembered: dict[str, list[int]] = {}

    def read(self, rows: Sequence[MaskedText]) -> list[Rendered | str]:
        def read(some: Sequence[MaskedText]) -> list[Rendered | str]:
            whole = self._encode([row.text for row in some], False) if some else []
            return [self._row(row, ids) for row, ids in zip(some, whole, strict=True)]

        return unpanicked(read, rows)

    def _row(self, row: MaskedText, ids: list[int]) -> Rendered | str:
        tokens = np.array(ids, dtype=np.int32)
        trained = np.full(len(ids), not row.trained)
        at = self._positions(row.text, tokens)
        for part in row.spans:
            start = self.cut(row.text, part.start, ids, at)
            stop = self.cut(row.text, part.stop, ids, at)
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
        starts, stops, end = [], [0], 0
        for name in map(self._names.__getitem__, tokens[among].tolist()):
            start = text.find(name, end)
            if start < 0:
                return None
            end = start + len(name)
            starts.append(start)
            stops.append(end)
        return _Positions(starts, stops[1:], among.tolist())

    def cut(self, text: str, end: int, ids: list[int], at: _Positions | None) -> int | None:
        """Return how many of a row's tokens are those of text[:end]; None if it does not begin with them."""
        start = first = 0
        if at is not None:
            last = bisect_right(at.stops, end) - 1  # the last added token in text[:end]
            if last >= 0:
                start, first = at.starts[last], at.tokens[last]
        piece = text[start:end]
        alone = self._remembered.get(piece)
        if alone is None:
            alone = self._encode([piece], False)[0] if piece else []
            if len(piece) < _SHORT and len(self._remembered) < _REMEMBERED:
                self._remembered[piece] = alone
        stop = first + len(alone)
        return stop if ids[first:stop] == alone else None

    def _is_ended(self, row: MaskedText) -> bool:
        """Return whether the last part that is trained on ends with a special token (and white space)."""
        if row.trained and not row.spans:
            return False
        last = row.spans[-1] if row.trained else None
        said = (row.text[last.start : last.stop] if last else row.text).rstrip()
        return said.endswith(self._ends)
