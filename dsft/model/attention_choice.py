"""Which attention packed rows get: takes a model, a device and a type, gives one of the functions of
transformers' interface that this package has.

Each is tried on the device, forward and backward, with what the model asks of its attention; the first that
can is taken: FlashAttention 3 and 2 behind torch's varlen_attn, the package flash-attn, the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dsft.model.attention_loop import SEGMENTS, segment_attention
from dsft.model.attention_varlen import Form, Kernel, package_kernel, torch_kernel, varlen_attention

VARLEN, PACKAGE = "dsft_varlen", "dsft_package"
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    VARLEN: varlen_attention(torch_kernel()),
    PACKAGE: varlen_attention(package_kernel),
    SEGMENTS: segment_attention,
}
"""By the name under which transformers knows them."""

FLASH_TYPES = (torch.bfloat16, torch.float16)
BORDERS = (0, 3, 8)  # of the two segments on which a kernel is tried


@dataclass(frozen=True)
class Choice:
    """name: of FUNCTIONS; said: which it is, and why none before it."""

    name: str
    said: str


@dataclass(frozen=True)
class Asked:
    """What a model's layers ask of their attention: every size of a head, scale and window that one of them
    has, beside what is the same for all."""

    heads: int
    key_heads: int
    head_sizes: tuple[int, ...]
    scales: tuple[float | None, ...]
    windows: tuple[int | None, ...]
    softcap: float | None
    dropout: float
    is_uneven: bool  # the heads of values have another size than those of keys


def choose(causal_lm: PreTrainedModel, device: torch.device) -> Choice:
    """The first that computes what `causal_lm` asks, in the type of its parameters, on `device`."""
    loop = "segment by segment"
    dtype = next(causal_lm.parameters()).dtype
    if device.type != "cuda":
        return Choice(SEGMENTS, f"{loop}, as FlashAttention needs a GPU")
    if dtype not in FLASH_TYPES:
        return Choice(SEGMENTS, f"{loop}, as FlashAttention does not compute in {_short(dtype)}")
    asked = asked_by(causal_lm)
    if asked.is_uneven:
        return Choice(SEGMENTS, f"{loop}, as FlashAttention needs keys and values with heads of one size")
    refused = ""
    for name, kernel, flash_3, said in (
        (VARLEN, torch_kernel(), True, "FlashAttention 3"),
        (VARLEN, torch_kernel(), False, "varlen_attn of torch"),
        (PACKAGE, package_kernel, False, "the package flash-attn"),
    ):
        try:
            with _flash_3(flash_3):
                _try(kernel, asked, dtype, device)
        except Exception as error:  # what torch, the packages and the driver raise
            refused += f"; not {said}: {(str(error).splitlines() or [type(error).__name__])[0]}"
        else:
            return Choice(name, said + refused)
    return Choice(SEGMENTS, loop + refused)


def asked_by(causal_lm: PreTrainedModel) -> Asked:
    """By the modules' attributes and the config's keys, under the names that transformers gives them."""
    text: Any = causal_lm.config.get_text_config()
    heads = text.num_attention_heads
    modules = list(causal_lm.modules())
    sizes = {size for m in modules if isinstance(size := getattr(m, "head_dim", None), int)}
    scales = {scale for m in modules if isinstance(scale := getattr(m, "scaling", None), float)}
    dropout = (getattr(text, key, None) for key in ("attention_dropout", "attn_pdrop", "attn_dropout"))
    return Asked(
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
    """FlashAttention 3 in the place of torch's own from here on, and no longer where it fails in this block.

    Raises ImportError where this torch cannot have it, or its package is not installed."""
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


def _try(kernel: Kernel, asked: Asked, dtype: torch.dtype, device: torch.device) -> None:
    """Forward and backward of two segments, the second behind a key of the first. Raises what the kernel
    raises. Whether its numbers are right is tried on real rows, by `prove_packing`."""
    begins = torch.tensor(BORDERS, dtype=torch.int32, device=device)
    keys = begins + torch.arange(len(BORDERS), dtype=torch.int32, device=device).clamp(max=1)
    tokens = BORDERS[-1]
    for size, scale, window in product(asked.head_sizes, asked.scales, asked.windows):
        query, key, value = (
            torch.ones(length, heads, size, dtype=dtype, device=device, requires_grad=True)
            for length, heads in ((tokens, asked.heads), *[(tokens + 1, asked.key_heads)] * 2)
        )
        reach = (-1, 0) if window is None else (window - 1, 0)
        scaling = size**-0.5 if scale is None else scale
        form = Form(tokens, scaling, reach, asked.softcap, asked.dropout)
        with torch.enable_grad():
            kernel(query, key, value, (begins, keys), form).sum().backward()
    torch.cuda.synchronize(device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
