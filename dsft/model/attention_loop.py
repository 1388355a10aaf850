"""Compute attention over a packed row segment by segment.

torch's kernel runs on each segment, and the cost is the sum of the squares of their lengths. It is exact on
every device and in every type, with soft-caps too; on a GPU each segment costs kernel launches of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsft.errors import DsftError
from dsft.model.recurrence import SEGMENT_ROWS

WINDOW_NOT_GIVEN = -1  # for a model that passes no window at all; one without a window passes None
# Keywords of models to their attention that change nothing here; is_causal is checked.
HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "return_dict", SEGMENT_ROWS})

SEGMENTS = "dsft_segments"
KEYWORD = "segments"
Spans = tuple[tuple[int, int], ...]  # (tokens, position of the first) of each segment of a row

# Queries per call of the CPU kernel under a mask, which computes masked scores too: fewer queries have
# fewer keys.
QUERY_BLOCK = 128
FLASH_SIZE = 256  # largest head of FlashAttention, torch's only kernel on a GPU that supports grouped heads


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention, causal within each segment of a packed row (B = 1) and the prompt that it continues,
    over the last `sliding_window` tokens, with scores soft-capped by `softcap` as in Gemma 2: (B, heads, T,
    D) each, key and value with as many heads or a divisor -> (B, T, heads, D), None. The signature is
    transformers' AttentionInterface's.

    Raises DsftError for anything else that the model asks of its attention.
    """
    segments, window = arguments.pop(KEYWORD, None), arguments.pop("sliding_window", WINDOW_NOT_GIVEN)
    softcap = arguments.pop("softcap", None)
    check_supported(module, attention_mask, segments is not None, window, arguments)
    longest = max(length + start for length, start in segments)
    reach = min(window, longest) if window not in (None, WINDOW_NOT_GIVEN) else longest
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for part in _parts(segments, reach, query, key, value):
        for block in part.blocks(reach, softcap is not None):
            if softcap is not None:
                output = _attend_softcapped(block, block.visible(reach), scale, dropout, softcap)
            else:
                mask = None if block.is_square(reach) else block.visible(reach)
                output = _attend(block, mask, scale, dropout)
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
        """Whether the part is plainly causal: no keys before the segment's own, and all of them within
        reach."""
        return self.start == 0 and self.query.shape[2] <= reach

    def blocks(self, reach: int, is_masked: bool) -> Iterator[_Part]:
        """Yield parts of QUERY_BLOCK queries with the keys up to them and within reach, where there is a
        mask on a CPU; else the whole part."""
        length, keys = self.query.shape[2], self.key.shape[2]
        if self.query.device.type != "cpu" or (self.is_square(reach) and not is_masked):
            yield self
            return
        before = self.start + length - keys  # the position of the first key
        for begin in range(0, length, QUERY_BLOCK):
            start, size = self.start + begin, min(QUERY_BLOCK, length - begin)
            first = max(before, start + 1 - reach)
            key, value = (x.narrow(2, first - before, start + size - first) for x in (self.key, self.value))
            yield _Part(self.query.narrow(2, begin, size), key, value, start)

    def visible(self, reach: int) -> Tensor:
        """Return (n, m) bool: which keys each query sees, itself and the reach - 1 tokens before it."""
        length, keys = self.query.shape[2], self.key.shape[2]
        own = keys - length  # the number of keys before the first query's own
        ones = torch.ones(length, keys, dtype=torch.bool, device=self.query.device)
        return ones.tril_(own).triu_(own + 1 - reach)


def _parts(segments: Spans, reach: int, query: Tensor, key: Tensor, value: Tensor) -> Iterator[_Part]:
    """Yield the segments, by splits, whose backward is one concatenation; only the part of a shared prompt
    that is within reach is copied."""
    lengths = [length for length, _ in segments]
    split = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    prompt: tuple[Tensor, Tensor] | None = None
    for (q, k, v), (_, start) in zip(split, segments, strict=True):
        if start == 0:
            prompt = k, v
        elif prompt is None or prompt[0].shape[2] < start:
            raise DsftError(
                f"A segment begins at position {start}, and its prompt has fewer tokens than that."
            )
        else:
            first = max(0, start + 1 - reach)
            k, v = (
                torch.cat((before.narrow(2, first, start - first), own), dim=2)
                for before, own in zip(prompt, (k, v), strict=True)
            )
        yield _Part(q, k, v, start)


def _attend(part: _Part, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Compute attention; causal where there is no mask."""
    query, key, value, _ = part
    is_grouped = query.shape[1] != key.shape[1]
    takes_groups = mask is None and query.dtype != torch.float32 and query.shape[-1] <= FLASH_SIZE
    if is_grouped and query.device.type != "cpu" and not takes_groups:
        # else torch uses the kernel that stores all n × m scores
        key, value, is_grouped = *_ungrouped(part), False
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, mask is None, scale=scale, enable_gqa=is_grouped
    )


def _ungrouped(part: _Part) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for each head of the query."""
    groups = part.query.shape[1] // part.key.shape[1]
    return part.key.repeat_interleave(groups, dim=1), part.value.repeat_interleave(groups, dim=1)


def _attend_softcapped(part: _Part, mask: Tensor, scale: float, dropout: float, softcap: float) -> Tensor:
    """Compute attention with scores softcap × tanh(score ÷ softcap), which torch's kernel does not support:
    step by step, as transformers' Gemma 2 does, with the softmax in float32."""
    key, value = _ungrouped(part)
    scores = softcap * torch.tanh(part.query @ key.transpose(2, 3) * scale / softcap)
    shares = (
        scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(part.query.dtype)
    )
    return F.dropout(shares, dropout) @ value


def check_supported(
    module: nn.Module,
    attention_mask: Tensor | None,
    has_segments: bool,
    window: int | None,
    arguments: Mapping[str, Any],
) -> None:
    """Raise DsftError where a model asks more of its attention than is computed here. The arguments are those
    of `unsupported`."""
    reason = unsupported(module, attention_mask, has_segments, window, arguments)
    if reason:
        raise DsftError(
            f"{type(module).__name__} {reason}, so packed rows would not be exact; set data.packing to "
            "false, or model.attention to eager, which uses the model's own masks."
        )


def unsupported(
    module: nn.Module,
    attention_mask: Tensor | None,
    has_segments: bool,
    window: int | None,
    arguments: Mapping[str, Any],
) -> str:
    """Return what a model asks of its attention that is not computed here; empty where there is nothing.
    has_segments: the attention got the segments; window: WINDOW_NOT_GIVEN where the model passes none;
    arguments: the other keywords."""
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    config = getattr(module, "config", None)
    if not has_segments:
        return "does not pass the segments to its attention"
    if attention_mask is not None:
        return "passes its own mask to its attention"
    if unknown := sorted(given - HARMLESS):
        return f"passes {' and '.join(unknown)} to its attention, which is not supported"
    if not arguments.get("is_causal", getattr(module, "is_causal", True)):
        return "has attention that is not causal"
    if window == WINDOW_NOT_GIVEN and getattr(config, "sliding_window", None):  # 0: Qwen 2 MoE has none
        return "does not pass sliding_window to its attention"
    return ""
