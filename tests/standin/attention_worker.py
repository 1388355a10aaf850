"""Runs over the stand-in GPU in fast mode: reports what attention over packed rows asks of the device.

`kernels`: what torch chooses for one segment; `cudnn`: the same with cuDNN switched on; `models`: what whole
models call; `launches`: what a layer launches, of the sizes of a Llama of 1.3 billion parameters; `shapes`:
what rows of one length call, and others; `on Ampere`: the same of compute capability 8.0."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, masking_utils

from dsft.data.steps.batch import MicroBatch
from dsft.model import attention_choice
from dsft.model.attention import attend_padded, attend_per_segment
from dsft.model.older import checkpoint_activations
from dsft.model.policy import Policy
from tests.make import forward, make_micro_batch
from tests.specs import dims
from tests.standin.inside import attention_kernel, counted, in_fork, report, waits

attention_choice.differ = lambda _: False  # kernels that compute nothing give no numbers
GPU = torch.device("cuda", 0)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = 4096
ROWS = {"1": [TOKENS], "20": [205] * 19 + [201], "41": [102] * 40 + [16]}
PAIRS = 10  # answers to one prompt of 99 tokens, of 4,010 tokens together

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"kind": "mistral", "sliding_window": 64},
    "gemma2": {"kind": "gemma2", "head_dim": 128},
    "gemma3": {"kind": "gemma3_text", "head_dim": 256, "sliding_window": 64},
    "heads of 12": {"head_dim": 12},
    "heads of 512": {"head_dim": 512},
    "dropout": {"attention_dropout": 0.1},
}


def kernels(cudnn: bool) -> dict[str, str]:
    """Return the choice by type, heads of keys of 8, size of a head and mask."""
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    cases = product(TYPES.items(), (8, 2), (64, 80, 128, 256), (False, True))
    return {
        f"{name} {heads} {size} {'masked' if masked else 'causal'}": attention_kernel(
            dtype, (8, heads), 200, size, masked_keys=300 * masked
        )
        for (name, dtype), heads, size, masked in cases
    }


def policy_of(layers: int, key_heads: int, dtype: torch.dtype, **keys: Any) -> Policy:
    given = dims(2048, 5504, layers, 16, key_heads, vocab_size=32000, max_position_embeddings=TOKENS)
    kind = keys.pop("kind", "llama")
    with GPU:
        made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**given | keys), dtype=dtype)
    return Policy(made.train())


def packed(lengths: Sequence[int], starts: Sequence[int] | None = None) -> MicroBatch:
    positions = [torch.arange(s, s + n) for n, s in zip(lengths, starts or [0] * len(lengths), strict=True)]
    ids = torch.zeros(1, sum(lengths), dtype=torch.int64)
    firsts = None if starts is None else tuple(starts)
    return make_micro_batch(ids, torch.cat(positions)[None], ids, tuple(lengths), starts=firsts).to(GPU)


def run(policy: Policy, batch: MicroBatch) -> None:
    """Forward and backward."""
    forward(policy, batch).logps.sum().backward()
    policy.zero_grad(set_to_none=True)


class Seen(TorchDispatchMode):
    """The kernels of attention that are called; a softmax by itself belongs to attention without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in func.__name__ for part in ("attention", "attn", "_softmax")):
            self.names.add(func.__name__.partition(".")[0].removesuffix("_backward"))
        return func(*args, **(kwargs or {}))


def models() -> dict[str, Any]:
    found, batch = {}, packed((200, 120, 30), (0, 99, 0))
    for (name, keys), dtype in product(CASES.items(), ("bf16", "fp32")):
        policy = policy_of(2, 4, TYPES[dtype], **keys)
        attend_per_segment(policy.causal_lm, "auto", 256, GPU)
        with Seen() as seen:
            run(policy, batch)
        found[f"{name} {dtype}"] = sorted(seen.names)
    return found


def launches() -> dict[str, Any]:
    """Launches of forward and backward of one layer, and the waits of a whole pass."""
    answers = [n for _ in range(PAIRS) for n in (200, 201)]
    layouts = {name: packed(lengths) for name, lengths in ROWS.items()}
    layouts["pairs"] = packed(answers, [n for _ in range(PAIRS) for n in (0, 99)])
    found: dict[str, Any] = {}
    for attention, key_heads in product(("auto", "sdpa"), (16, 4)):
        policies = [policy_of(layers, key_heads, torch.bfloat16) for layers in (2, 4)]
        for policy in policies:
            attend_per_segment(policy.causal_lm, attention, TOKENS, GPU)
        for name, batch in layouts.items():
            counts = []
            for policy in policies:
                run(policy, batch)  # fills caches
                with counted() as one, waits() as places:
                    run(policy, batch)
                counts.append(one)
            ((few, more),) = pairwise(counts)
            found[f"{attention} {key_heads} {name}"] = {
                "launches": (more["launches"] - few["launches"]) / 2,
                "syncs": sum(more[kind] for kind in ("stream_syncs", "device_syncs", "event_syncs")),
                "to_device": more["to_device"],
                "waits": places,
            }
    return found


# --- by the lengths of the segments ---------------------------------------------------------------------

LAYOUTS: dict[str, tuple[Sequence[int], Sequence[int] | None]] = {
    "four of 1024": ([1024] * 4, None),
    "one of 512": ([512], None),
    "four of the longest": ([1000] * 4, None),  # data.max_length of this case
    "four of 1001": ([1001] * 4, None),
    "unequal": ([1024, 1024, 512], None),
    "pairs": ([512, 512, 512, 512], [0, 256, 0, 256]),
    "short": ([100, 130], None),
}

WINDOWED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"kind": "mistral", "sliding_window": 600},
    "gemma3": {
        "kind": "gemma3_text", "head_dim": 128, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


class Cudnn:
    """cuDNN's operations, which its library here cannot compute: notes the shapes that get plans."""

    def __init__(self) -> None:
        self.shapes = set[tuple[int, int]]()
        self._library = torch.library.Library("aten", "IMPL")
        name = "_scaled_dot_product_cudnn_attention"
        self._library.impl(name, self.forward, "CUDA")
        self._library.impl(
            f"{name}_backward", lambda _, *qkv, **__: tuple(map(torch.empty_like, qkv[:3])), "CUDA"
        )

    def forward(self, query: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        rows, _, length, _ = query.shape
        self.shapes.add((rows, length))
        sums, seed = query.new_empty(query.shape[:3], dtype=torch.float32), torch.empty((), dtype=torch.int64)
        return torch.empty_like(query), sums, None, None, length, length, seed, seed, None


class Bounds(TorchDispatchMode):
    """The longest segment that varlen_attn is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "_varlen_attn.default":
            self.found.add(args[5])
        return func(*args, **(kwargs or {}))


def shapes() -> dict[str, Any]:
    """Return what is called by model and layout, in training with checkpointing; the line of the start;
    how many plans rows of many shapes need, and what bounds segments of many lengths have; what padded
    rows call."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `join` does
    policy = policy_of(2, 4, torch.bfloat16)
    found: dict[str, Any] = {"cuDNN fails": attend_per_segment(policy.causal_lm, "auto", TOKENS, GPU)}
    cudnn = Cudnn()
    attention_choice._cudnn_failed.clear()
    for name, keys in WINDOWED.items():
        policy = policy_of(2, 4, torch.bfloat16, **keys)
        checkpoint_activations(policy.causal_lm)
        found[name] = {"line": attend_per_segment(policy.causal_lm, "auto", 1000, GPU)}
        run(policy, packed([8]))  # fills caches
        for layout, (lengths, starts) in LAYOUTS.items():
            batch = packed(lengths, starts)
            with Seen() as seen, counted() as counts, waits() as places:
                run(policy, batch)
            waited = sum(
                counts[kind] for kind in ("stream_syncs", "device_syncs", "event_syncs", "to_device")
            )
            found[name][layout] = {"kernels": sorted(seen.names), "waits": {**places} or waited}
    policy = policy_of(1, 4, torch.bfloat16)
    attend_per_segment(policy.causal_lm, "auto", TOKENS, GPU)
    cudnn.shapes.clear()
    with Seen() as seen, Bounds() as bounds:
        for rows, length in product((1, 2), range(256, 2561, 256)):
            run(policy, packed([length] * rows))
        for longest in (1, 2, 100, 129, 500, 511, 512, 513, 1025, 3000, 4096):
            run(policy, packed([longest, longest // 2 + 1]))
    found["plans"], found["bounds"] = sorted(cudnn.shapes), sorted(bounds.found)
    masking_utils.find_packed_sequence_indices = lambda *_: None  # what it computes here is no number
    policy = policy_of(2, 4, torch.bfloat16, attn_implementation="sdpa")
    found["padded"] = {"line": attend_padded(policy.causal_lm, 1000, GPU)}
    for rows, length in ((4, 1024), (2, 1000), (2, 1001)):
        with Seen() as seen:
            run(policy, make_micro_batch(*[torch.arange(length).repeat(rows, 1)] * 3).to(GPU))
        found["padded"][f"{rows} of {length}"] = sorted(seen.names)
    found["left on"] = torch.backends.cuda.cudnn_sdp_enabled()
    return found


if __name__ == "__main__":
    on_ampere = in_fork(shapes, STANDIN_CAPABILITY="8.0")
    chosen = {"cudnn": kernels(True), "kernels": kernels(False)}
    report(chosen | {"models": models(), "launches": launches(), "shapes": shapes(), "on Ampere": on_ampere})
