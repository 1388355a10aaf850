"""Run on every rank of one launch: each case steps an engine whose memory was probed and one without that.

    python probe_worker.py OUTPUT.jsonl

Rank 0 writes a line per case: {"case", "before", "allocated": tensors with moments before the probe's
step and after it, "rates": that step's learning rates, "compared": number of tensors, "differences": names
of those that are not equal to the last bit afterwards}.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups

from dsft.dist.world import World
from dsft.engine import state
from dsft.engine.build import build_engine
from dsft.engine.initialize import COUNTERS
from dsft.engine.join import join
from dsft.model.build import Part, build_model
from dsft.objective.next_token import next_token
from dsft.plan.cut import balanced
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from tests.parity import plain
from tests.parity.cases import Case, probes
from tests.parity.worker import FACTS, RATES, SEED, VOCABULARY, make_spec, micro_batch, share
from tests.process_groups import own_groups

STEPS = (3, 1, 2)  # micro-batches of each


def main(output: Path, names: list[str]) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    world = join(detect(os.environ), Layout(2, 1))
    for case in [case for case in probes() if case.name in names]:
        own = dataclasses.replace(world, layout=Layout(2, case.stages))
        with own_groups():
            bare, _ = run(case, own, probed=False)
            found, seen = run(case, own, probed=True)
        differing = [name for name in bare if not torch.equal(bare[name], found[name])]
        everywhere = sorted({name for names in world.gather(differing) for name in names})
        if world.rank == 0:
            line = {"case": case.name, "compared": len(bare), "differences": everywhere, **seen}
            with output.open("a") as file:
                file.write(json.dumps(line) + "\n")
    world.close()


def run(case: Case, world: World, probed: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what this rank owns after the steps, with each step's loss, norm, draw and DeepSpeed's
    counters."""
    spec = make_spec(case)
    spec.model.from_config["attention_dropout"] = 0.1  # type: ignore[index]
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    policy = build_model(spec.model, FACTS, SEED, dtype, Part(world.stage, balanced([1] * 4, case.stages)))
    config = deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel))
    if case.zero_stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 3_000}
    engine: Any = build_engine(policy, spec, config, world, next_token())
    torch.manual_seed(SEED + world.rank)
    seen = probe(engine) if probed else {}
    found: dict[str, torch.Tensor] = {"draw": torch.rand(3)}
    for number, step in enumerate(plain.make_steps(SEED, STEPS, world.layout.data_parallel, VOCABULARY)):
        counts = {"tokens": plain.count(plain.rows_of(step))}
        result = engine.step(share(step, world, case), counts, RATES[case.optimizer])
        found[f"loss {number}"] = result.sums
        found[f"norm {number}"] = torch.as_tensor(float(result.grad_norm))
        for name in COUNTERS[:4]:
            found[f"{name} {number}"] = torch.tensor(getattr(engine._engine, name))
    for part in engine.owned_fragments():
        found[f"{part.kind} {part.name} {part.start}"] = part.data.clone()
    engine._engine.destroy()
    groups.mpu = None
    return found, seen


def probe(engine: Any) -> dict[str, Any]:
    """Probe with a micro-batch longer than any of the steps', and look at the optimizer in between."""
    empty, step, seen = state.empty_state, engine.step, {}

    def with_moments() -> int:
        return sum(len(held) > 0 for held in state._base(engine._engine.optimizer).state.values())

    def look_before(*arguments: Any) -> Any:
        seen["before"] = with_moments()
        return step(*arguments)

    def look_after(inner: Any, steps: int) -> None:
        if not steps:
            seen["allocated"] = with_moments()
            seen["rates"] = [group["lr"] for group in state._base(inner.optimizer).param_groups]
        empty(inner, steps)

    state.empty_state, engine.step = look_after, look_before
    try:
        engine.probe(micro_batch([(list(range(1, 31)), [True] * 30)] * 2))
    finally:
        state.empty_state = empty
        del engine.step
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
