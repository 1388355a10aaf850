"""Decode each token to its share of the text, and make text safe to show."""

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
"""Marks in text without colors: around what is trained on, and between tokens."""

SPACE, LINE_BREAK, TAB = "␣", "↵", "⇥"
_OURS = frozenset((TRAINED, END_TRAINED, BORDER, SPACE, LINE_BREAK, TAB, "⟨"))
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_SPACES = re.compile(r"^ +$| {2,}")


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a row. text: what it adds to the row's text; "" if it only begins a character, which belongs
    to the token that completes it; name: its spelling in the vocabulary."""

    id: int
    text: str
    name: str
    trained: bool
    special: bool


def tokens_of(
    input_ids: NDArray[np.int32], trained: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> list[Token]:
    """Return the tokens of a row, from ids (T,) and mask (T,)."""
    ids = input_ids.tolist()
    names = tokenizer.convert_ids_to_tokens(ids)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return [
        Token(i, text, str(name), on, i in special)
        for i, text, name, on in zip(ids, texts_of(ids, tokenizer), names, trained.tolist(), strict=True)
    ]


def texts_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what each token adds to the text, found by decoding it after its predecessors."""

    def decode(start: int, stop: int) -> str:
        given = list(ids[start:stop])
        return str(
            tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if given
            else ""
        )

    texts: list[str] = []
    start = clean = read = 0  # decode from `start`, a few tokens back; no character spans `clean`
    for stop in range(1, len(ids) + 1):
        before, text = decode(start, read), decode(start, stop)
        if text.endswith(_UNFINISHED):  # an incomplete character (1 to 3 bytes missing), or no text
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
    """Return text as `neutral` does, with signs for several spaces in a row and for a text of spaces only."""
    return _SPACES.sub(lambda found: SPACE * len(found[0]), neutral(text))


def neutral(text: str) -> str:
    """Return text in which invisible and control characters, and the characters of the marks, are written
    out, such as ⟨U+202E⟩."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == " " or (character.isprintable() and character not in _OURS):
        return character
    if character in "\n\t":
        return {"\n": LINE_BREAK, "\t": TAB}[character]
    return f"⟨U+{ord(character):04X}⟩"
