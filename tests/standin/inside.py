"""For the code that runs over the stand-in GPU: counts launches, copies and synchronisations between two
points, finds where the host waits, gives peaks of memory and the attention kernel that torch would choose."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.standin.gpu import PREFIX

KINDS = (
    "launches", "products", "fills", "to_device", "to_host", "on_device", "pageable", "stream_syncs",
    "device_syncs", "event_syncs", "collectives",
)  # fmt: skip
"""What the stand-in counts, in the order of `runtime/standin.h`, which says what each is."""
KERNELS = {-1: "none", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
"""SDPBackend of torch/csrc."""


@functools.cache
def _counts() -> Any:
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
    return (ctypes.c_long * len(KINDS)).in_dll(runtime, "standin_counts")


def report(value: Any) -> None:
    """Print `value` as JSON for the test that started this process."""
    print(PREFIX + json.dumps(value), flush=True)


def in_fork(work: Callable[[], Any], **variables: str) -> Any:
    """Return what `work` returns (of what JSON has) in a fork of this process with these variables. To be
    called before this process uses CUDA, which knows no fork."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.environ |= variables
            with os.fdopen(send, "w") as file:
                json.dump(work(), file)
            code = 0
        except BaseException:  # noqa: B902  as the interpreter would print it
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(send)
    with os.fdopen(receive) as file:
        text = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(text)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yield what was asked of the device within: {"launches": 98, "stream_syncs": 1, ...}, filled at the
    end."""
    found: Counter[str] = Counter()
    before = list(_counts())
    try:
        yield found
    finally:
        found.update({name: now - was for name, now, was in zip(KINDS, _counts(), before, strict=True)})


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write, each tensor once per operation, but for views and
    AdamW's own."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "adam" not in func._schema.name:
            schema = func._schema.arguments
            given = [(one, schema[n].is_write) for n, of in enumerate(args) for one in tree_leaves(of)]
            given += [(one, True) for one in tree_leaves((kwargs or {}).get("out"))]
            held = [(one, 1 + is_written) for one, is_written in given if isinstance(one, torch.Tensor)]
            if "fill" in func._schema.name or "zero" in func._schema.name or "copy_" in func._schema.name:
                held = [(one, 1) for one, _ in held]
            if not func._schema.is_mutable and "empty" not in func._schema.name:
                held += [(one, 1) for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
            self.bytes += sum(times * one.numel() * one.element_size() for one, times in held)
        return out


@contextmanager
def waits(*, within: str = "") -> Iterator[Counter[str]]:
    """Yield where the host waits for the device: {"dsft/run/loop.py:187 train": 2}, each place being the
    innermost frame of a file whose path contains `within`. What torch's own check finds: copies to the
    host and from pageable memory, .item(), nonzero; cudaDeviceSynchronize and waiting for events it does
    not."""
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" not in str(message):
            return
        frames = [f for f in traceback.extract_stack()[:-1] if _is_code(f.filename) and within in f.filename]
        last = frames[-1] if frames else None
        found[f"{_short(last.filename)}:{last.lineno} {last.name}" if last else "elsewhere"] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _is_code(filename: str) -> bool:
    hidden = r"/(warnings|numbers_mode|standin/inside)\.py$"
    return not filename.startswith("<") and not re.search(hidden, filename)


def _short(filename: str) -> str:
    return re.sub(r"^.*/(site-packages|site)/", "", filename).removeprefix(str(Path.cwd()) + "/")


@contextmanager
def peak() -> Iterator[dict[str, int]]:
    """Yield bytes of torch's allocator: at the beginning (`before`), the most within (`allocated`,
    `reserved`), at the end (`after`); filled at the end."""
    found = {"before": torch.cuda.memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    try:
        yield found
    finally:
        found |= {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "after": torch.cuda.memory_allocated(),
        }


def attention_kernel(
    dtype: torch.dtype, heads: tuple[int, int], length: int, head_dim: int = 128, *, masked_keys: int = 0
) -> str:
    """Return the kernel that scaled_dot_product_attention chooses in training for one row of `length`
    tokens with `heads` of queries and of keys: causal, or with a mask over `masked_keys` keys."""
    (hq, hk), keys = heads, masked_keys or length
    q = torch.empty(1, length, hq, head_dim, device="cuda", dtype=dtype, requires_grad=True).transpose(1, 2)
    k = torch.empty(1, keys, hk, head_dim, device="cuda", dtype=dtype, requires_grad=True).transpose(1, 2)
    mask = torch.ones(length, keys, dtype=torch.bool, device="cuda") if masked_keys else None
    grouped = {"scale": None, "enable_gqa": hq != hk}
    return KERNELS[torch._fused_sdp_choice(q, k, k, mask, 0.0, not masked_keys, **grouped)]


def on_device(model: torch.nn.Module, device: str = "cuda") -> torch.nn.Module:
    """Gives a model that was made on `meta` memory of the device, without values: of any size in `fast`."""
    return model.to_empty(device=device)
