"""Whether the prompt of a preference pair is computed once for both answers: takes a spec. Pure."""

from __future__ import annotations

from dsft.spec.schema import Spec

SHARING = ("auto", "sdpa")
"""Attention under which the second answer of a packed row can look back at the prompt of the first."""


def can_share_prompts(spec: Spec) -> bool:
    return spec.task == "dpo" and spec.data.packing and spec.model.attention in SHARING


def shares_prompts(spec: Spec) -> bool:
    asked = spec.dpo.share_prompts if spec.dpo is not None else None
    return can_share_prompts(spec) and asked is not False
