"""One rank of the loading tests: loads folders into engines and compares what all ranks together hold with
transformers' own loader.

    python loading_worker.py FOLDER …

Rank 0 prints, per case, the largest difference, and the number of tensors.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups
from transformers import AutoModelForCausalLM

from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts
from dsft.objective.next_token import next_token
from dsft.plan.cut import balanced
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from dsft.system.process import end
from tests.parity.worker import assemble, micro_batch
from tests.specs import minimal_spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIRST, NEW = 65, 73
"""The first new token, and how many there are then; the folders have 67 rows."""
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "fp32", "persistence": 1000},  # some are kept whole on every rank, some cut
    {"offload": "cpu", "trainable": ["*.mlp.*"]},
    {"tokens": NEW},  # more than the folder's rows
    {"tokens": NEW, "precision": "fp32", "persistence": 1000},
)


def main(folders: list[str]) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1))
    for folder in folders:
        for case in CASES:
            found = compare(folder, world, **case)
            gc.collect()
            if world.rank == 0:
                print("CASE " + json.dumps({"case": f"{Path(folder).name} {case}"} | found), flush=True)
    world.close()


def compare(
    folder: str,
    world: World,
    precision: str = "bf16",
    persistence: int = 0,
    offload: str = "none",
    trainable: list[str] | None = None,
    tokens: int | None = None,
) -> dict[str, float]:
    spec = make_spec(folder, precision, offload, trainable)
    config = deepspeed_config(spec, batch_sizes(spec.train, world.world_size))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = persistence
    facts = TokenFacts(64, None, None, None)
    if tokens is not None:
        facts = TokenFacts(tokens, None, None, None, first_new=FIRST)
    keep = sharding_for(config, world)
    policy = build_model(spec.model, facts, 0, DTYPES[precision], Part(sharding=keep))
    frozen = sum(not parameter.requires_grad for parameter in policy.parameters())
    engine: Any = build_engine(policy, spec, config, world, next_token())
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision])
    if tokens is not None:
        resize(expected)
    held = assemble(world, engine)
    values = max(
        float((value - expected.get_parameter(name).detach().float()).abs().max())
        for name, value in held.items()
    )
    if not expected.config.tie_word_embeddings:
        values = max(values, *world.gather(of_stages(spec.model, facts, expected, world.rank)))
    batch = micro_batch([(list(range(12)), [False] + [True] * 11)])
    (logps,) = engine.score([batch])
    logits = expected(batch.tokens.input_ids, use_cache=False).logits.float().log_softmax(-1)
    theirs = logits.gather(-1, batch.tokens.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    off = float(((logps - theirs) * (batch.tokens.targets >= 0)).abs().max())
    engine._engine.destroy()
    groups.mpu = None
    return {"values": values, "logps": off, "tensors": len(held), "frozen": frozen}


def resize(model: Any) -> None:
    """By transformers, with the new rows written by hand."""
    model.resize_token_embeddings(NEW, mean_resizing=False)
    for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        weight.data[FIRST:] = weight.data[:FIRST].double().mean(0).float().to(weight.dtype)


def of_stages(model: Any, facts: TokenFacts, expected: Any, rank: int) -> float:
    """Return the largest difference of this rank's stage of two, where it has one."""
    if rank > 1:
        return 0.0
    policy = build_model(
        model, facts, 0, expected.dtype, Part(rank, balanced([1] * expected.config.num_hidden_layers, 2))
    )
    named = policy.causal_lm.named_parameters()
    return max(float((p - expected.get_parameter(name)).abs().max()) for name, p in named)


def make_spec(folder: str, precision: str, offload: str, trainable: list[str] | None) -> Spec:
    return minimal_spec(
        model={"name_or_path": folder, "trainable": trainable},
        parallel={"zero_stage": 3, "offload_optimizer": {"device": offload}},
        train={"precision": precision},
    )


if __name__ == "__main__":
    main(sys.argv[1:])
    end(0)
