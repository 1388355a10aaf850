"""Print what a step of training asks of the stand-in GPU, and what a layer adds to it, as a table for
docs/performance.md. bf16 on one rank, ZeRO 2, rows of 380 tokens in 1, 20 and 76 segments, with and without
gradient checkpointing; then kernels and bytes of the modules of a layer that Liger's kernels replace.

    STANDIN_MODE=numbers scripts/standin run python -m tests.standin.counts
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from deepspeed.utils import groups
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama

from dsft.data.steps.batch import NO_TARGET, GlobalStep
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.comm_timer import CommunicationTimer
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.model.attention import attend_per_segment
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts
from dsft.objective.next_token import next_token
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.run.loop import Progress, Schedule, fit
from dsft.run.trainer import watch_hosts
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from tests.make import make_micro_batch
from tests.specs import minimal_spec
from tests.standin import inside
from tests.standin.step_worker import Counting
from tests.trainers import PlainTrainer

VOCABULARY, TOKENS, HIDDEN = 64, 380, 64
LAYERS = (2, 4)
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": VOCABULARY,
}  # fmt: skip
COUNTED, LAST = 4, 5
"""The step that is counted, and the last one."""
KINDS = (
    "launches", "products", "on_device", "to_device", "to_host", "stream_syncs", "event_syncs",
    "device_syncs", "bytes",
)  # fmt: skip


class Rows:
    """Steps of packed rows, on the device as they are made."""

    def __init__(self, device: torch.device, micro_batches: int, segments: int) -> None:
        self.device, self.micro_batches, self.segments = device, micro_batches, segments

    def step(self, index: int) -> GlobalStep:
        length = TOKENS // self.segments
        ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(index))
        targets, positions = ids.roll(-1, 1), torch.arange(length).repeat(self.segments)[None]
        targets[:, length - 1 :: length] = NO_TARGET
        batch = make_micro_batch(ids, positions, targets, (length,) * self.segments)
        rows = tuple(batch.to(self.device) for _ in range(self.micro_batches))
        trained = self.micro_batches * (TOKENS - self.segments)
        return GlobalStep(rows, {"tokens": trained}, self.micro_batches * TOKENS, 0.0, ())


def step(world: World, layers: int, micro_batches: int, segments: int, checkpointing: bool) -> dict[str, int]:
    """Return what one step asks of the device, and the bytes that its operations but AdamW's read and
    write."""
    spec = minimal_spec(
        model={
            "from_config": LLAMA | {"num_hidden_layers": layers},
            "gradient_checkpointing": checkpointing,
            "kernels": "torch",
        },
        parallel={"zero_stage": 2},
        train={"accumulation_steps": micro_batches, "precision": "bf16", "max_steps": 1},
    )
    config, facts = deepspeed_config(spec, batch_sizes(spec.train, 1)), TokenFacts(VOCABULARY, 1, 2, None)
    policy = build_model(spec.model, facts, 1, torch.bfloat16, Part(sharding=sharding_for(config, world)))
    attend_per_segment(policy.causal_lm, "auto", TOKENS, world.device)
    engine, counting = build_engine(policy, spec, config, world, next_token()), Counting()
    waits = CommunicationTimer(world.device)
    watch = watch_hosts(world, waits, print)
    trainer = PlainTrainer(next_token(), world, lambda record: None, waits, watch=watch)
    trainer.ask = counting.ask  # type: ignore[method-assign]
    rows = Rows(world.device, micro_batches, segments)
    schedule = Schedule(LAST, 1, None, None, lambda step: 1e-3, 3, seed=1)
    fit(engine, rows, schedule, trainer, Progress(applied_steps=1))
    given = rows.step(LAST)
    with inside.Moved() as moved:
        engine.step(given.micro_batches, given.counts, 1e-3)
    engine._engine.destroy()  # type: ignore[attr-defined]
    groups.mpu = None
    gc.collect()
    return dict(counting.steps[COUNTED - 1]) | {"bytes": moved.bytes}


def modules() -> dict[str, tuple[int, Callable[..., Any], list[torch.Tensor]]]:
    """Return what Liger's kernels replace, by name: elements that it computes, the function and its
    inputs."""
    heads, width = (4, 2), HIDDEN // 4

    def made(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    norm = llama.LlamaRMSNorm(HIDDEN).to("cuda", torch.bfloat16)
    turned = llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=HIDDEN, num_attention_heads=4)).to("cuda")
    places = torch.arange(TOKENS, device="cuda")[None]
    queries, keys = (made(1, TOKENS, number, width).transpose(1, 2) for number in heads)
    cos, sin = turned(queries, places)
    gate, up, rows = made(1, TOKENS, 2 * HIDDEN), made(1, TOKENS, 2 * HIDDEN), made(1, TOKENS, HIDDEN)
    return {
        "RMSNorm": (rows.numel(), lambda x, _: norm(x), [rows, norm.weight]),
        "RoPE of queries and keys": (
            queries.numel() + keys.numel(),
            lambda q, k: llama.apply_rotary_pos_emb(q, k, cos, sin),
            [queries, keys],
        ),
        "SiLU and product of SwiGLU": (
            gate.numel(),
            lambda g, u: torch.nn.functional.silu(g) * u,
            [gate, up],
        ),
    }


def passes(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[tuple[int, int]]:
    """(kernels, bytes read and written) of the forward and of the backward pass."""
    found, out, pull = [], None, None
    for _ in range(2):
        with inside.counted() as counts, inside.Moved() as moved:
            if out is None:
                out = function(*inputs)
            else:
                torch.autograd.grad(out, inputs, pull)
        found.append((counts["launches"] + counts["on_device"], moved.bytes))
        pull = [torch.ones_like(x) for x in (out if isinstance(out, tuple) else (out,))]
    return found


def line(*cells: Any) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    world = join(detect(os.environ), Layout(1, 1))
    torch.backends.cuda.enable_cudnn_sdp(False)
    line("micro-batches", "segments", "checkpointing", *(f"{kind}: step, layer" for kind in KINDS))
    rows_found: list[dict[str, Any]] = []
    for checkpointing, micro_batches, segments in product((False, True), (1, 2), (1, 20, 76)):
        few, many = (step(world, layers, micro_batches, segments, checkpointing) for layers in LAYERS)
        layer = {kind: (many[kind] - few[kind]) / (LAYERS[1] - LAYERS[0]) for kind in KINDS}
        cells = [f"{few[kind]}, {layer[kind]:g}" for kind in KINDS]
        line(micro_batches, segments, "yes" if checkpointing else "no", *cells)
        rows_found.append({"case": [checkpointing, micro_batches], "step": few, "layer": layer})
    line("module", "kernels: forward, backward", "bytes an element: forward, backward")
    kernels = {}
    for name, (elements, function, inputs) in modules().items():
        (forward, moved), (backward, more) = passes(function, inputs)
        line(name, f"{forward}, {backward}", f"{moved / elements:.1f}, {more / elements:.1f}")
        kernels[name] = forward + backward
    inside.report({"steps": rows_found, "modules": kernels})
    world.close()


if __name__ == "__main__":
    main()
