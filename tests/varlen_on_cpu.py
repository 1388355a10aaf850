"""torch's variable-length attention on CPUs, where torch has none: the semantics of its operation, by the
definition, for tests. Takes any floating type; importing it registers both passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

calls: list[int] = []
"""The number of segments of each forward call."""


def _segments(
    query: Tensor, key: Tensor, borders: tuple[Tensor, Tensor], scale: float, window: list[int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each segment its queries and its keys, and the shares (H, n, m) of its scores. Query i of n and key
    j of m meet where j - i - (m - n) is between -window[0] and window[1]; -1: no bound on that side."""
    begins, first = (part.tolist() for part in borders)
    for queries, keys in zip(map(slice, begins, begins[1:]), map(slice, first, first[1:]), strict=True):
        q, k = query[queries], key[keys].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        apart = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
        left, right = window
        hidden = torch.zeros_like(apart, dtype=torch.bool)
        hidden |= (apart < -left) if left >= 0 else False
        hidden |= (apart > right) if right >= 0 else False
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        yield queries, keys, scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _checked(query: Tensor, borders: tuple[Tensor, Tensor], longest: tuple[int, int], window: Any) -> Any:
    """Return what the kernel on a GPU trusts without looking."""
    for part, most in zip(borders, longest, strict=True):
        assert part.dtype == torch.int32 and part[0] == 0
        assert 0 <= int(part.diff().min()) <= int(part.diff().max()) <= most
    assert borders[0][-1] == len(query)
    return window or [-1, -1]


@varlen._varlen_attn.register_kernel("cpu")
def _forward(  # noqa: PLR0913, PLR0917  the operation's own
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    borders = cu_seq_q, cu_seq_k
    window = _checked(query, borders, (max_q, max_k), window_size)
    calls.append(len(cu_seq_q) - 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output, groups = torch.empty_like(query), query.shape[1] // key.shape[1]
    window = [window[0], 0] if is_causal else window
    for queries, keys, shares in _segments(query, key, borders, scale, window):
        v = value[keys].repeat_interleave(groups, dim=1)
        output[queries] = torch.einsum("hqk,khd->qhd", shares, v)
    return output, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def _backward(  # noqa: PLR0913, PLR0917  the operation's own
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    borders = cu_seq_q, cu_seq_k
    window = _checked(query, borders, (max_q, max_k), window_size)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    gradients, groups = [torch.zeros_like(x) for x in (query, key, value)], query.shape[1] // key.shape[1]
    window = [window[0], 0] if is_causal else window
    for queries, keys, shares in _segments(query, key, borders, scale, window):
        k, v = (x[keys].repeat_interleave(groups, dim=1) for x in (key, value))
        pull = grad_out[queries]
        of_shares = torch.einsum("qhd,khd->hqk", pull, v)
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
        gradients[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, k)
        for gradient, of_heads in (
            (gradients[1], torch.einsum("hqk,qhd->khd", of_scores, query[queries])),
            (gradients[2], torch.einsum("hqk,qhd->khd", shares, pull)),
        ):
            gradient[keys] = of_heads.unflatten(1, (-1, groups)).sum(2)
    return gradients[0], gradients[1], gradients[2]
