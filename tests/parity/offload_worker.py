"""What test_offload.py launches on two ranks: DeepSpeed's pipeline with a tied embedding, by itself and with
dsft's sum of the copies' gradients, and what a rank reads of parameters that stay in host memory.

    offload_worker.py OUTPUT.json

Rank 0 writes {"apart": {case: the copies' largest difference after three steps}, "moved": {case: how far the
first stage's copy came}, "spans": of each rank, what it reads of 10 elements}.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from dsft.dist.world import World
from dsft.engine.join import join
from dsft.engine.ops import load_op
from dsft.engine.partition import sharding_for
from dsft.engine.pipeline import find_ties, tie
from dsft.rank.environment import detect
from dsft.spec.layout import Layout

WORDS, WIDTH, STEPS, MICRO_BATCHES = 31, 8, 3, 2
CASES: dict[str, dict[str, Any]] = {
    "offload": dict(offload=True),  # the one that loses them
    "offload, gradients kept in the type of the weights": dict(offload=True, kept="bf16"),
    "on the device": dict(offload=False),
    "offload, dsft": dict(offload=True, by_dsft=True),
}


def main(output: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    world = join(detect(os.environ), Layout(2, 2))
    spans = world.gather(sharding_for(in_host_memory(), world).span(10))  # before any pipeline
    found = {name: copies(world, **case) for name, case in CASES.items()}
    if world.rank == 0:
        apart, moved = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
        output.write_text(json.dumps({"apart": apart, "moved": moved, "spans": spans}))
    world.close()


def in_host_memory() -> dict[str, Any]:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


def copies(world: World, offload: bool, kept: str = "fp32", by_dsft: bool = False) -> tuple[float, float]:
    """Return how far the two copies are apart after STEPS in bf16 at ZeRO 1, and how far the first came."""
    torch.manual_seed(0)
    engine: Any = deepspeed.initialize(
        model=pipeline(),
        optimizer=lambda parameters: optimizer(parameters, offload),
        config=config(offload, kept),
        dist_init_required=False,
    )[0]
    weight = engine.module.tied_modules["embed"].weight
    start = weight.detach().float().clone()
    if by_dsft:
        tie(engine, find_ties({"embed": weight}, world), world.shard_rank)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        rows = [torch.randint(0, WORDS, (2, 5), generator=draw) for _ in range(MICRO_BATCHES)]
        engine.train_batch(iter([(row[:, :-1], row[:, 1:]) for row in rows]))
    first, last = world.gather(weight.detach().float())
    engine.destroy()
    deepspeed.utils.groups.mpu = None
    gc.collect()
    return float((first - last).abs().max()), float((first - start).abs().max()) if world.rank == 0 else 0.0


def pipeline() -> PipelineModule:
    layers = [
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=head),
    ]
    return PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")


def head(embedding: nn.Embedding, hidden: Tensor) -> Tensor:
    return hidden @ embedding.weight.T


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def optimizer(parameters: Any, offload: bool) -> torch.optim.Optimizer:
    if offload:
        load_op(CPUAdamBuilder(), print)
    kind = deepspeed.ops.adam.DeepSpeedCPUAdam if offload else torch.optim.AdamW
    return kind(list(parameters), lr=1e-2)


def config(offload: bool, kept: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 1}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": kept},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
