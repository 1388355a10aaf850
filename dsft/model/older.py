"""Bridge differences between the pinned transformers and older releases.

Each function has the signature and result of the newest release, and says which releases it serves. Once the
range of pyproject.toml begins after them, callers call transformers directly and the function goes.
`dsft.data.render.older` does the same for chat templates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enable activation checkpointing, without re-entrant autograd. Before 5.23 the method was
    `gradient_checkpointing_enable`, which is deprecated from 5.23 on."""
    newest = getattr(model, "activation_checkpointing_enable", None)
    (newest or model.gradient_checkpointing_enable)({"use_reentrant": False})


def can_use_sdpa(model: PreTrainedModel | type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Return whether SDPA computes what the architecture does. Before 5.21 transformers claims so for Gemma 2
    and VaultGemma too, although SDPA omits their soft-cap on the scores."""
    return bool(model._supports_sdpa) and getattr(config, "attn_logit_softcapping", None) is None
