"""Right numbers on the stand-in GPU: each operation runs as on a GPU, with CUDA's own checks of devices and
shapes, its allocations and its launches of kernels that do nothing, and then once more by the CPU's kernels
on tensors over the same memory. `start` enters the mode for this thread, the threads of its backward passes
and all later threads.

Kernels that the CPU does not have (fused attention, products of bf16 with results in fp32) are written here
by their definition, in fp32."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CPU = torch.device("cpu")

NATIVE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_",
    "record_stream", "is_pinned", "pin_memory", "_pin_memory", "_local_scalar_dense", "lift_fresh",
}  # fmt: skip
"""Operations that compute nothing, or only copy what is there."""
MASKED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
"""Operations whose kernels, where an index is of bools, first look for those that are true."""


def on_cpu(value: Any) -> Any:
    """Return a CPU tensor over a device tensor's memory, with its shape and strides; the CPU in place of
    the device."""
    if isinstance(value, torch.device):
        return CPU
    if isinstance(value, torch.Generator):
        return value if value.device.type == "cpu" else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    made = torch.empty(0, dtype=value.dtype)
    if storage.nbytes() == 0:
        return made.new_empty(value.size())
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    under = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return made.set_(under, value.storage_offset(), value.size(), value.stride())


def is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.device) and getattr(value, "device", value).type == "cuda"


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the operation's results on the CPU."""
    args, kwargs = tree_map(on_cpu, args), tree_map(on_cpu, kwargs)
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    own = ON_CPU.get(func)
    return own(*args, **kwargs) if own else func(*args, **kwargs)


def on_one_device(func: Any, args: Any) -> None:
    """Refuses what CUDA would: numbers of the CPU among those of the device, but for single ones."""
    for value in tree_leaves(args):
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            if value.dim() and value.dtype.is_floating_point:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cpu and"
                    f" cuda ({func})"
                )


def to_device(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    on_cpu(made).copy_(value)
    return made


def has_bools(values: Any) -> bool:
    kinds = (torch.bool, torch.uint8)
    return any(isinstance(value, torch.Tensor) and value.dtype in kinds for value in tree_leaves(values))


class Numbers(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        found = next((v for v in tree_leaves((args, kwargs)) if is_cuda(v)), None)
        if found is None or func.is_view or name in NATIVE:
            return func(*args, **kwargs)
        if not func._schema.name.startswith("aten::"):
            return self.custom(func, args, kwargs)
        by_data = torch.Tag.dynamic_output_shape in func.tags
        if has_bools(args[1:2]) if name in MASKED else by_data:
            return self.sized_by_data(func, args, kwargs, getattr(found, "device", found))
        if torch.Tag.data_dependent_output in func.tags:  # one answer for the host, as equal() gives
            return compute(func, args, kwargs)
        return self.twice(func, args, kwargs)

    def custom(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation defined in Python is made of aten's, which are computed one by one; others, as those
        of NCCL, only move memory."""
        definition = OPDEFS.get(func._schema.name)
        kernels = definition._backend_fns if definition else {}
        kernel = kernels.get("cuda", kernels.get(None))
        if kernel is None:
            return func(*args, **kwargs)
        with self:
            return kernel(*args, **kwargs)

    def sized_by_data(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """A kernel's own count of what it found cannot be had: only the CPU computes. As on a GPU the host
        waits."""
        on_one_device(func, args)
        torch.empty(1, device=device).cpu()
        made = compute(func, args, kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda value: to_device(value, device), made)

    def twice(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [(v, on_cpu(v).clone()) for v in tree_leaves(value) if is_cuda(v)]
        native = func(*args, **kwargs)
        for value, before in written:  # a native operation may copy its unwritten buffer into its argument
            if on_cpu(value).shape == before.shape:
                on_cpu(value).copy_(before)
        made = compute(func, args, kwargs)
        for there, here in zip(tree_leaves(native), tree_leaves(made), strict=True):
            if isinstance(there, torch.Tensor) and isinstance(here, torch.Tensor):
                seen = on_cpu(there)
                if seen.shape == here.shape and seen.data_ptr() != here.data_ptr():
                    seen.copy_(here)
        return native


ENTERED: list[Numbers] = []
"""The mode of the first thread, which torch 2.10 loses when a tensor is printed."""


def start() -> None:
    """Enter the mode, and have every thread that is made from now on enter it."""
    ENTERED.append(Numbers())
    ENTERED[0].__enter__()
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run(thread: threading.Thread) -> None:
        with Numbers():
            begin(thread)

    threading.Thread._bootstrap_inner = run  # type: ignore[attr-defined]


# ---- attention by its definition ----------------------------------------------------------------------


def scores(q: Any, k: Any, allowed: Any, scale: float | None) -> Any:
    """Scaled products of queries [..., n, d] and keys [..., m, d] in fp32, with `allowed` [..., n, m]: of
    bools, what is not allowed becomes minus infinity; of numbers, they are added."""
    scaled = q.float() @ k.float().transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if allowed is None:
        return scaled
    if allowed.dtype == torch.bool:
        return scaled.masked_fill(~allowed, float("-inf"))
    return scaled + allowed.float()


def attend(q: Any, k: Any, v: Any, allowed: Any, scale: float | None) -> tuple[Any, Any]:
    """Return the output [..., n, d] in q's dtype and the logarithm of each row's sum [..., n] in fp32.
    With fewer heads of keys and values than of queries (dimension -3), each serves the queries' heads that
    follow one another."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    s = scores(q, k, allowed, scale)
    return (torch.softmax(s, -1).nan_to_num() @ v.float()).to(q.dtype), torch.logsumexp(s, -1)


def attend_backward(grad: Any, qkv: Any, allowed: Any, scale: float | None) -> tuple[Any, Any, Any, Any]:
    """Gradients for q, k, v and for the scores (fp32), from that of the output."""
    q, k, v = qkv
    groups, heads = q.shape[-3] // k.shape[-3], k.shape[-3]
    whole_k, whole_v = (x.repeat_interleave(groups, -3).float() for x in (k, v))
    p = torch.softmax(scores(q, whole_k, allowed, scale), -1).nan_to_num()
    g = grad.float()
    of_p = g @ whole_v.transpose(-1, -2)
    of_s = p * (of_p - (of_p * p).sum(-1, keepdim=True))
    factor = scale if scale is not None else q.shape[-1] ** -0.5
    of_k = (of_s.transpose(-1, -2) @ q.float() * factor).unflatten(-3, (heads, groups)).sum(-3)
    of_v = (p.transpose(-1, -2) @ g).unflatten(-3, (heads, groups)).sum(-3)
    return (of_s @ whole_k * factor).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_s


def visible(n: int, m: int, causal: bool, window: tuple[Any, Any], last: bool = True) -> Any:
    """Which of m keys each of n queries sees [n, m]. `last`: the last query is at the last key, as in
    FlashAttention; else the first at the first. `window` bounds how far a key may stand to the left and to
    the right; None or a negative number is no bound."""
    distance = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n if last else 0)
    allowed = torch.ones(n, m, dtype=torch.bool)
    left, right = window
    if causal:
        allowed &= distance <= 0
    if left is not None and left >= 0:
        allowed &= distance >= -left
    if right is not None and right >= 0:
        allowed &= distance <= right
    return allowed


def named(func: Any, values: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by their names, with its defaults: signatures grow from version
    to version."""
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    a = given | dict(zip((a.name for a in arguments), values, strict=False)) | more
    if a.get("dropout_p"):
        raise NotImplementedError("the stand-in GPU computes no attention with dropout: set it to 0")
    return a


def dense_mask(a: dict[str, Any]) -> Any:
    q, k, bias = a["query"], a["key"], a.get("attn_bias")
    if not a["is_causal"]:
        return bias
    allowed = visible(q.shape[-2], k.shape[-2], True, (None, None), last=False)
    return allowed if bias is None else bias.float().masked_fill(~allowed, float("-inf"))


def dense(func: Any) -> Callable[..., Any]:
    """Attention of rows that are equally long, [batch, heads, tokens, d]. Of what it returns, only the output
    and the sums are tensors that are read."""

    def run(*values: Any, **more: Any) -> Any:
        a = named(func, values, more)
        out, lse = attend(a["query"], a["key"], a["value"], dense_mask(a), a["scale"])
        return (out, lse, *[None] * (len(func._schema.returns) - 2))

    return run


def dense_backward(func: Any) -> Callable[..., Any]:
    def run(*values: Any, **more: Any) -> Any:
        a = named(func, values, more)
        grad = a.get("grad_out", a.get("grad_out_"))
        *of, of_s = attend_backward(grad, (a["query"], a["key"], a["value"]), dense_mask(a), a["scale"])
        if len(func._schema.returns) == 3:
            return tuple(of)
        return (*of, of_s.to(a["attn_bias"].dtype) if a["grad_input_mask"][3] else None)

    return run


def pieces(a: dict[str, Any]) -> list[tuple[slice, slice, Any]]:
    """Return the queries and the keys of each sequence, and which see which: sequences are behind one
    another, or, where their bounds are not given, are the rows of a batch."""
    bounds = []
    for tensor, cumulative in (("query", "cum_seq_q"), ("key", "cum_seq_k")):
        x, at = a[tensor], a[cumulative]
        ends = at.tolist() if at is not None else [i * x.shape[1] for i in range(x.shape[0] + 1)]
        bounds.append([slice(*pair) for pair in zip(ends, ends[1:], strict=False)])
    window = a.get("window_size_left"), a.get("window_size_right")
    return [
        (q, k, visible(q.stop - q.start, k.stop - k.start, a["is_causal"], window))
        for q, k in zip(*bounds, strict=True)
    ]


def flat(x: Any) -> Any:
    """[tokens, heads, d] of a batch of rows."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def flash(func: Any) -> Callable[..., Any]:
    """Attention of sequences of any length: queries [tokens, heads, d], sums [heads, tokens]."""

    def run(*values: Any, **more: Any) -> Any:
        a = named(func, values, more)
        q, k, v = (flat(a[name]) for name in ("query", "key", "value"))
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
        for mine, theirs, allowed in pieces(a):
            one, two, three = q[mine].transpose(0, 1), k[theirs].transpose(0, 1), v[theirs].transpose(0, 1)
            o, lse[:, mine] = attend(one, two, three, allowed, a["scale"])
            out[mine] = o.transpose(0, 1)
        if a["cum_seq_q"] is None:
            lse = lse.unflatten(1, a["query"].shape[:2]).transpose(0, 1)
        return (out.reshape(a["query"].shape), lse, *[None] * (len(func._schema.returns) - 2))

    return run


def flash_backward(func: Any) -> Callable[..., Any]:
    def run(*values: Any, **more: Any) -> Any:
        a = named(func, values, more)
        g, q, k, v = (flat(a[name]) for name in ("grad_out", "query", "key", "value"))
        of = [torch.zeros_like(x) for x in (q, k, v)]
        for mine, theirs, allowed in pieces(a):
            places = (mine, theirs, theirs)
            qkv = [x[place].transpose(0, 1) for x, place in zip((q, k, v), places, strict=True)]
            parts = attend_backward(g[mine].transpose(0, 1), qkv, allowed, a["scale"])
            for total, place, part in zip(of, places, parts[:3], strict=True):
                total[place] += part.transpose(0, 1)
        return tuple(x.reshape(a[name].shape) for x, name in zip(of, ("query", "key", "value"), strict=True))

    return run


# ---- other operations that only a GPU has --------------------------------------------------------------


def softmax(func: Any) -> Callable[..., Any]:
    return lambda x, dim, to_float: func(x.float() if to_float else x, dim, False)


def softmax_backward(func: Any) -> Callable[..., Any]:
    return lambda grad, out, dim, dtype: func(grad, out, dim, grad.dtype).to(dtype)


def log_sigmoid_backward(grad: Any, x: Any, buffer: Any) -> Any:
    """The CPU's forward leaves a buffer for it, CUDA's leaves it empty."""
    return aten.log_sigmoid_backward.default(grad, x, aten.log_sigmoid_forward.default(x)[1])


def product(a: Any, b: Any, dtype: Any, *, out: Any = None) -> Any:
    return a.to(dtype) @ b.to(dtype)


def product_added(
    c: Any, a: Any, b: Any, dtype: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Any:
    return beta * c.to(dtype) + alpha * product(a, b, dtype)


def counts(x: Any, *bins: Any) -> Any:
    """A histogram of integers, which the CPU counts of floats alone."""
    return aten.histc.default(x.float(), *bins).to(x.dtype)


WRITTEN: dict[Callable[[Any], Callable[..., Any]], tuple[Any, ...]] = {
    dense: (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    ),
    dense_backward: (
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
    ),
    flash: (aten._flash_attention_forward,),
    flash_backward: (aten._flash_attention_backward,),
    softmax: (aten._softmax, aten._log_softmax),
    softmax_backward: (aten._softmax_backward_data, aten._log_softmax_backward_data),
}
ON_CPU: dict[Any, Callable[..., Any]] = {
    operation.default: make(operation.default)
    for make, operations in WRITTEN.items()
    for operation in operations
} | {
    aten.histc.default: counts,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten.mm.dtype: product,
    aten.mm.dtype_out: product,
    aten.bmm.dtype: product,
    aten.addmm.dtype: product_added,
    aten.addmm.dtype_out: product_added,
}
"""What the CPU has no kernel for, or one with fewer cases."""
