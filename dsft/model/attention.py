"""Attention over a packed row: each segment sees itself alone, exactly, without a mask of the whole row.

Takes a transformers model and makes its attention ask for the segments, which Policy passes as a keyword
through the model's forward. transformers' own masks for packed rows are dense, T × T for a row of T tokens;
here torch's kernel runs on each segment, and the cost is the sum of the squares of their lengths.

A segment that begins at position p > 0 goes on from the first p tokens of the last one that began at 0: it
sees them and itself, as if it were one row with them. Two answers to one prompt are laid so, the prompt once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

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
from dsft.older import can_use_sdpa

SEGMENTS = "dsft_segments"
KEYWORD = "segments"
Segments = tuple[tuple[int, int], ...]  # (tokens, position of the first) of each segment of a row
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
    implementation: str,
    position_ids: Tensor,
    lengths: tuple[int, ...] | None,
    starts: tuple[int, ...] | None = None,
) -> Mapping[str, Any]:
    """What tells the model's attention the segments of its one row; nothing for padded rows. Without lengths
    they are read from position_ids, (B, T).

    Raises DsftError where segments share a prompt and the attention is not `segment_attention`."""
    is_flash = implementation.startswith("flash")
    if len(position_ids) > 1 or not (is_flash or implementation == SEGMENTS):
        _refuse_shared(implementation, starts or ())
        return {}
    segments = (
        segments_of(position_ids)
        if lengths is None
        else tuple(zip(lengths, starts or (0,) * len(lengths), strict=True))
    )
    if not is_flash:
        return {KEYWORD: segments}
    _refuse_shared(implementation, [start for _, start in segments])
    lengths = tuple(length for length, _ in segments)
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.to(position_ids.device, non_blocking=True)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _refuse_shared(implementation: str, starts: Iterable[int]) -> None:
    if any(starts):
        raise DsftError(
            f"Answers that share their prompt need model.attention auto or sdpa, and this model's is "
            f"{implementation}; set dpo.share_prompts to false."
        )


def segments_of(position_ids: Tensor) -> Segments:
    """(1, T) -> where a position is not the one before plus 1, a segment begins. Waits for the device."""
    positions = position_ids[0]
    begins = F.pad(positions.diff() != 1, (1, 0), value=True).nonzero().flatten()
    at, starts = torch.stack((begins, positions[begins])).tolist()
    ends = (*at[1:], len(positions))
    return tuple((end - begin, start) for begin, end, start in zip(at, ends, starts, strict=True))


@contextmanager
def own_attention(causal_lm: PreTrainedModel) -> Iterator[None]:
    """The architecture's own attention and masks meanwhile, to compare with."""
    kept = causal_lm.config._attn_implementation
    if kept == SEGMENTS:
        causal_lm.set_attn_implementation("sdpa" if can_use_sdpa(causal_lm, causal_lm.config) else "eager")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(kept)


# --- the attention ------------------------------------------------------------------------------------------

# Queries of a CPU's kernel under a mask, which computes what is hidden too: fewer at once have fewer keys.
AT_ONCE = 128
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
    within each segment of a packed row (B = 1) and what it goes on from, over the last `sliding_window`
    tokens, the scores bent by `softcap` as in Gemma 2. The signature is transformers' AttentionInterface's.

    Raises DsftError for anything else that the model asks of its attention.
    """
    segments, window = asked.pop(KEYWORD, None), asked.pop("sliding_window", NOT_SAID)
    softcap = asked.pop("softcap", None)
    _refuse_unknown(module, attention_mask, segments, window, asked)
    longest = max(length + start for length, start in segments)
    reach = min(window, longest) if window not in (None, NOT_SAID) else longest
    band = _band(longest, reach, query.device) if reach < longest or softcap is not None else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for part in _parts(segments, reach, query, key, value):
        for block in part.blocks(reach, softcap is not None):
            if softcap is not None:
                assert band is not None
                output = _attend_bent(block, block.seen(band), scale, dropout, softcap)
            else:
                output = _attend(block, None if block.is_square(reach) else block.seen(band), scale, dropout)
            outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


class _Part(NamedTuple):
    """A segment's queries (1, heads, n, D) from position `start` on, and the keys and values (1, heads, m, D)
    of positions start + n - m to start + n."""

    query: Tensor
    key: Tensor
    value: Tensor
    start: int

    def is_square(self, reach: int) -> bool:
        """Plainly causal: no keys before the segment's own, and all of them within reach."""
        return self.start == 0 and self.query.shape[2] <= reach

    def blocks(self, reach: int, is_masked: bool) -> Iterator[_Part]:
        """Of AT_ONCE queries and the keys up to them and within reach, where there is a mask and a CPU."""
        length, keys = self.query.shape[2], self.key.shape[2]
        if self.query.device.type != "cpu" or (self.is_square(reach) and not is_masked):
            yield self
            return
        before = self.start + length - keys  # the position of the first key
        for begin in range(0, length, AT_ONCE):
            start, size = self.start + begin, min(AT_ONCE, length - begin)
            first = max(before, start + 1 - reach)
            key, value = (x.narrow(2, first - before, start + size - first) for x in (self.key, self.value))
            yield _Part(self.query.narrow(2, begin, size), key, value, start)

    def seen(self, band: Tensor | None) -> Tensor:
        """(n, m) bool: which keys each query sees."""
        length, keys = self.query.shape[2], self.key.shape[2]
        if band is None:
            device = self.query.device
            return torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
        end = self.start + length
        return band[self.start : end, end - keys : end]


def _parts(segments: Segments, reach: int, query: Tensor, key: Tensor, value: Tensor) -> Iterator[_Part]:
    """Splits, whose backward is one concatenation; only the part of a shared prompt that is within reach is
    copied."""
    lengths = [length for length, _ in segments]
    split = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    prompt: tuple[Tensor, Tensor] | None = None
    for (q, k, v), (_, start) in zip(split, segments, strict=True):
        if start == 0:
            prompt = k, v
        elif prompt is None or prompt[0].shape[2] < start:
            raise DsftError(f"A segment begins at position {start} without so many tokens before it.")
        else:
            first = max(0, start + 1 - reach)
            k, v = (
                torch.cat((before.narrow(2, first, start - first), own), dim=2)
                for before, own in zip(prompt, (k, v), strict=True)
            )
        yield _Part(q, k, v, start)


def _attend(part: _Part, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Causal where there is no mask."""
    query, key, value, _ = part
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and mask is not None and query.device.type != "cpu":
        # torch's fused kernels on a GPU take groups or a mask, not both
        key, value, is_grouped = *_ungrouped(part), False
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, mask is None, scale=scale, enable_gqa=is_grouped
    )


def _ungrouped(part: _Part) -> tuple[Tensor, Tensor]:
    """Keys and values once for each head of the query."""
    groups = part.query.shape[1] // part.key.shape[1]
    return part.key.repeat_interleave(groups, dim=1), part.value.repeat_interleave(groups, dim=1)


def _attend_bent(part: _Part, mask: Tensor, scale: float, dropout: float, softcap: float) -> Tensor:
    """softcap × tanh(score ÷ softcap), which torch's kernel has not: by hand, as transformers' Gemma 2 does,
    with the softmax in float32."""
    key, value = _ungrouped(part)
    scores = softcap * torch.tanh(part.query @ key.transpose(2, 3) * scale / softcap)
    shares = (
        scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(part.query.dtype)
    )
    return F.dropout(shares, dropout) @ value


@lru_cache(maxsize=4)  # a model has at most two kinds of layers, and all of them the same row
def _band(length: int, reach: int, device: torch.device) -> Tensor:
    """(length, length) bool: a token sees itself and the reach - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - reach)


def _refuse_unknown(
    module: nn.Module,
    attention_mask: Tensor | None,
    segments: Segments | None,
    window: int | None,
    asked: Mapping[str, Any],
) -> None:
    unknown = [name for name, value in asked.items() if not _is_harmless(name, value)]
    config = getattr(module, "config", None)
    if segments is None:
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


def _no_mask(*_: Any, use_vmap: bool = False, **__: Any) -> None:
    """transformers' AttentionMaskInterface: what a token may see follows from the segments. `use_vmap` says
    that the model adds a rule of its own."""
    if use_vmap:
        raise DsftError(
            "The model adds a rule of its own to its attention's mask, so packed rows would not be exact; "
            "set data.packing to false, or model.attention to eager."
        )
