"""Compute the softmax part of the output layer in one Triton kernel, with the interface of Softmax.

A program has one row. It reads the row's product once for `stats` and once for the gradient, which it
writes in the type that the next products take: 10 bytes of memory traffic per logit with 16-bit weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsft.model.products import room_of
from dsft.model.softmax import Softmax

BLOCK = 4096  # logits that a program has in registers at once
WARPS = 8
LOWEST = tl.constexpr(-3.4e38)


@triton.jit  # type: ignore[untyped-decorator]
def shaped(product, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return z of float32 products. tanh(x) = ±(1 - e) ÷ (1 + e) with e = exp(-2 |x|), with an error of one
    rounding of 1."""
    z = product * scale
    if CAPPED:
        z = z / softcap
        e = tl.exp(-2.0 * tl.abs(z))
        z = tl.where(z < 0, -softcap, softcap) * ((1.0 - e) / (1.0 + e))
    return z


@triton.jit  # type: ignore[untyped-decorator]
def softmax_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    product,  # *fp32 (n, width), rows product_stride apart
    targets,  # *int64 (n,)
    logps,  # *fp32 (n,), written unless SCORED
    stats,  # *fp32 (n, 2): maximum and sum, read where SCORED, else written
    upstream,  # *fp32 (n,), read where SCORED
    gradient,  # (rows, width), rows gradient_stride apart; may be the product's own memory
    product_stride,
    gradient_stride,
    rows,
    width,
    scale,
    softcap,
    smoothing,
    share,  # smoothing ÷ the size of the whole vocabulary
    SCORED: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    product += row * product_stride
    gradient += row * gradient_stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    pull = 1.0
    if SCORED:
        top = tl.load(stats + 2 * row)
        total = tl.load(stats + 2 * row + 1)
        pull = tl.load(upstream + row)
    else:
        # Before `stats`: their barrier separates this read from the writes over the product.
        value = shaped(tl.load(product + target), scale, softcap, CAPPED)
        tops = tl.full((BLOCK,), LOWEST, tl.float32)
        totals = tl.zeros((BLOCK,), tl.float32)
        plain = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            z = shaped(tl.load(product + start + columns, inside, 0.0), scale, softcap, CAPPED)
            if SMOOTHED:
                plain += tl.where(inside, z, 0.0)
            z = tl.where(inside, z, -float("inf"))
            higher = tl.maximum(tops, z)
            totals = totals * tl.exp(tops - higher) + tl.exp(z - higher)
            tops = higher
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp(tops - top), 0)
        if SMOOTHED:
            value += smoothing * (tl.sum(plain, 0) / width - value)
        tl.store(stats + 2 * row, top)
        tl.store(stats + 2 * row + 1, total)
        tl.store(logps + row, value - (top + tl.log(total)))
    if row < rows:
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            z = shaped(tl.load(product + start + columns, inside, 0.0), scale, softcap, CAPPED)
            by_z = share - tl.exp(z - top) / total
            by_z += tl.where(start + columns == target, 1.0 - smoothing, 0.0)
            slope = scale
            if CAPPED:
                slope = scale * (1.0 - (z / softcap) * (z / softcap))
            by_product = by_z * slope * pull
            tl.store(gradient + start + columns, by_product.to(gradient.dtype.element_ty), inside)


class TritonSoftmax(Softmax):
    """The softmax part by `softmax_kernel`, for float32 products."""

    def values(
        self, product: Tensor, targets: Tensor, dtype: torch.dtype, stored: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logps, stats = product.new_empty(len(product)), product.new_empty(len(product), 2)
        gradient = room_of(product, dtype) if stored is None else stored
        self._launch(product, targets, logps, stats, logps, gradient, product.shape[1], scored=False)
        return logps, stats, gradient

    def gradient(
        self,
        product: Tensor,
        targets: Tensor,
        stats: Tensor,
        upstream: Tensor,
        vocabulary: int,
        dtype: torch.dtype,
    ) -> Tensor:
        gradient = room_of(product, dtype)
        given = (product, targets, stats, stats.contiguous(), upstream.contiguous(), gradient)
        self._launch(*given, vocabulary, scored=True)
        return gradient

    def _launch(self, *tensors_and_vocabulary: Any, scored: bool) -> None:
        product, targets, logps, stats, upstream, gradient, vocabulary = tensors_and_vocabulary
        softmax_kernel[(len(product),)](
            product,
            targets,
            logps,
            stats,
            upstream,
            gradient,
            product.stride(0),
            gradient.stride(0),
            len(gradient),
            product.shape[1],
            self.shaping.scale,
            self.shaping.softcap or 1.0,
            self.smoothing,
            self.smoothing / vocabulary,
            SCORED=scored,
            CAPPED=self.shaping.softcap is not None,
            SMOOTHED=self.smoothing > 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
