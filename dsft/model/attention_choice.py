"""Choose the attention function for packed rows, by device and by type of the parameters.

Each candidate runs forward and backward on the device with the head sizes, scales, windows, soft-cap and
dropout of the model, and is compared with attention computed from its definition. The first that agrees is
chosen, in this order: the package of FlashAttention 3, torch's varlen_attn, the package flash-attn, the loop.
Where cuDNN is faster, it is tried in the same way for segments of one length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dsft.errors import DsftError
from dsft.model.attention_loop import SEGMENTS, segment_attention
from dsft.model.attention_shapes import MULTIPLE, PLANS
from dsft.model.attention_varlen import (
    CUDNN,
    AttentionArguments,
    Kernel,
    package_3_kernel,
    package_kernel,
    rows_kernel,
    torch_kernel,
    varlen_attention,
)

VARLEN, PACKAGE, PACKAGE_3 = "dsft_varlen", "dsft_package", "dsft_package_3"
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    PACKAGE_3: varlen_attention(package_3_kernel),
    VARLEN: varlen_attention(torch_kernel()),
    PACKAGE: varlen_attention(package_kernel),
    SEGMENTS: segment_attention,
}
"""The attention functions by the name under which transformers registers them."""
ONE_CALL = frozenset(FUNCTIONS) - {SEGMENTS}
"""Those that compute a row in one call."""

FLASH_TYPES = (torch.bfloat16, torch.float16)
BORDERS = (0, 3, 8)  # of the two segments on which kernels are tried
ROWS = (0, MULTIPLE, 2 * MULTIPLE)  # the same for kernels of segments of one length
CUDNN_CAPABILITIES = ((9, 0), (10, 0))
"""Compute capabilities of the GPUs on which cuDNN is tried: H100 and H200, B200. It is about twice as fast as
FlashAttention 2 on an H100, and not faster on an A100 or an L40S (transformers' pull request 48163)."""
ROUNDING = 0.05
"""Largest difference, relative to the norm of an output or a gradient; rounding in bf16 alone gives 0.01 to
0.02."""


_cudnn_failed: list[str] = []
"""Why cuDNN failed in this process; empty where it has not. It is not tried again: torch 2.13 stores an empty
plan for a shape whose plan cannot be built, and crashes when that is used (run_cudnn_SDP_fprop)."""


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen attention. name: its key in FUNCTIONS; description: which it is, and why none before it;
    with_cudnn: segments of one length go through cuDNN."""

    name: str
    description: str
    with_cudnn: bool = False


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
    for name, kernel, description in (
        (PACKAGE_3, package_3_kernel, "the package of FlashAttention 3"),
        (VARLEN, torch_kernel(), "varlen_attn of torch"),
        (PACKAGE, package_kernel, "the package flash-attn"),
    ):
        reason = _why_not(kernel, needs, dtype, device)
        if reason:
            refused += f"; not {description}: {reason}"
            continue
        with_cudnn, clause = (False, "") if name == PACKAGE_3 else try_cudnn(causal_lm, device)
        return AttentionChoice(name, description + refused + clause, with_cudnn)
    return AttentionChoice(SEGMENTS, loop + refused)


def try_cudnn(causal_lm: PreTrainedModel, device: torch.device) -> tuple[bool, str]:
    """Return whether cuDNN computes rows of one length as the layers of `causal_lm` without a window ask, and
    a clause for the log; empty where `device` or the type is none for which it is tried."""
    dtype = next(causal_lm.parameters()).dtype
    if device.type != "cuda" or dtype not in FLASH_TYPES:
        return False, ""
    if torch.cuda.get_device_capability(device) not in CUDNN_CAPABILITIES:
        return False, ""
    needs = requirements_of(causal_lm)
    if needs.is_uneven or needs.softcap or needs.dropout:
        reason = "it needs heads of one size, and attention without soft-caps and dropout"
    else:
        if not _cudnn_failed:
            reason = _why_not(rows_kernel([CUDNN]), replace(needs, windows=(None,)), dtype, device, True)
            _cudnn_failed.extend([reason] if reason else [])
        reason = "".join(_cudnn_failed)
    if reason:
        return False, f"; not cuDNN for rows of one length: {reason}"
    lengths = f"a multiple of {MULTIPLE}, or data.max_length"
    return True, f"; rows of one length ({lengths}) by cuDNN, with plans for at most {PLANS} shapes"


def _why_not(kernel: Kernel, *arguments: Any) -> str:
    """Return why a kernel is not chosen, empty where it is; the arguments are those of `_try`."""
    try:
        _try(kernel, *arguments)
    except Exception as error:  # what torch, the packages and the driver raise
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


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


def _try(
    kernel: Kernel,
    needs: AttentionRequirements,
    dtype: torch.dtype,
    device: torch.device,
    is_rows: bool = False,
) -> None:
    """Run a kernel forward and backward on two segments, with a window of two tokens where layers have a
    window. They have one length and their own keys where `is_rows`; else the first has one key before it.
    Raises what the kernel raises, and DsftError where its output or a gradient differs from the definition's
    by more than rounding. Dropout is run but not compared."""
    borders, before = (ROWS, 0) if is_rows else (BORDERS, 1)
    of_keys = (0, *(end + before for end in borders[1:]))
    begins, keys = (torch.tensor(part, dtype=torch.int32, device=device) for part in (borders, of_keys))
    tokens, pairs = borders[-1], list[tuple[Tensor, Tensor]]()
    for size, scale, window in product(needs.head_sizes, needs.scales, needs.windows):
        scaling = size**-0.5 if scale is None else scale
        generator = torch.Generator().manual_seed(size)
        query, key, value, pull = (
            (torch.randn(length, heads, size, generator=generator) * factor)
            .to(device, dtype)
            .requires_grad_()
            for length, heads, factor in (
                (tokens, needs.heads, 1 / (scaling * size**0.5)),  # scores of about 1
                *[(tokens + before, needs.key_heads, 1.0)] * 2,
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
            output = _by_definition(q, k, v, (borders, of_keys), form)
            right = (output, *torch.autograd.grad(output, (q, k, v), pull.float()))
        pairs += zip(mine, right, strict=True)
    if differ(pairs):
        raise DsftError("its output or its gradients differ from those of attention by its definition")


def differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the first of any pair differs from the second by more than rounding, or is not finite. Waits
    for the device."""
    apart = [~((mine.float() - right).norm() <= ROUNDING * right.norm()) for mine, right in pairs]
    return bool(apart) and bool(torch.stack(apart).any())


def _by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: tuple[Sequence[int], Sequence[int]],
    form: AttentionArguments,
) -> Tensor:
    """Compute attention score by score over segments; shapes, and borders of queries and of keys, as in
    dsft.model.attention_varlen's Kernel."""
    outputs = []
    for queries, keys in zip(*map(pairwise, borders), strict=True):
        q, groups = query[slice(*queries)], query.shape[1] // key.shape[1]
        k, v = (x[slice(*keys)].repeat_interleave(groups, dim=1) for x in (key, value))
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
