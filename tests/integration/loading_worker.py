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

from dsft.engine.build import build_engine
from dsft.engine.partition import keep_for
from dsft.engine.world import World, join
from dsft.launch.environment import detect
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.objective.next_token import next_token
from dsft.plan.batch import batch_sizes
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.layout import Layout
from dsft.spec.schema import Spec
from tests.parity.worker import assemble, micro_batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "fp32", "persistence": 1000},  # some are kept whole on every rank, some cut
    {"offload": "cpu", "trainable": ["*.mlp.*"]},
)


def main(folders: list[str]) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1, launched.world_size))
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
) -> dict[str, float]:
    spec = make_spec(folder, precision, offload, trainable)
    config = deepspeed_config(spec, batch_sizes(spec.train, world.world_size))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = persistence
    facts = TokenFacts(64, None, None, None)
    keep = keep_for(config, world)
    policy = build_model(spec.model, facts, 0, DTYPES[precision], keep=keep)
    frozen = sum(not parameter.requires_grad for parameter in policy.parameters())
    engine: Any = build_engine(policy, spec, config, world, next_token())
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision])
    held = assemble(world, engine)
    values = max(
        float((value - expected.get_parameter(name).detach().float()).abs().max())
        for name, value in held.items()
    )
    batch = micro_batch([(list(range(12)), [False] + [True] * 11)])
    (logps,) = engine.score([batch])
    logits = expected(batch.input_ids, use_cache=False).logits.float().log_softmax(-1)
    theirs = logits.gather(-1, batch.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    off = float(((logps - theirs) * (batch.targets >= 0)).abs().max())
    engine._engine.destroy()
    groups.mpu = None
    return {"values": values, "logps": off, "tensors": len(held), "frozen": frozen}


def make_spec(folder: str, precision: str, offload: str, trainable: list[str] | None) -> Spec:
    return Spec.model_validate(
        {
            "name": "loading",
            "task": "pretrain",
            "model": {"name_or_path": folder, "trainable": trainable},
            "data": {"train": [{"path": "builtin:quickstart"}]},
            "parallel": {"zero_stage": 3, "offload_optimizer": {"device": offload}},
            "train": {"micro_batch_size": 1, "accumulation_steps": 1, "precision": precision},
            "optim": {"learning_rate": 1e-3},
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
