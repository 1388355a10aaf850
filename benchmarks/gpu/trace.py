"""Sums a step's trace (dsft/train.py --profile) by kind of kernel: the case `profile` of scripts/gpu."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KINDS = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|sendrecv"),
    ("attention", r"flash|fmha|attention|attn|cudnn.*sdpa"),
    ("GEMM", r"gemm|cutlass|cublas|xmma|wgmma|matmul|nvjet|splitk"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("norms, rotary, SwiGLU (Liger)", r"rms_norm|rope|swiglu|_silu|liger"),
    ("copies", r"memcpy|memset|copy_kernel|copy_device"),
    ("softmax", r"softmax|_score"),
    ("reductions", r"reduce"),
    ("elementwise", r"elementwise|vectorized|index|triton|fused|cat|gather|scatter"),
)
"""Kind -> words in the name of a kernel. The first one that matches counts; what none does is "other"."""


MOST = 40
"""Kernels that `longest` names."""


def kernels_of(trace: Path) -> list[dict[str, Any]]:
    """Return a trace's kernels and copies; none on a CPU."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def longest(kernels: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the start of a kernel's name -> [milliseconds, launches], of those that took most."""
    spent: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for one in kernels:
        name = one["name"][:140]
        spent[name] += one["dur"] / 1000
        launches[name] += 1
    return {name: [round(ms, 3), launches[name]] for name, ms in spent.most_common(MOST)}


def by_kind(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of each kind, and of "gaps": between the first kernel and the last, when none
    ran. Empty without kernels."""
    if not kernels:
        return {}
    found: Counter[str] = Counter()
    for one in kernels:
        found[kind_of(one["name"])] += one["dur"] / 1000
    spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in kernels)
    whole = (max(end for _, end in spans) - spans[0][0]) / 1000
    return dict(found.most_common()) | {"gaps": whole - busy(spans) / 1000}


def kind_of(kernel: str) -> str:
    return next((kind for kind, words in KINDS if re.search(words, kernel, re.IGNORECASE)), "other")


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the spans, sorted by their beginning, was running."""
    total, until = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def only_trace(folder: Path) -> Path:
    found: list[Any] = sorted(folder.glob("trace-step-*.json"))
    if len(found) != 1:
        raise RuntimeError(f"{folder} has {len(found)} traces, not one")
    return Path(found[0])
