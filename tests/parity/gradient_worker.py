"""What test_gradients.py launches: ZeRO 3 in bf16, one micro-batch a step, gradients kept in fp32 and bf16.

    torchrun … gradient_worker.py OUTPUT.json

Rank 0 writes {type of the sum over ranks: {"by_itself": the type that dsft chooses, "differs": elements of
the fp32 weights and moments of all ranks that differ after the last step, "norms": each way's gradient
norms}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dsft.engine import state
from dsft.engine.world import World, join
from dsft.plan.batch import batch_sizes
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.layout import Layout
from dsft.rank.environment import detect
from dsft.spec.schema import Spec
from tests.process_groups import own_groups

MODEL: dict[str, Any] = dict(
    vocab_size=61, hidden_size=16, intermediate_size=36, num_hidden_layers=3, num_attention_heads=2
)
ROWS, LENGTH, STEPS = 4, 12, 4


def spec(reduced: str) -> Spec:
    values: dict[str, Any] = {
        "name": "small",
        "task": "pretrain",
        "model": {"from_config": {"model_type": "llama", **MODEL}},
        "data": {"train": [{"path": "builtin:quickstart"}]},
        "parallel": {"zero_stage": 3},
        "train": {"micro_batch_size": ROWS, "accumulation_steps": 1, "reduce_dtype": reduced},
        "optim": {"learning_rate": 1e-3},
    }
    return Spec.model_validate(values)


def trained(config: dict[str, Any], world: World) -> tuple[list[Tensor], list[float]]:
    """This rank's weights and moments after the last step, and each step's gradient norm."""
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**MODEL, tie_word_embeddings=False))
    named = dict(model.named_parameters())
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True),
        config=config,
        dist_init_required=False,
    )[0]
    norms = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + world.rank)
        rows = torch.randint(0, MODEL["vocab_size"], (ROWS, LENGTH), generator=generator)
        logits = engine(input_ids=rows, use_cache=False).logits[:, :-1].float()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
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
    pairs = zip(kept["fp32"], kept["bf16"], strict=True)
    differs = torch.tensor(float(sum(int((one != other).sum()) for one, other in pairs)))
    return {"by_itself": by_itself, "differs": float(world.sum(differs)), "norms": norms}


def main(output: str) -> None:
    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1))
    results = {reduced: compare(reduced, world) for reduced in ("fp32", "bf16")}
    if world.rank == 0:
        Path(output).write_text(json.dumps(results))
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
