"""What a model asks of its attention, and is refused where a packed row would not be exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dsft.errors import DsftError

NOT_SAID = -1  # a model that hands no window over, where one without a window hands None
# What models hand to their attention that changes nothing in it here; is_causal is looked at.
HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "return_dict"})


def refuse_unknown(
    module: nn.Module,
    attention_mask: Tensor | None,
    is_told: bool,
    window: int | None,
    asked: Mapping[str, Any],
) -> None:
    """Raise DsftError where a model's attention asks more than is computed here. is_told: the segments came
    down to it; window: NOT_SAID where it hands none over; asked: the other keywords."""
    unknown = [name for name, value in asked.items() if not _is_harmless(name, value)]
    config = getattr(module, "config", None)
    if not is_told:
        reason = "hands no segments down to its attention"
    elif attention_mask is not None:
        reason = "makes a mask of its own for its attention"
    elif unknown:
        reason = f"asks {' and '.join(sorted(unknown))} of its attention"
    elif not asked.get("is_causal", getattr(module, "is_causal", True)):
        reason = "looks ahead"
    elif window == NOT_SAID and getattr(config, "sliding_window", None) is not None:
        reason = "does not tell its attention which layers have a sliding window"
    else:
        return
    raise DsftError(
        f"{type(module).__name__} {reason}, so packed rows would not be exact; set data.packing to false, or "
        "model.attention to eager, which takes the model's own masks."
    )


def _is_harmless(name: str, value: Any) -> bool:
    return name in HARMLESS or value is None or value is False
