"""What attention over packed rows asks of a GPU, counted on the stand-in, whose kernels compute nothing.

Prints one JSON object. Takes the sizes of a Llama of 1.3 billion parameters, of which few layers are made."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dsft.data.steps.batch import MicroBatch
from dsft.model.attention import attend_per_segment
from dsft.model.policy import Policy, behind_inputs

GPU = torch.device("cuda", 0)
COUNTS = ("launches", "products", "fills", "to_device", "to_host", "on_device", "pageable")
SYNCS = ("stream_syncs", "device_syncs", "event_syncs")
LAYERS = (2, 4)
TOKENS = 4096
ROWS = {"1": [TOKENS], "20": [205] * 19 + [201], "41": [102] * 40 + [16]}
PAIRS = 10  # that share their prompt, of as many tokens together
KERNELS = {-1: "none", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def counters() -> dict[str, int]:
    library = ctypes.CDLL("libcudart.so.13")
    found = (ctypes.c_long * 10).in_dll(library, "standin_counts")
    return dict(zip((*COUNTS, *SYNCS), found, strict=True))


def model(layers: int, key_heads: int, dtype: torch.dtype = torch.bfloat16, **keys: Any) -> PreTrainedModel:
    given = {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": key_heads, "max_position_embeddings": TOKENS,
    }  # fmt: skip
    kind = keys.pop("kind", "llama")
    with GPU:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind](**given | keys), dtype=dtype
        )
    return made


def packed(lengths: Sequence[int], starts: Sequence[int] | None = None) -> MicroBatch:
    positions = [torch.arange(s, s + n) for n, s in zip(lengths, starts or [0] * len(lengths), strict=True)]
    ids = torch.zeros(1, sum(lengths), dtype=torch.int64)
    told = None if starts is None else tuple(starts)
    return MicroBatch(ids, torch.cat(positions)[None], ids, tuple(lengths), starts=told).to(GPU)


def passed(policy: Policy, batch: MicroBatch) -> Callable[[], None]:
    def run() -> None:
        policy(batch.input_ids, *behind_inputs(batch)).sum().backward()
        policy.zero_grad(set_to_none=True)

    return run


def counted(run: Callable[[], None]) -> dict[str, float]:
    """Of the third pass: a first one fills caches, as of rotary tables."""
    run()
    best = float("inf")
    for _ in range(4):
        before, begun = counters(), time.process_time()
        run()
        best = min(best, time.process_time() - begun)
        after = counters()
    return {name: after[name] - before[name] for name in after} | {"host_ms": best * 1e3}


def per_layer(attention: str, key_heads: int, batch: MicroBatch) -> dict[str, float]:
    """Forward and backward of one layer, and the waits of a whole pass."""
    found = []
    for layers in LAYERS:
        policy = Policy(model(layers, key_heads).train())
        attend_per_segment(policy.causal_lm, attention, TOKENS, GPU)
        found.append(counted(passed(policy, batch)))
    few, more = found
    layer = {name: (more[name] - few[name]) / (LAYERS[1] - LAYERS[0]) for name in few}
    return layer | {"syncs": sum(more[name] for name in SYNCS)}


def launches() -> dict[str, Any]:
    answers = [n for _ in range(PAIRS) for n in (200, 201)]
    layouts = {name: packed(lengths) for name, lengths in ROWS.items()}
    layouts["pairs"] = packed(answers, [n for _ in range(PAIRS) for n in (0, 99)])
    return {
        f"{attention} {key_heads} {name}": per_layer(attention, key_heads, batch)
        for attention, key_heads, (name, batch) in product(("auto", "sdpa"), (16, 4), layouts.items())
    }


def kernel(dtype: torch.dtype, key_heads: int, size: int, mask: bool) -> str:
    """What torch takes for a segment of 200 tokens."""
    query, key = (
        torch.empty(1, heads, 200, size, dtype=dtype, device=GPU, requires_grad=True)
        for heads in (8, key_heads)
    )
    seen = torch.ones(200, 200, dtype=torch.bool, device=GPU) if mask else None
    chosen = torch._fused_sdp_choice(
        query, key, key, seen, 0.0, not mask, scale=None, enable_gqa=key_heads != 8
    )
    return KERNELS[chosen]


def kernels() -> dict[str, str]:
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return {
        f"{name} {key_heads} {size} {'mask' if mask else 'causal'}": kernel(dtype, key_heads, size, mask)
        for (name, dtype), key_heads, size, mask in product(
            types.items(), (8, 2), (64, 80, 128, 256), (False, True)
        )
    }


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """The kernels of attention that are called; a softmax by itself belongs to attention without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in func.__name__ for part in ("attention", "attn", "_softmax")):
            self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def models() -> dict[str, Any]:
    """What is chosen for whole models, and which kernels a pass then calls."""
    cases: dict[str, tuple[dict[str, Any], torch.dtype]] = {
        "llama bf16": ({}, torch.bfloat16),
        "llama fp16": ({}, torch.float16),
        "llama fp32": ({}, torch.float32),
        "mistral bf16": ({"kind": "mistral", "sliding_window": 64}, torch.bfloat16),
        "mistral fp32": ({"kind": "mistral", "sliding_window": 64}, torch.float32),
        "gemma2 bf16": ({"kind": "gemma2", "head_dim": 128}, torch.bfloat16),
        "gemma3 bf16": ({"kind": "gemma3_text", "head_dim": 256, "sliding_window": 64}, torch.bfloat16),
        "heads of 12": ({"head_dim": 12}, torch.bfloat16),
        "heads of 512": ({"head_dim": 512}, torch.bfloat16),
        "dropout": ({"attention_dropout": 0.1}, torch.bfloat16),
    }
    found = {}
    batch = packed((200, 120, 30), (0, 99, 0))
    for name, (keys, dtype) in cases.items():
        policy = Policy(model(2, 4, dtype, **keys).train())
        said = attend_per_segment(policy.causal_lm, "auto", 256, GPU)
        with Seen() as seen:
            passed(policy, batch)()
        found[name] = {"said": said, "kernels": sorted(seen.names)}
    return found


def main() -> None:
    torch.backends.cuda.enable_cudnn_sdp(sys.argv[1:] == ["cudnn"])
    print(json.dumps({"kernels": kernels(), "models": models(), "launches": launches()}))


if __name__ == "__main__":
    main()
