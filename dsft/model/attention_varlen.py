"""Compute attention over a packed row in one call, as `segment_attention`: as many kernels run for a hundred
segments as for one.

The kernel is FlashAttention's for sequences of varying length: torch's own (torch.nn.attention.varlen) or a
package's. Its causal mask is aligned to the last key, so a segment's keys may begin before its queries: one
gather puts those of a shared prompt before the segment's own. The backward pass adds to the gradient of the
queries in no fixed order, so two runs differ by rounding. Segments of one length may be rows of
scaled_dot_product_attention instead, which cuDNN computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from dsft.errors import DsftError
from dsft.model.attention_loop import WINDOW_NOT_GIVEN, check_supported

KEY_INDEX = "key_index"
"""Keyword of the indices (K,) of the row's tokens that are the segments' keys; None: each token once."""
IS_ROWS = "segments_are_rows"
"""Keyword: whether the segments have one length and go through cuDNN, in layers whose window holds them."""

CUDNN = SDPBackend.CUDNN_ATTENTION
BY_PRIORITY = [CUDNN, SDPBackend.FLASH_ATTENTION]


class AttentionArguments(NamedTuple):
    """Parameters of an attention call.

    longest  the most keys that a segment may have
    scale    factor of the scores
    window   (W - 1, 0) for W tokens including a token itself, (-1, 0) for all before it
    softcap  as in Gemma 2, None without
    dropout  a probability
    """

    longest: int
    scale: float
    window: tuple[int, int]
    softcap: float | None
    dropout: float


class Kernel(Protocol):
    """Attention over segments: query (T, H, D), key and value (K, h, D) with h heads that divide H -> (T, H,
    D). borders: of the queries' segments and of the keys', (n + 1,) int32 each."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: tuple[Tensor, Tensor],
        form: AttentionArguments,
    ) -> Tensor: ...


def torch_kernel(attend: Callable[..., Any] = varlen_attn) -> Kernel:
    """Return the kernel that calls torch's `varlen_attn`. In torch 2.10 it has neither window nor scale;
    where it has no `enable_gqa`, it accepts grouped heads anyway.

    The kernel raises DsftError for what this `varlen_attn` does not compute.
    """
    parameters = frozenset(inspect.signature(attend).parameters)

    def call(
        query: Tensor, key: Tensor, value: Tensor, borders: tuple[Tensor, Tensor], form: AttentionArguments
    ) -> Tensor:
        needed = (
            ("windows", "window_size" not in parameters and form.window != (-1, 0)),
            ("scales other than 1 ÷ √D", "scale" not in parameters and form.scale != query.shape[-1] ** -0.5),
            ("soft-caps", form.softcap is not None),
            ("dropout", form.dropout > 0),
        )
        missing = [name for name, is_missing in needed if is_missing]
        if missing:
            raise DsftError(f"it does not support {' or '.join(missing)}")
        wanted: dict[str, Any] = {
            "window_size": form.window,
            "scale": form.scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if "window_size" not in parameters:
            wanted["is_causal"] = True
        given = {name: value for name, value in wanted.items() if name in parameters}
        output: Tensor = attend(query, key, value, *borders, form.longest, form.longest, **given)
        return output

    return call


def package_kernel(
    query: Tensor, key: Tensor, value: Tensor, borders: tuple[Tensor, Tensor], form: AttentionArguments
) -> Tensor:
    """Call flash_attn_varlen_func of the package flash-attn, 2.6 or later, which has soft-caps and
    dropout."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    output: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        *borders,
        form.longest,
        form.longest,
        dropout_p=form.dropout,
        softmax_scale=form.scale,
        causal=True,
        window_size=form.window,
        softcap=form.softcap or 0.0,
    )
    return output


def package_3_kernel(
    query: Tensor, key: Tensor, value: Tensor, borders: tuple[Tensor, Tensor], form: AttentionArguments
) -> Tensor:
    """Call flash_attn_varlen_func of FlashAttention 3's package, by its own name: torch's
    activate_flash_attention_impl would put it in the place of every attention of the process.

    Raises DsftError for dropout, which it does not have.
    """
    from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]

    if form.dropout > 0:
        raise DsftError("it does not support dropout")
    output: Tensor | tuple[Tensor, ...] = flash_attn_varlen_func(
        query,
        key,
        value,
        *borders,
        max_seqlen_q=form.longest,
        max_seqlen_k=form.longest,
        softmax_scale=form.scale,
        causal=True,
        window_size=form.window,
        softcap=form.softcap or 0.0,
    )
    return output[0] if isinstance(output, tuple) else output  # its first releases return the sums too


def rows_kernel(backends: Sequence[SDPBackend] = BY_PRIORITY) -> Kernel:
    """Return the kernel for segments of one length, which are rows of scaled_dot_product_attention by the
    first of `backends` that supports them. It knows neither windows nor soft-caps. Elsewhere in the process
    cuDNN stays off (dsft.dist.world.join_group)."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, borders: tuple[Tensor, Tensor], form: AttentionArguments
    ) -> Tensor:
        rows = len(borders[0]) - 1
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (query, key, value))
        is_grouped = query.shape[1] != key.shape[1]
        with sdpa_kernel(list(backends), set_priority=True):
            output = F.scaled_dot_product_attention(
                q, k, v, None, form.dropout, True, scale=form.scale, enable_gqa=is_grouped
            )
        return output.transpose(1, 2).flatten(0, 1)

    return call


def varlen_attention(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """Return the attention function that calls `kernel`, and that of rows where `IS_ROWS` says so, with the
    signature and shapes of `segment_attention`."""
    of_rows = rows_kernel()

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        borders = arguments.pop("cu_seq_lens_q", None), arguments.pop("cu_seq_lens_k", None)
        longest, _ = arguments.pop("max_length_q", None), arguments.pop("max_length_k", None)
        index, softcap = arguments.pop(KEY_INDEX, None), arguments.pop("softcap", None)
        is_rows = arguments.pop(IS_ROWS, False)
        window = arguments.pop("sliding_window", WINDOW_NOT_GIVEN)
        check_supported(module, attention_mask, borders[0] is not None, window, arguments)
        reach = -1 if window in (None, WINDOW_NOT_GIVEN) or window >= longest else window - 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        # not x[0], whose backward fills zeros and copies
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if index is not None:
            k, v = k.index_select(0, index), v.index_select(0, index)
        form = AttentionArguments(longest, scale, (reach, 0), softcap, dropout)
        called = of_rows if is_rows and reach == -1 and softcap is None else kernel
        return called(q, k, v, borders, form)[None], None

    return attend
