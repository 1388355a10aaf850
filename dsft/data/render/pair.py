"""Check that the two answers of a preference pair follow the same prompt tokens."""

from __future__ import annotations

import numpy as np

from dsft.data.rows import Rendered

_NO_PROMPT = (
    "the prompt is empty and the tokenizer begins no text with a token of its own, so that nothing predicts "
    "the first token of either answer; give the pair a prompt"
)
_SAME = "the chosen and the rejected answer are the same tokens, so there is nothing to prefer"
_WAY_OUT = "give data.chat_template one that writes them alike, or leave the row out"


def pair_mistake(chosen: Rendered, rejected: Rendered) -> str | None:
    """Return why the two answers cannot be compared; None if they can, or if one has no target, since such a
    pair is left out. A prompt is all tokens before the first that is trained on."""
    if not (chosen.trained[1:].any() and rejected.trained[1:].any()):
        return None
    ours, theirs = (one.input_ids[: int(np.argmax(one.trained))] for one in (chosen, rejected))
    if not len(ours) or not len(theirs):
        return _NO_PROMPT
    if np.array_equal(ours, theirs):
        return _SAME if np.array_equal(chosen.input_ids, rejected.input_ids) else None
    shorter = min(len(ours), len(theirs))
    same = int(np.argmax(np.append(ours[:shorter] != theirs[:shorter], True)))
    return (
        f"the two answers do not follow the same tokens: of {len(ours):,} before the chosen one and "
        f"{len(theirs):,} before the rejected one the first {same:,} are the same; {_WAY_OUT}"
    )
