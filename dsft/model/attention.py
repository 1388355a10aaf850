"""Attention over a packed row: each segment sees itself alone, exactly, without a mask of the whole row.

Takes a transformers model and makes its attention ask for the segments' lengths, which Policy passes as a
keyword through the model's forward. transformers' own masks for packed rows are dense, T × T for a row of T
tokens; here torch's kernel runs on each segment, and the cost is the sum of the squares of their lengths.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from dsft.errors import DsftError, Problem, SpecError

SEGMENTS = "dsft_segments"
KEYWORD = "segment_lengths"
SEEN_BY_LAYERS = frozenset({"full_attention", "sliding_attention"})  # layer types of a config that are exact
# What models hand to their attention that changes nothing in it here; is_causal is looked at.
HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "return_dict"})


# --- which models, and how they are told --------------------------------------------------------------------


def attend_per_segment(causal_lm: PreTrainedModel, attention: str, max_length: int) -> None:
    """Make packed rows exact. `attention`: the spec's model.attention; auto and sdpa take
    `segment_attention`, eager and flash keep their own, which are told or find the segments. `max_length`:
    tokens of the longest segment.

    Raises SpecError for an architecture that cannot be packed.
    """
    check_can_pack(causal_lm.config, max_length)
    if attention in ("auto", "sdpa"):
        AttentionInterface.register(SEGMENTS, segment_attention)
        AttentionMaskInterface.register(SEGMENTS, _no_mask)
        causal_lm.set_attn_implementation(SEGMENTS)


def check_can_pack(config: PreTrainedConfig, max_length: int) -> None:
    """Raises SpecError for an architecture whose tokens would see the segment before their own."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) - SEEN_BY_LAYERS
    one_rope = _one_rope_up_to(text)
    if kind._is_stateful:
        reason = "has recurrent layers, which carry a state over the border"
    elif layers:
        reason = f"has layers of {' and '.join(sorted(layers))}, which look over the border"
    elif "position_ids" not in inspect.signature(kind.forward).parameters:
        reason = "takes no positions, which begin again with each row that is packed"
    elif not kind._can_set_attn_implementation():
        reason = "has an attention of its own, which knows no border"
    elif max_length > one_rope:
        reason = f"turns all tokens of a row by its longest segment where one is over {one_rope}"
    else:
        return
    message = f"a {config.model_type} model cannot be packed: it {reason}; set it to false"
    raise SpecError("The model cannot be trained on packed rows.", [Problem("data.packing", message)])


def _one_rope_up_to(config: PreTrainedConfig) -> float:
    """Tokens up to which rotary positions do not depend on the row's length: longrope has two sets of them,
    and chooses by the longest segment (modeling_rope_utils.py of transformers)."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    limits = [
        kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min(limits, default=math.inf)


def packed_keywords(
    implementation: str, position_ids: Tensor, lengths: tuple[int, ...] | None
) -> Mapping[str, Any]:
    """What tells the model's attention the segments of its one row; nothing for padded rows. Without lengths
    (in a pipeline, between whose stages only tensors travel) they are read from position_ids, (B, T)."""
    is_flash = implementation.startswith("flash")
    if len(position_ids) > 1 or not (is_flash or implementation == SEGMENTS):
        return {}
    lengths = lengths or lengths_of(position_ids)
    if not is_flash:
        return {KEYWORD: lengths}
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.to(position_ids.device, non_blocking=True)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def lengths_of(position_ids: Tensor) -> tuple[int, ...]:
    """(1, T), beginning again at 0 with each segment -> tokens of each segment. Waits for the device."""
    starts = (position_ids[0] == 0).nonzero().flatten().tolist()
    return tuple(end - start for start, end in zip(starts, (*starts[1:], position_ids.shape[1]), strict=True))


@contextmanager
def own_attention(causal_lm: PreTrainedModel) -> Iterator[None]:
    """The architecture's own attention and masks meanwhile, to compare with."""
    kept = causal_lm.config._attn_implementation
    if kept == SEGMENTS:
        causal_lm.set_attn_implementation("sdpa" if causal_lm._supports_sdpa else "eager")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(kept)


# --- the attention ------------------------------------------------------------------------------------------

NOT_SAID = -1  # a model that hands no window over, where one without a window hands None


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """(B, heads, T, D) each, key and value with as many heads or a divisor -> (B, T, heads, D), None: causal
    within each segment of a packed row (B = 1), over its last `sliding_window` tokens, the scores bent by
    `softcap` as in Gemma 2. The signature is transformers' AttentionInterface's.

    Raises DsftError for anything else that the model asks of its attention.
    """
    lengths, window = asked.pop(KEYWORD, None), asked.pop("sliding_window", NOT_SAID)
    softcap = asked.pop("softcap", None)
    _refuse_unknown(module, attention_mask, lengths, window, asked)
    longest = max(lengths)
    reach = min(window, longest) if window not in (None, NOT_SAID) else longest
    band = _band(longest, reach, query.device) if reach < longest or softcap is not None else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        if softcap is not None:
            assert band is not None
            output = _attend_bent((q, k, v), band[:length, :length], scale, dropout, softcap)
        else:
            mask = band[:length, :length] if band is not None and length > reach else None
            output = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _attend_bent(
    parts: tuple[Tensor, Tensor, Tensor], mask: Tensor, scale: float, dropout: float, softcap: float
) -> Tensor:
    """softcap × tanh(score ÷ softcap), which torch's kernel has not: by hand, as transformers' Gemma 2 does,
    with the softmax in float32."""
    query, key, value = parts
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    shares = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(shares, dropout) @ value


@lru_cache(maxsize=4)  # a model has at most two kinds of layers, and all of them the same row
def _band(length: int, reach: int, device: torch.device) -> Tensor:
    """(length, length) bool: a token sees itself and the reach - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - reach)


def _refuse_unknown(
    module: nn.Module,
    attention_mask: Tensor | None,
    lengths: tuple[int, ...] | None,
    window: int | None,
    asked: Mapping[str, Any],
) -> None:
    unknown = [name for name, value in asked.items() if not _is_harmless(name, value)]
    config = getattr(module, "config", None)
    if lengths is None:
        reason = "hands no lengths of segments down to its attention"
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


def _no_mask(*_: Any, use_vmap: bool = False, **__: Any) -> None:
    """transformers' AttentionMaskInterface: what a token may see follows from the segments. `use_vmap` says
    that the model adds a rule of its own."""
    if use_vmap:
        raise DsftError(
            "The model adds a rule of its own to its attention's mask, so packed rows would not be exact; "
            "set data.packing to false, or model.attention to eager."
        )
