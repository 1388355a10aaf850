"""One rank of real runs whose phases are those of `dsft rehearse`: prints, per case of `CASES`, the bytes
of live tensors at most and the collectives of each phase. Started by test_rehearse.py."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from dsft.commands.rehearse import run_phases, setup_of
from dsft.engine.join import join
from dsft.engine.meter import Measured, Meter
from dsft.engine.rehearsal import NoValues
from dsft.plan.build import Plan, build_plan
from dsft.rank.environment import detect
from dsft.spec.layout import layout_of
from dsft.system.process import end
from tests.process_groups import own_groups
from tests.specs import llama, minimal_spec

LENGTH = 512
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "ZeRO 2, fp32": ({"zero_stage": 2}, {"precision": "fp32", "accumulation_steps": 2}),
    "dpo, ZeRO 3, bf16": ({"zero_stage": 3}, {"precision": "bf16", "accumulation_steps": 2}),
    "LoRA, FP4, ZeRO 2, bf16": (
        {"zero_stage": 2},
        {"precision": "bf16"},
        {"lora": {"rank": 16}, "quantize": "fp4"},
    ),
    "reward, ZeRO 2, bf16": ({"zero_stage": 2}, {"precision": "bf16"}),
    "LoRA, NF4, ZeRO 3, bf16": (
        {"zero_stage": 3},
        {"precision": "bf16", "accumulation_steps": 2},
        {"lora": {"rank": 4}, "quantize": "nf4", "gradient_checkpointing": True},
    ),
    "pipeline, tied": (
        {"zero_stage": 1, "pipeline_stages": 2},
        {"precision": "fp32", "accumulation_steps": 3},
    ),
}
"""Sections parallel and train, and keys of model; ZeRO 3 on four ranks has second copies of the parameters in
two groups."""


def plan_of(name: str, ranks: int) -> Plan:
    parallel, train, *model = CASES[name]
    if ranks == 4 and parallel["zero_stage"] == 3:
        parallel = parallel | {"zero_hpz_partition_size": 2}
    own: dict[str, Any] = {"dpo": {"reference": "live"}} if "dpo" in name else {}
    layers = 2 if ranks == 2 and parallel["zero_stage"] == 3 else 4  # whose hooks make many operations
    config = llama(256, 640, layers, 4, vocab_size=1024, tie_word_embeddings="tied" in name)
    spec = minimal_spec(
        task if (task := name.split(",")[0]) in ("dpo", "reward") else "pretrain",
        model=dict({"from_config": config}, **(model[0] if model else {})),
        data={
            "train": [{"path": "rows.jsonl"}],
            "packing": True,
            "max_length": LENGTH // 2,
            "max_tokens_per_micro_batch": LENGTH,
        },  # fmt: skip
        cluster={"hosts": {"here": ranks}, "accelerator": {"name": "cpu"}},
        parallel=parallel,
        train=train,
        **own,
    )
    return build_plan(spec)


def shown(phases: dict[str, Measured]) -> dict[str, Any]:
    return {
        name: {
            "peak": one.peak["cpu"],
            "collectives": [[*key, *one.collectives[key]] for key in one.collectives],
        }
        for name, one in phases.items()
    }


def main() -> None:
    launched = detect(os.environ)
    world = None
    for name in CASES:
        plan = plan_of(name, launched.world_size)
        layout = layout_of(plan.spec.parallel, launched.world_size)
        if world is None:
            world = join(launched, layout)
        here = type(world)(**vars(world) | {"layout": layout})
        meter = Meter()
        with own_groups(), meter:
            run_phases(setup_of(plan), here, meter, NoValues(torch.zeros))
        for rank, found in enumerate(here.gather(shown(meter.phases))):
            if launched.rank == 0:
                print("CASE " + json.dumps({"case": name, "rank": rank, "phases": found}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    end(0)
