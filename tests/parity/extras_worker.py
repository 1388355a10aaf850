"""What test_extras.py launches: a policy that returns an extra, and an objective one of whose terms reads it.

    torchrun … extras_worker.py OUTPUT.json

Rank 0 writes {ZeRO stage: {"apart": the largest difference of a weight's step from plain PyTorch's, "step":
the largest step of a weight, "sums": the engine's sums over all ranks, "plain": those of PyTorch}}."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from dsft.data.steps.batch import MicroBatch
from dsft.engine.build import build_engine
from dsft.engine.partition import sharding_for
from dsft.engine.world import World, join
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy, PolicyOutput
from dsft.objective.api import Objective, Term
from dsft.objective.next_token import next_token
from dsft.plan.batch import batch_sizes
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.layout import Layout
from dsft.rank.environment import detect
from dsft.spec.schema import Spec
from tests.process_groups import own_groups

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
FACTS = TokenFacts(64, 0, 1, 2)
ROWS, LENGTH, MICRO_BATCHES, WEIGHT = 2, 8, 2, 0.25
OBJECTIVE = Objective(
    terms=(Term("rows", WEIGHT, "size", extra="size"), *next_token().terms),
    sums=next_token().sums,
    uniform=True,
)


class Sized(Policy):
    """Returns the squares of what goes into the head, (B, T) of each position, whose gradient reaches the
    weights on a way of its own."""

    def forward(self, *inputs: Any) -> PolicyOutput:
        found: list[Tensor] = []
        hook = self.causal_lm.base_model.register_forward_hook(
            lambda module, given, output: found.append(output.last_hidden_state)
        )
        try:
            scored = super().forward(*inputs)
        finally:
            hook.remove()
        assert isinstance(scored, PolicyOutput)
        return scored._replace(extras={"size": found[0].square().sum(-1)})


def rows(world_size: int) -> list[list[Tensor]]:
    """Of each rank its micro-batches."""
    draw = torch.Generator().manual_seed(7)
    return [
        [torch.randint(3, 64, (ROWS, LENGTH), generator=draw) for _ in range(MICRO_BATCHES)]
        for _ in range(world_size)
    ]


def counts(world_size: int) -> dict[str, int]:
    number = world_size * MICRO_BATCHES * ROWS
    return {"rows": number, "tokens": number * (LENGTH - 1)}


def laid(ids: Tensor) -> MicroBatch:
    targets = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
    return MicroBatch(ids, torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous(), targets)


def plain(model: LlamaForCausalLM, world_size: int) -> tuple[dict[str, Tensor], list[float]]:
    """The gradient by each weight, by name, and both sums."""
    number = counts(world_size)
    size = loss = torch.zeros((), dtype=torch.float64)
    for ids in (ids for rank in rows(world_size) for ids in rank):
        hidden = model.model(input_ids=ids).last_hidden_state
        logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
        size = size + hidden.double().square().sum()
        loss = loss + F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none").double().sum()
    (WEIGHT * size / number["rows"] + loss / number["tokens"]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, [size.item(), loss.item()]


def compared(zero_stage: int, world: World) -> dict[str, Any]:
    spec = Spec.model_validate({
        "name": "extras", "task": "pretrain", "model": {"from_config": LLAMA},
        "data": {"train": [{"path": "builtin:quickstart"}]}, "parallel": {"zero_stage": zero_stage},
        "train": {
            "micro_batch_size": ROWS, "accumulation_steps": MICRO_BATCHES, "precision": "fp32",
            "max_steps": 1, "max_grad_norm": 0.0,
        },
        "optim": {"name": "sgd", "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0},
    })  # fmt: skip
    config = deepspeed_config(spec, batch_sizes(spec.train, world.world_size))
    model: Any = build_model(spec.model, FACTS, 1, torch.float32).causal_lm
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = build_model(spec.model, FACTS, 1, torch.float32, sharding=sharding_for(config, world))
    policy.__class__ = Sized
    engine: Any = build_engine(policy, spec, config, world, OBJECTIVE)
    mine = [laid(ids) for ids in rows(world.world_size)[world.data_rank]]
    result = engine.step(mine, counts(world.world_size), 1.0)
    sums = world.sum(result.sums)
    gradients, expected = plain(model, world.world_size)
    apart, step = 0.0, 0.0
    for owned in engine.owned_fragments():
        stop = owned.start + owned.data.numel()
        moved = before[owned.name].flatten()[owned.start : stop] - owned.data
        by_plain = gradients[owned.name].flatten()[owned.start : stop]
        apart = max(apart, float((moved - by_plain).abs().max()))
        step = max(step, float(by_plain.abs().max()))
    engine._engine.destroy()
    everyones = world.gather((apart, step))
    return {
        "apart": max(one for one, _ in everyones),
        "step": max(one for _, one in everyones),
        "sums": sums.tolist(),
        "plain": expected,
    }


def main(output: str) -> None:
    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1, launched.world_size))
    results = {}
    for zero_stage in range(4):
        with own_groups():
            results[zero_stage] = compared(zero_stage, world)
    if world.rank == 0:
        Path(output).write_text(json.dumps(results))
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
