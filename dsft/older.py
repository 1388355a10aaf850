"""Bridge differences between the pinned transformers and older releases.

Each function has the signature and result of the newest release, and says which releases it serves. Once the
range of pyproject.toml begins after them, callers call transformers directly and the function goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what most templates read


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enable activation checkpointing, without re-entrant autograd. Before 5.23 the method was
    `gradient_checkpointing_enable`, which is deprecated from 5.23 on."""
    newest = getattr(model, "activation_checkpointing_enable", None)
    (newest or model.gradient_checkpointing_enable)({"use_reentrant": False})


def can_use_sdpa(model: PreTrainedModel | type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Return whether SDPA computes what the architecture does. Before 5.21 transformers claims so for Gemma 2
    and VaultGemma too, although SDPA omits their soft-cap on the scores."""
    return bool(model._supports_sdpa) and getattr(config, "attn_logit_softcapping", None) is None


def template_messages(messages: list[dict[str, Any]]) -> Sequence[Any]:
    """Return messages as transformers passes them to a chat template: plain data, with the reasoning under
    each of its names.

    From 5.22 on transformers' own functions do this. Before, it has no function that converts to plain data,
    and only 5.21 has the one for the reasoning, which `_with_reasoning` equals; so values stay as the file's
    reader made them, and a row of strings has the same text under every release.
    """
    from transformers.utils import chat_template_utils as utils

    if hasattr(utils, "_plain_template_data"):
        plain: Any = utils._plain_template_data(messages)
        return list(utils._alias_reasoning_fields(plain))
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
