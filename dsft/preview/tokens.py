"""The text of each token, and text that is safe to show. Takes ids and a tokenizer; touches nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED, END_TRAINED, BORDER = "⟦", "⟧", "┊"
"""Marks of a text without colours: around what is trained on, and between tokens."""

SPACE, LINE_BREAK, TAB = "␣", "↵", "⇥"
_OURS = frozenset((TRAINED, END_TRAINED, BORDER, SPACE, LINE_BREAK, TAB, "⟨"))
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_SPACES = re.compile(r"^ +$| {2,}")


@dataclass(frozen=True, slots=True)
class Token:
    """text: what the token adds to the row's text; empty where it only begins a character, which then stands
    at the token that ends it. name: as the vocabulary writes it."""

    id: int
    text: str
    name: str
    trained: bool
    special: bool


def tokens_of(
    input_ids: NDArray[np.int32], trained: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> list[Token]:
    """Each of the tokens (T,), in order."""
    ids = input_ids.tolist()
    names = tokenizer.convert_ids_to_tokens(ids)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return [
        Token(i, text, str(name), on, i in special)
        for i, text, name, on in zip(ids, texts_of(ids, tokenizer), names, trained.tolist(), strict=True)
    ]


def texts_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the text, by decoding it after the one before it."""

    def decode(start: int, stop: int) -> str:
        given = list(ids[start:stop])
        return str(
            tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if given
            else ""
        )

    texts: list[str] = []
    start = clean = read = 0  # decoding from `start` on costs no more than a few tokens; whole up to `clean`
    for stop in range(1, len(ids) + 1):
        before, text = decode(start, read), decode(start, stop)
        if text.endswith(_UNFINISHED):  # a character of which at most three bytes are missing, or no text
            ahead = range(stop + 1, min(stop + 3, len(ids)) + 1)
            if not all(decode(start, later).startswith(text) for later in ahead):
                texts.append("")
                continue
        texts.append(text[len(before) :] if text.startswith(before) else decode(stop - 1, stop))
        if not text.endswith(_UNFINISHED):
            start, clean = clean, stop
        read = stop
    return texts


def visible(text: str) -> str:
    """As `neutral`, with signs for spaces where several stand together or alone."""
    return _SPACES.sub(lambda found: SPACE * len(found[0]), neutral(text))


def neutral(text: str) -> str:
    """The text with all that does not show, or that a terminal would obey, written out, as ⟨U+202E⟩. What
    the marks are made of is written out, too."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == " " or (character.isprintable() and character not in _OURS):
        return character
    if character in "\n\t":
        return {"\n": LINE_BREAK, "\t": TAB}[character]
    return f"⟨U+{ord(character):04X}⟩"
