"""Choose the attention function for packed rows, by device and by type of the parameters.

Each candidate runs forward and backward on the device with the head sizes, scales, windows, soft-cap and
dropout of the model, and is compared with attention computed from its definition. The first that agrees is
chosen, in this order: FlashAttention 3 and 2 behind torch's varlen_attn, the package flash-attn, the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dsft.errors import DsftError
from dsft.model.attention_loop import SEGMENTS, segment_attention
from dsft.model.attention_varlen import (
    AttentionArguments,
    Kernel,
    package_kernel,
    torch_kernel,
    varlen_attention,
)

VARLEN, PACKAGE = "dsft_varlen", "dsft_package"
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    VARLEN: varlen_attention(torch_kernel()),
    PACKAGE: varlen_attention(package_kernel),
    SEGMENTS: segment_attention,
}
"""The attention functions by the name under which transformers registers them."""

FLASH_TYPES = (torch.bfloat16, torch.float16)
BORDERS = (0, 3, 8)  # of the two segments on which kernels are tried
ROUNDING = 0.05
"""Largest difference, relative to the norm of an output or a gradient; rounding in bf16 alone gives 0.01 to
0.02."""


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen attention. name: its key in FUNCTIONS; description: which it is, and why none before it."""

    name: str
    description: str


@dataclass(frozen=True)
class AttentionRequirements:
    """All that a model's layers ask of their attention: every head size, scale and window that one of them
    has, and what is the same for all."""

    heads: int
    key_heads: int
    head_sizes: tuple[int, ...]
    scales: tuple[float | None, ...]
    windows: tuple[int | None, ...]
    softcap: float | None
    dropout: float
    is_uneven: bool  # values have heads of another size than keys


def choose(causal_lm: PreTrainedModel, device: torch.device) -> AttentionChoice:
    """Return the first function that computes what `causal_lm` asks, in the type of its parameters, on
    `device`."""
    loop = "segment by segment"
    dtype = next(causal_lm.parameters()).dtype
    if device.type != "cuda":
        return AttentionChoice(SEGMENTS, f"{loop}, as FlashAttention needs a GPU")
    if dtype not in FLASH_TYPES:
        return AttentionChoice(SEGMENTS, f"{loop}, as FlashAttention does not compute in {_short(dtype)}")
    needs = requirements_of(causal_lm)
    if needs.is_uneven:
        return AttentionChoice(
            SEGMENTS, f"{loop}, as FlashAttention needs keys and values with heads of one size"
        )
    refused = ""
    for name, kernel, flash_3, description in (
        (VARLEN, torch_kernel(), True, "FlashAttention 3"),
        (VARLEN, torch_kernel(), False, "varlen_attn of torch"),
        (PACKAGE, package_kernel, False, "the package flash-attn"),
    ):
        try:
            with _flash_3(flash_3):
                _try(kernel, needs, dtype, device)
        except Exception as error:  # what torch, the packages and the driver raise
            refused += f"; not {description}: {(str(error).splitlines() or [type(error).__name__])[0]}"
        else:
            return AttentionChoice(name, description + refused)
    return AttentionChoice(SEGMENTS, loop + refused)


def requirements_of(causal_lm: PreTrainedModel) -> AttentionRequirements:
    """Read what a model asks from the attributes of its modules and the keys of its config, under
    transformers' names."""
    text: Any = causal_lm.config.get_text_config()
    heads = text.num_attention_heads
    modules = list(causal_lm.modules())
    sizes = {size for m in modules if isinstance(size := getattr(m, "head_dim", None), int)}
    scales = {scale for m in modules if isinstance(scale := getattr(m, "scaling", None), float)}
    dropout = (getattr(text, key, None) for key in ("attention_dropout", "attn_pdrop", "attn_dropout"))
    return AttentionRequirements(
        heads,
        getattr(text, "num_key_value_heads", None) or heads,
        tuple(sorted(sizes)) or (text.hidden_size // heads,),
        tuple(sorted(scales)) or (None,),
        tuple({None, getattr(text, "sliding_window", None)}),
        getattr(text, "attn_logit_softcapping", None),
        max((value for value in dropout if value), default=0.0),
        hasattr(text, "v_head_dim"),
    )


@contextmanager
def _flash_3(wanted: bool) -> Iterator[None]:
    """Activate FlashAttention 3 in the place of torch's own; undo it if the block fails.

    Raises ImportError where this torch does not support it, or its package is not installed.
    """
    if not wanted:
        yield
        return
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("FA3")
    try:
        yield
    except Exception:
        restore_flash_attention_impl()
        raise


def _try(kernel: Kernel, needs: AttentionRequirements, dtype: torch.dtype, device: torch.device) -> None:
    """Run a kernel forward and backward on two segments, the first with one key before it, with a window of
    two tokens where layers have a window. Raises what the kernel raises, and DsftError where its output or a
    gradient differs from the definition's by more than rounding. Dropout is run but not compared."""
    begins = torch.tensor(BORDERS, dtype=torch.int32, device=device)
    keys = begins + torch.arange(len(BORDERS), dtype=torch.int32, device=device).clamp(max=1)
    tokens, pairs = BORDERS[-1], list[tuple[Tensor, Tensor]]()
    for size, scale, window in product(needs.head_sizes, needs.scales, needs.windows):
        scaling = size**-0.5 if scale is None else scale
        generator = torch.Generator().manual_seed(size)
        query, key, value, pull = (
            (torch.randn(length, heads, size, generator=generator) * factor)
            .to(device, dtype)
            .requires_grad_()
            for length, heads, factor in (
                (tokens, needs.heads, 1 / (scaling * size**0.5)),  # scores of about 1
                *[(tokens + 1, needs.key_heads, 1.0)] * 2,
                (tokens, needs.heads, 1.0),
            )
        )
        reach = (-1, 0) if window is None else (1, 0)
        form = AttentionArguments(tokens, scaling, reach, needs.softcap, needs.dropout)
        with torch.enable_grad():
            output = kernel(query, key, value, (begins, keys), form)
            mine = (output, *torch.autograd.grad(output, (query, key, value), pull))
            if form.dropout > 0:
                continue
            q, k, v = (x.detach().float().requires_grad_() for x in (query, key, value))
            output = _by_definition(q, k, v, form)
            right = (output, *torch.autograd.grad(output, (q, k, v), pull.float()))
        pairs += zip(mine, right, strict=True)
    if differ(pairs):
        raise DsftError("its output or its gradients differ from those of attention by its definition")


def differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the first of any pair differs from the second by more than rounding, or is not finite. Waits
    for the device."""
    apart = [~((mine.float() - right).norm() <= ROUNDING * right.norm()) for mine, right in pairs]
    return bool(apart) and bool(torch.stack(apart).any())


def _by_definition(query: Tensor, key: Tensor, value: Tensor, form: AttentionArguments) -> Tensor:
    """Compute attention score by score over BORDERS' segments, of which the first has one key more than
    queries; shapes as in dsft.model.attention_varlen's Kernel."""
    outputs = []
    for begin, end in pairwise(BORDERS):
        q, groups = query[begin:end], query.shape[1] // key.shape[1]
        behind = begin + (begin > 0)
        k, v = (x[behind : end + 1].repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * form.scale
        if form.softcap is not None:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        if form.window[0] >= 0:
            visible = visible.triu(len(k) - len(q) - form.window[0])
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v))
    return torch.cat(outputs)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
