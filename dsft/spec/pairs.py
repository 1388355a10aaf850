"""How preference pairs are laid, as far as a spec tells. Pure."""

from __future__ import annotations

from dsft.spec.schema import Data, Spec

SHARING = ("auto", "sdpa")
"""Attention under which the second answer of a packed row looks back at the prompt of the first."""


def longest_example(data: Data, task: str | None) -> int:
    """In tokens; max_length is that of a row, and a preference pair has two."""
    return (2 if task == "dpo" else 1) * data.max_length


def shares_prompts(spec: Spec) -> bool:
    """The prompt of a pair is computed once for both answers."""
    asked = spec.dpo.share_prompts if spec.dpo is not None else None
    can = spec.task == "dpo" and spec.data.packing and spec.model.attention in SHARING
    return can and asked is not False
