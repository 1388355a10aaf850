"""Milliseconds of the kernels that decide the speed of a step: the case `kernels` of scripts/gpu.

Every line is independent: one that fails has its error in place of figures, and the next one runs. A time is
the median of repetitions, on a GPU by its own events.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu.runs import SEED, device
from dsft.data.steps.batch import Segments

HALF = torch.bfloat16
Line = tuple[str, Callable[[], dict[str, float] | float]]


@dataclass(frozen=True)
class Sizes:
    """Of a step of 1.3 billion parameters, or of a rehearsal. tokens: of a micro-batch; rows: lengths of SDPA
    and varlen; short: segments of instruction data."""

    tokens: int
    hidden: int
    inner: int
    heads: int
    head_dim: int
    vocabulary: int
    rows: tuple[int, ...]
    short: tuple[int, ...]
    repetitions: int


def short_rows(number: int, mean: float) -> tuple[int, ...]:
    draw = random.Random(SEED)
    return tuple(max(8, int(mean * draw.lognormvariate(-0.18, 0.6))) for _ in range(number))


FULL = Sizes(16_384, 2048, 5504, 16, 128, 32_000, (512, 2048, 4096, 8192, 16_384), short_rows(76, 205), 10)
SMALL = Sizes(64, 32, 64, 2, 16, 128, (16, 64), (3, 20, 41), 2)


def measure(is_rehearsal: bool) -> dict[str, Any]:
    """Return {"kernels": {line: milliseconds or figures, or the error}}."""
    torch.manual_seed(SEED)
    found: dict[str, Any] = {}
    for name, work in lines(SMALL if is_rehearsal else FULL):
        try:
            found[name] = work()
        except Exception as error:  # of whatever kernel is not there
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else ""
        print(name, found[name], flush=True)
    return {"kernels": found}


def lines(sizes: Sizes) -> Iterator[Line]:
    """What matters most first: a stage may be cut short."""
    for kernels in ("torch", "liger", "compile"):
        yield f"2 layers, {kernels}", lambda kernels=kernels: layers(sizes, kernels)
    for length in sizes.rows:
        lengths = [length] * max(1, sizes.tokens // length)
        yield f"varlen {len(lengths)}×{length}", lambda lengths=lengths: varlen(sizes, lengths, lengths[0])
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            yield (
                f"SDPA {name} {len(lengths)}×{length}",
                lambda backend=backend, lengths=lengths: dense(sizes, lengths, backend),
            )
    longest = max(sizes.short)
    for most in (sizes.tokens // 4, longest, 2 ** (longest - 1).bit_length()):
        yield (
            f"varlen {len(sizes.short)} short rows, max {most}",
            lambda most=most: varlen(sizes, sizes.short, max(most, longest)),
        )
    yield "cuDNN, plan of one new length", lambda: new_length(sizes)
    h, i, t = sizes.hidden, sizes.inner, sizes.tokens
    for m, n, k in ((t, h, h), (t, i, h), (t, h, i), (i, h, t)):
        yield f"matmul {m}×{n}×{k}", lambda m=m, n=n, k=k: matmul(sizes, m, n, k)
    for kind in ("triton", "torch"):
        yield f"softmax of the head, {kind}", lambda kind=kind: softmax(sizes, kind)
    yield "fused AdamW", lambda: adamw(sizes)


def milliseconds(work: Callable[[], object], repetitions: int) -> float:
    """The median."""
    for _ in range(min(3, repetitions)):
        work()
    if device() == "cpu":
        spent = []
        for _ in range(repetitions):
            began = time.perf_counter()
            work()
            spent.append(1000 * (time.perf_counter() - began))
    else:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize()
        spent = [first.elapsed_time(second) for first, second in zip(marks, marks[1:], strict=False)]
    return sorted(spent)[len(spent) // 2]


def both_passes(attend: Callable[..., Any], tensors: Sequence[Any], repetitions: int) -> dict[str, float]:
    pull = torch.randn_like(attend(*tensors))

    def forward() -> None:
        with torch.no_grad():
            attend(*tensors)

    return {
        "forward": milliseconds(forward, repetitions),
        "both": milliseconds(lambda: torch.autograd.grad(attend(*tensors), list(tensors), pull), repetitions),
    }


def random_tensors(*shape: int, dtype: torch.dtype = HALF) -> list[Any]:
    return [torch.randn(*shape, device=device(), dtype=dtype, requires_grad=True) for _ in range(3)]


def varlen(sizes: Sizes, lengths: Sequence[int], longest: int) -> dict[str, float]:
    parameters = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    borders = torch.tensor([0, *lengths], device=device()).cumsum(0).int()

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attn(q, k, v, borders, borders, longest, longest, **causal)

    tensors = random_tensors(sum(lengths), sizes.heads, sizes.head_dim)
    return both_passes(attend, tensors, sizes.repetitions)


def dense(sizes: Sizes, lengths: Sequence[int], backend: SDPBackend) -> dict[str, float]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    tensors = random_tensors(len(lengths), sizes.heads, lengths[0], sizes.head_dim)
    return both_passes(attend, tensors, sizes.repetitions)


def new_length(sizes: Sizes) -> float:
    """What a length that cuDNN has not seen costs, forward and backward: the median of eight."""
    spent = []
    for length in range(sizes.tokens // 5, sizes.tokens // 5 + 8):
        q, k, v = random_tensors(1, sizes.heads, length, sizes.head_dim)
        began = time.perf_counter()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        if device() != "cpu":
            torch.cuda.synchronize()
        spent.append(1000 * (time.perf_counter() - began))
    return sorted(spent)[len(spent) // 2]


def matmul(sizes: Sizes, m: int, n: int, k: int) -> dict[str, float]:
    a, b, _ = (torch.randn(*shape, device=device(), dtype=HALF) for shape in ((m, k), (k, n), (1, 1)))
    spent = milliseconds(lambda: a @ b, sizes.repetitions)
    return {"ms": spent, "tflops": 2 * m * n * k / spent / 1e9}


def softmax(sizes: Sizes, kind: str) -> dict[str, float]:
    from dsft.model.softmax import Softmax

    own = Softmax()
    if kind == "triton":
        from dsft.model.softmax_kernel import TritonSoftmax

        own = TritonSoftmax(own.shaping, 0.0)
    rows = sizes.tokens // 4
    product = torch.randn(rows, sizes.vocabulary, device=device())
    targets = torch.randint(sizes.vocabulary, (rows,), device=device())
    return {"ms": milliseconds(lambda: own.values(product, targets, HALF), sizes.repetitions)}


def layers(sizes: Sizes, kernels: str) -> dict[str, float]:
    """Forward and backward of two layers over a packed micro-batch of four documents."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dsft.model.attention import SHAPES, attend_per_segment, packed_keywords
    from dsft.model.build import compile_layers
    from dsft.model.kernels import choose_kernels

    length = sizes.tokens // 4
    config = AutoConfig.for_model(
        "llama", hidden_size=sizes.hidden, intermediate_size=sizes.inner, num_hidden_layers=2,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads, vocab_size=512,
        max_position_embeddings=sizes.tokens,
    )  # fmt: skip
    with torch.device(device()):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=HALF).train()
    attend_per_segment(model, "auto", length, torch.device(device(), 0))
    if kernels == "liger":
        choose_kernels(model, "liger")
    if kernels == "compile":
        compile_layers(model)
    ids = torch.randint(512, (1, sizes.tokens), device=device())
    positions = torch.arange(length, device=device()).repeat(4)[None]
    kind, shapes = model.config._attn_implementation, getattr(model, SHAPES)
    keywords = packed_keywords(kind, positions, Segments((length,) * 4), shapes)

    def work() -> None:
        model.zero_grad()
        output = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **keywords)
        output.last_hidden_state.sum().backward()

    return {"ms": milliseconds(work, max(2, sizes.repetitions // 2))}


def adamw(sizes: Sizes) -> dict[str, float]:
    """28 bytes are read and written for each parameter."""
    parameters = sizes.hidden * sizes.inner * 32
    weight = torch.zeros(parameters, device=device())
    weight.grad = torch.zeros_like(weight)
    spent = milliseconds(torch.optim.AdamW([weight], lr=1e-3, fused=True).step, sizes.repetitions)
    return {"ms": spent, "tb_s": 28 * parameters / spent / 1e9}
