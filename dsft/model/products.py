"""Compute the output layer's matrix products, in float32 where the device can.

On GPUs products and sums of products are float32 by the multiplication itself (`out_dtype`). The fastest
kernels of cuBLAS need rows that begin at multiples of 16 bytes and contain a multiple of 16 bytes. So rows of
logits are a multiple of TILE elements apart, and where the vocabulary size is no multiple of ALIGNED its last
entries are multiplied separately. The weight is neither copied nor changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsft.plan.memory.sizes import BYTES_PER_LOGIT

TILE = {"cuda": 64}  # elements: 128 bytes in 16 bits
ALIGNED = 8  # elements: 16 bytes in 16 bits
PRODUCT_BYTES = 1 << 22  # of a product that a second operation adds to a wider sum


def tile_of(tensor: Tensor) -> int:
    """Return the tile of the tensor's device; 1 where rows need no alignment."""
    return TILE.get(tensor.device.type, 1)


def aligned_empty(like: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return (rows, width), uninitialized, with aligned rows, on the device of `like`."""
    rest = -width % tile_of(like)
    empty = like.new_empty(rows, width + rest, dtype=dtype)
    return empty[:, :width] if rest else empty


def room_of(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory, (n, V) in `dtype`, for the gradient with respect to a product (n, V) that is no longer
    needed: the product's own memory if it is of that type, else new memory."""
    rows, width = product.shape
    return product if product.dtype == dtype else aligned_empty(product, rows, width, dtype)


def pieces(rows: int, width: int, limit: int, tile: int = 1) -> Iterator[slice]:
    """Yield even slices of `rows` rows of `width` logits, of at most `limit` bytes each where `tile` rows are
    not more than that. They begin at multiples of `tile`, and the remainder is a slice of its own unless it
    is a multiple of ALIGNED."""
    at_most = max(1, limit // (BYTES_PER_LOGIT * max(1, width)) // tile)
    tiles = rows // tile
    count = -(-tiles // at_most)
    borders = [tiles * number // count * tile for number in range(count + 1)] if count else [0]
    if borders[-1] < rows:
        borders[len(borders) - (count > 0 and rows % ALIGNED == 0) :] = [rows]
    return (slice(start, stop) for start, stop in zip(borders, borders[1:], strict=False))


def vocab_slices(weight: Tensor) -> tuple[slice, ...]:
    """Return the slices of the vocabulary that are multiplied at once with a weight (V, H)."""
    return tuple(pieces(len(weight), 1, len(weight) * BYTES_PER_LOGIT, tile_of(weight)))


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product: (n, H), (V, H), (V,) -> (n, V), at least float32 on a GPU, elsewhere in the
    weight's type."""
    if tile_of(hidden) == 1:
        return torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())
    wide = torch.promote_types(weight.dtype, torch.float32)
    found = aligned_empty(hidden, len(hidden), len(weight), wide)
    for vocab in vocab_slices(weight):
        multiply(hidden, weight[vocab].t(), found[:, vocab])
    # Not by addmm: cuBLASLt adds a bias wrongly to a float32 product of 16-bit matrices (torch's Blas.cpp).
    return found if bias is None else found.add_(bias)


def multiply(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """Compute out = left @ right, or out += left @ right; `out` may be of a wider type."""
    if left.dtype == out.dtype:
        out.addmm_(left, right) if add else torch.mm(left, right, out=out)
    elif left.is_cuda and add:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # as many rows at a time as keep their product in a processor's cache
        at_once = max(1, PRODUCT_BYTES // right[0].nbytes)
        for some, part in zip(out.split(at_once), left.split(at_once), strict=True):
            narrow = torch.mm(part, right)
            some.add_(narrow) if add else some.copy_(narrow)
