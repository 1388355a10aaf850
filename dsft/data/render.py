"""From rows to tokens, and which of them are trained on.

Takes samples and a tokenizer. Gives token ids and a mask of the same length, or why there are none. Touches
nothing.

A row is made tokens of once. That a prefix of its text becomes a prefix of its tokens is proved on these:
added tokens (`<|im_start|>`, …) split a text before anything else looks at it, so all that stands before the
last of them is the same in row and prefix, and only what follows it is made tokens of again (`_Tokens.cut`).
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from dsft.data.masks import Marked, Masks, TrainOn
from dsft.data.rows import BadRowError, Conversation, Rendered, Sample, Text
from dsft.data.template import template_of
from dsft.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1000  # rows tokenised in one call
_REMEMBERED = 10_000  # ends of prompts and their tokens
_MERGED = (
    "{name}: the tokenizer makes one token of its first or last characters and what the template writes "
    "beside them, which the model would never be given; let the content not begin with white space"
)
_PROMPT_MERGED = (
    "the tokenizer makes one token of the prompt's last characters and the completion's first, which the "
    "model would never be given; move the white space between them to the completion's start"
)


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its chat template, or with `template` in its place. Can be sent to another process.

    digest: of all that decides which tokens a row becomes."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    train_on: TrainOn = "assistant"

    @cached_property
    def digest(self) -> str:
        import jinja2
        import tokenizers
        import transformers

        tokenizer: Any = self.tokenizer
        said = [
            _tokenizer_text(tokenizer),
            type(tokenizer).__name__,
            tokenizer.special_tokens_map,
            self.template if self.template is not None else tokenizer.chat_template,
            self.train_on,
            tokenizers.__version__,
            transformers.__version__,
            jinja2.__version__,
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()

    def render(self, samples: Sequence[Sample]) -> list[Rendered | str]:
        """Of each sample its tokens, or why there are none.

        Raises DataError where the tokenizer has no template that can be used, or no token that ends a text.
        """
        rendered: list[Rendered | str] = []
        for start in range(0, len(samples), _BATCH):
            rendered += self._batch(samples[start : start + _BATCH])
        return rendered

    def _batch(self, samples: Sequence[Sample]) -> list[Rendered | str]:
        rendered: list[Rendered | str] = [""] * len(samples)
        texts = [i for i, sample in enumerate(samples) if isinstance(sample, Text)]
        talks: list[tuple[int, Marked]] = []
        for i, sample in enumerate(samples):
            if isinstance(sample, Conversation):
                try:
                    talks.append((i, self._masks(bool(sample.tools)).of(sample)))
                except BadRowError as error:
                    rendered[i] = str(error)
        found = _texts([cast(Text, samples[i]) for i in texts], self.tokenizer)
        made = self._tokens.conversations([marked for _, marked in talks])
        for i, one in [*zip(texts, found, strict=True), *zip([i for i, _ in talks], made, strict=True)]:
            rendered[i] = one
        return rendered

    def _masks(self, tools: bool) -> Masks:
        return self._with_tools if tools else self._without_tools

    @cached_property
    def _with_tools(self) -> Masks:
        return self._masks_of(tools=True)

    @cached_property
    def _without_tools(self) -> Masks:
        return self._masks_of(tools=False)

    def _masks_of(self, *, tools: bool) -> Masks:
        template = template_of(self.tokenizer, self.template, tools=tools)
        return Masks(template, self.train_on, frozenset(self._tokens.names))

    @cached_property
    def _tokens(self) -> _Tokens:
        return _Tokens(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        """What was made of these stays here: compiled templates and patterns cannot be sent."""
        return {name: getattr(self, name) for name in ("tokenizer", "template", "train_on")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _tokenizer_text(tokenizer: Any) -> Any:
    """All that a tokenizer is, as text."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    return [tokenizer.get_vocab(), added, tokenizer.init_kwargs]


# --- texts ------------------------------------------------------------------------------------------------


def _texts(samples: Sequence[Text], tokenizer: PreTrainedTokenizerBase) -> list[Rendered | str]:
    """What the tokenizer makes of the text, and the end of text. The first token has nothing before it to be
    predicted from, so it is no target whatever its mask says."""
    if samples and tokenizer.eos_token_id is None:
        problem = Problem("tokenizer", "has no end-of-text token (eos_token), and every text ends with it")
        raise DataError("text rows cannot be made tokens of:", [problem])
    whole = _tokenize(["".join(part for part, _ in sample.parts) for sample in samples], tokenizer)
    return [_text(sample, ids, tokenizer) for sample, ids in zip(samples, whole, strict=True)]


def _text(sample: Text, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Rendered | str:
    said = "".join(part for part, _ in sample.parts)
    trained = np.ones(len(ids) + 1, dtype=np.bool_)
    start = position = 0
    for i, (part, is_trained) in enumerate(sample.parts):
        start, position = position, position + len(part)
        if not is_trained:
            first, stop = (_count(said[:end], ids, tokenizer) for end in (start, position))
            if first is None or stop is None:
                return _PROMPT_MERGED
            trained[first if i else 0 : stop] = False
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids, trained = ids[1:], trained[1:]  # the text brought its own
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, cast(int, tokenizer.eos_token_id)]
    return Rendered(np.array(ids, dtype=np.int32), trained[: len(ids)])


def _count(prefix: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """How many tokens of a row are those of its prefix, None where the row's do not begin with these."""
    alone = _tokenize([prefix], tokenizer)[0]
    closed = _tokenize([""], tokenizer)[0]
    while alone and closed and alone[-1] == closed[-1] == tokenizer.eos_token_id:  # it ends every text
        alone, closed = alone[:-1], closed[:-1]
    return len(alone) if ids[: len(alone)] == alone else None


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


# --- conversations ----------------------------------------------------------------------------------------


class _Tokens:
    """A tokenizer, and where in a text its added tokens stand.

    names: of its special tokens. Without a fast tokenizer each prefix is made tokens of as a whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.names = {token.content for token in added.values()} | set(tokenizer.all_special_tokens)
        self.names = {name for name in self.names if name.strip()}
        # Tokens that are looked for in the text as it is, before it is normalised: special or not.
        self._ids = {
            token.content: index
            for index, token in added.items()
            if tokenizer.is_fast and not token.normalized and not token.single_word and token.content
        }
        self._pattern = _any_of(self._ids) if self._ids else None
        self._is_added = np.zeros(max([*self._ids.values(), 0]) + 1, dtype=np.bool_)
        self._is_added[list(self._ids.values())] = True
        self._special = _any_of(self.names) if self.names else None
        self._remembered: dict[str, list[int]] = {}

    def conversations(self, rows: Sequence[Marked]) -> list[Rendered | str]:
        """A template writes the beginning-of-text token itself, so none is added."""
        whole = self._ids_of([row.text for row in rows])
        return [self._conversation(row, ids) for row, ids in zip(rows, whole, strict=True)]

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if not self._tokenizer.is_fast:
            encoded = self._tokenizer(texts, add_special_tokens=False, verbose=False)
            return [list(ids) for ids in encoded["input_ids"]]
        backend: Any = self._tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        # without offsets, which nothing here needs
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _conversation(self, row: Marked, ids: list[int]) -> Rendered | str:
        tokens = np.array(ids, dtype=np.int32)
        trained = np.full(len(ids), not row.trained)
        at = self._positions(row.text, tokens)
        for part in row.parts:
            start, stop = (self.cut(row.text, end, ids, at) for end in (part.start, part.stop))
            if start is None or stop is None:
                return _MERGED.format(name=part.name)
            trained[start:stop] = row.trained
        return Rendered(tokens, trained, self._is_ended(row))

    def _positions(self, text: str, tokens: NDArray[np.int32]) -> _Positions | None:
        """Where the added tokens stand in text and tokens; None where one was not read as itself."""
        if self._pattern is None:
            return None
        found = [(match.start(), match.end(), self._ids[match[0]]) for match in self._pattern.finditer(text)]
        small = np.minimum(tokens, len(self._is_added) - 1)
        index = np.flatnonzero(self._is_added[small] & (small == tokens))
        if tokens[index].tolist() != [token for _, _, token in found]:
            return None
        return _Positions([s for s, _, _ in found], [e for _, e, _ in found], index.tolist())

    def cut(self, text: str, end: int, ids: list[int], at: _Positions | None) -> int | None:
        """How many of a row's tokens are those of text[:end], None where the row's do not begin with them."""
        start = first = 0
        if at is not None:
            last = bisect_left(at.stops, end + 1) - 1  # the last added token in text[:end]
            if last >= 0:
                start, first = at.starts[last], at.tokens[last]
        piece = text[start:end]
        alone = self._remembered.get(piece)
        if alone is None:
            alone = self._ids_of([piece])[0] if piece else []
            if len(self._remembered) < _REMEMBERED and len(piece) < 200:
                self._remembered[piece] = alone
        stop = first + len(alone)
        return stop if ids[first:stop] == alone else None

    def _is_ended(self, row: Marked) -> bool:
        """The last part that is trained on ends with a special token, and maybe white space after it."""
        if row.trained and not row.parts:
            return False
        said = row.text[row.parts[-1].start : row.parts[-1].stop] if row.trained else row.text
        said = said.rstrip()
        return any(said.endswith(name) for name in self.names)


@dataclass(frozen=True, slots=True)
class _Positions:
    """Of added tokens: first and last characters, and their index among the row's tokens."""

    starts: list[int]
    stops: list[int]
    tokens: list[int]


def _any_of(names: Any) -> re.Pattern[str]:
    """Of several that begin at one place the longest, as the tokenizers library matches."""
    return re.compile("|".join(sorted(map(re.escape, names), key=len, reverse=True)))
