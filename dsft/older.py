"""What releases of transformers older than the pinned one lack, or call otherwise.

Takes and gives what the newest takes and gives. Each function says which releases it serves: once the range
of pyproject.toml begins after them, its callers call transformers themselves and the function goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what most templates read


def checkpoint_activations(model: PreTrainedModel, offload: bool = False) -> None:
    """Switches activation checkpointing on, without re-entrant autograd; `offload` keeps what is saved in the
    host's memory. Before 5.23 the method was `gradient_checkpointing_enable`, which 5.23 warns of."""
    newest = getattr(model, "activation_checkpointing_enable", None)
    (newest or model.gradient_checkpointing_enable)({"use_reentrant": False}, offload=offload)


def can_use_sdpa(model: PreTrainedModel | type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether torch's attention kernel computes what the architecture does. Before 5.21 transformers says so
    of Gemma 2 and VaultGemma too, and leaves out their soft-cap on the scores."""
    return bool(model._supports_sdpa) and getattr(config, "attn_logit_softcapping", None) is None


def plain_messages(messages: list[dict[str, Any]]) -> Sequence[Any]:
    """Messages as transformers gives them to a chat template: plain data, the reasoning under each name.

    From 5.22 on by transformers' own functions. Before, 5.17 to 5.21 make no plain data, and 5.17 to 5.20 add
    no names of the reasoning: there they are added here, so that a row has the same text under every release,
    and values stay what the reader of the file made of them.
    """
    from transformers.utils import chat_template_utils as utils

    if hasattr(utils, "_plain_template_data"):
        plain: Any = utils._plain_template_data(messages)
        return list(utils._alias_reasoning_fields(plain))
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
