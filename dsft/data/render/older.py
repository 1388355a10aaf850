"""Bridge differences of chat templates between the pinned transformers and older releases, as
`dsft.model.older` does those of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what most templates read


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
