"""What test_gradients.py launches: ZeRO 3 in bf16, one micro-batch a step, gradients kept in fp32 and bf16.

    torchrun … gradient_worker.py OUTPUT.json

Rank 0 writes {type of the sum over ranks: {"by_itself": the type that dsft chooses, "differs": elements of
the fp32 weights and moments of all ranks that differ after the last step, "norms": each way's gradient
norms}}, and on two ranks {"overlapped": {case: elements of the weights and moments that differ between
DeepSpeed's ZeRO 1 or 2, with its all-reduce of whole buckets, and dsft's of several GPUs}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dsft.dist.world import World
from dsft.engine import state
from dsft.engine.join import join
from dsft.engine.optimizer import AdamW
from dsft.engine.reduction import OverlappedZero
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from tests.process_groups import own_groups
from tests.specs import minimal_spec

MODEL: dict[str, Any] = dict(
    vocab_size=61, hidden_size=16, intermediate_size=36, num_hidden_layers=3, num_attention_heads=2
)
ROWS, LENGTH, STEPS = 4, 12, 4
BUCKET = 600
"""Elements: several buckets, and the embeddings are larger than one."""
OVERLAPPED = ((2, "bf16", None), (2, "bf16", "bf16"), (2, "fp32", None), (1, "fp32", None))
CPU: Any = torch.cpu.Stream()


def spec(reduced: str | None, zero_stage: int = 3, precision: str = "bf16") -> Spec:
    return minimal_spec(
        model={"from_config": {"model_type": "llama", **MODEL}},
        parallel={"zero_stage": zero_stage},
        train={"micro_batch_size": ROWS, "reduce_dtype": reduced, "precision": precision},
    )


def trained(
    config: dict[str, Any], world: World, overlapped: bool = False, micro_batches: int = 1
) -> tuple[list[Tensor], list[float]]:
    """This rank's weights and moments after the last step, and each step's gradient norm."""
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**MODEL, tie_word_embeddings=False))
    named = dict(model.named_parameters())
    engine = deepspeed.initialize(
        model=model,
        optimizer=AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True),
        config=config,
        dist_init_required=False,
    )[0]
    if overlapped:
        engine.optimizer.__class__ = OverlappedZero
        engine.optimizer.reduction_stream = CPU
    norms = []
    for number in range(STEPS * micro_batches):
        generator = torch.Generator().manual_seed(100 * number + world.rank)
        rows = torch.randint(0, MODEL["vocab_size"], (ROWS, LENGTH), generator=generator)
        logits = engine(input_ids=rows, use_cache=False).logits[:, :-1].float()
        engine.set_gradient_accumulation_boundary((number + 1) % micro_batches == 0)
        engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
        engine.step()
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    fragments = state.owned_fragments(engine, named, world.shard_rank, world.layout.shards)
    found = [fragment.data.clone() for fragment in fragments]
    engine.destroy()
    return found, norms


def compare(reduced: str, world: World) -> dict[str, Any]:
    made = spec(reduced)
    config = deepspeed_config(made, batch_sizes(made.train, world.world_size))
    config["gradient_clipping"] = 0.1  # below every norm
    config["zero_optimization"] |= {"sub_group_size": 3000, "stage3_param_persistence_threshold": 100}
    by_itself = config["data_types"]["grad_accum_dtype"]
    kept, norms = {}, {}
    for dtype in ("fp32", "bf16"):
        with own_groups():
            kept[dtype], norms[dtype] = trained(config | {"data_types": {"grad_accum_dtype": dtype}}, world)
    return {"by_itself": by_itself, "differs": differing(world, *kept.values()), "norms": norms}


def differing(world: World, these: list[Tensor], those: list[Tensor]) -> float:
    pairs = zip(these, those, strict=True)
    return float(world.sum(torch.tensor(float(sum(int((one != other).sum()) for one, other in pairs)))))


def overlapped(world: World, zero_stage: int, precision: str, reduced: str | None) -> float:
    made = spec(reduced, zero_stage, precision)
    config = deepspeed_config(made, batch_sizes(made.train, world.world_size))
    config["gradient_clipping"] = 0.1
    config["zero_optimization"]["reduce_bucket_size"] = BUCKET
    own = config | {
        "zero_optimization": config["zero_optimization"] | {"use_multi_rank_bucket_allreduce": True}
    }
    kept = []
    for each, is_overlapped in ((own, False), (config, True)):
        with own_groups(), mock.patch.object(type(get_accelerator()), "current_stream", lambda *_: CPU):
            kept.append(trained(each, world, is_overlapped, micro_batches=2)[0])
    return differing(world, *kept)


def main(output: str) -> None:
    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1))
    results: dict[str, Any] = {reduced: compare(reduced, world) for reduced in ("fp32", "bf16")}
    if world.world_size > 1:
        results["overlapped"] = {" ".join(map(str, case)): overlapped(world, *case) for case in OVERLAPPED}
    if world.rank == 0:
        Path(output).write_text(json.dumps(results))
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
