"""Whether a reference from another checkpoint reads the policy's tokens: takes its folder or hub id and the
policy's tokenizer. Stops a run whose reference would score other text than the policy."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dsft.data.tokenizer.load import load_tokenizer
from dsft.errors import MissingInputError, Problem, SpecError

SHOWN = 3  # tokens that a message names


def same_tokens(name: str, policy: PreTrainedTokenizerBase) -> str:
    """name: dpo.reference_model. A line that says how its own tokenizer and the policy's agree.

    Raises SpecError where a token of the policy's has another id there, or where none is there. Some that are
    not there (model.add_tokens) are told: the reference has learned nothing of them.
    """
    try:
        theirs = load_tokenizer(name).get_vocab()
    except MissingInputError:
        return "tokens: it has no tokenizer of its own to compare with, and reads the policy's tokens"
    ours = policy.get_vocab()
    moved = [token for token, number in ours.items() if theirs.get(token, number) != number]
    lacking = [token for token in ours if token not in theirs]
    if moved or len(lacking) == len(ours):
        raise _other(name, len(ours), len(moved) + len(lacking), [(t, ours[t], theirs[t]) for t in moved])
    if lacking:
        return (
            f"tokens: the policy's, but {len(lacking):,} that it has learned nothing of "
            f"({', '.join(map(repr, lacking[:SHOWN]))}{', …' if len(lacking) > SHOWN else ''})"
        )
    return f"tokens: the policy's, all {len(ours):,} under the same ids"


def _other(name: str, total: int, others: int, moved: list[tuple[str, int, int]]) -> SpecError:
    """moved: tokens, their ids, and those that they have in the reference."""
    named = "".join(f"; {token!r} is {ours} and there {theirs}" for token, ours, theirs in moved[:SHOWN])
    message = (
        f"{name!r} has another tokenizer than the policy: {others:,} of the policy's {total:,} tokens are "
        f"not what they are there{named}; name a reference that reads the same tokens"
    )
    return SpecError("The reference cannot be computed.", [Problem("dpo.reference_model", message)])
