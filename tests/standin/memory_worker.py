# ruff: noqa: E402  CUDA is not to be asked before the forks, and imports would ask it
"""Runs on the stand-in for a GPU: each case builds an engine of a real size and takes the peaks of torch's
own allocator in every phase, beside the plan's figures.

    python -m tests.standin.memory_worker OUTPUT.jsonl [NAME …]      of these cases, or of all
    python -m tests.standin.memory_worker --table OUTPUT.jsonl       the lines of docs/internals/memory.md

Writes a line per case: {"case", "measured": {phase: bytes that torch has allocated at most}, "reserved": the
same of its allocator, "planned": {phase: bytes}}, or {"case", "error"}.

Weights are empty and copies of more than 1 MiB are not made, so that models of any size need no memory of the
host. Each case is a fork of one process that has imported everything.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer
from deepspeed.runtime.utils import CheckOverflow
from deepspeed.runtime.zero import stage3, stage_1_and_2

from dsft.engine import gradients
from dsft.engine.build import build_engine
from dsft.engine.gradients import StepClip
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.engine.rehearsal import NoValues
from dsft.model import build
from dsft.model.attention import attend_per_segment
from dsft.model.census import take_census
from dsft.model.config import TokenFacts
from dsft.model.weights import DTYPES
from dsft.plan.census import Elements, census_from
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import HostFacts
from dsft.plan.memory.ranks import memory
from dsft.plan.memory.sizes import GIB, with_device
from dsft.rank.environment import detect
from dsft.report.memory import MemoryMeter
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import layout_of
from dsft.spec.schema import Spec
from dsft.system.host import free_port
from dsft.tasks.registry import task_of
from tests.make import make_micro_batch
from tests.specs import dims, minimal_spec

SHAPES: dict[str, dict[str, Any]] = {
    "1.3B": dims(2048, 5504, 24, 16, 16, vocab_size=32_000),
    "8B": dims(4096, 14336, 32, 32, 8, vocab_size=128_256),
    "experts": dims(
        2048, 1024, 4, 16, 16, vocab_size=32_000, model_type="qwen3_moe", num_experts=64,
        num_experts_per_tok=4, moe_intermediate_size=1024,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model's shape and the sections of a spec; tokens: of a micro-batch."""

    name: str
    shape: str
    tokens: int
    sections: dict[str, Any]

    def spec(self) -> Spec:
        config = {"model_type": "llama"} | SHAPES[self.shape] | {"max_position_embeddings": self.tokens}
        longest = {"packing": True, "max_length": self.tokens, "max_tokens_per_micro_batch": self.tokens}
        model = {"from_config": config} | self.sections.get("model", {})
        return minimal_spec(**self.sections | {"model": model, "data": longest})


def cases() -> Iterator[Case]:
    def case(name: str, zero: int, precision: str = "bf16", tokens: int = 4096, **sections: Any) -> Case:
        shape = name.split()[0]
        parallel = {"zero_stage": zero} | sections.pop("parallel", {})
        train = {"precision": precision} | sections.pop("train", {})
        return Case(name, shape, tokens, {"parallel": parallel, "train": train, **sections})

    twice = {"train": {"accumulation_steps": 2}}
    checkpointing = {"model": {"gradient_checkpointing": True}}
    lora = {"model": {"lora": {"rank": 16}}}
    for zero in range(4):
        yield case(f"1.3B zero{zero} bf16", zero)
    for zero in (1, 2):
        yield case(f"1.3B zero{zero} fp32", zero, "fp32")
    for zero in (1, 2, 3):
        yield case(f"1.3B zero{zero} bf16 accumulation", zero, **twice)
    yield case("1.3B zero1 bf16 checkpointing 16k", 1, tokens=16_384, **checkpointing)
    yield case("1.3B zero1 bf16 lora", 1, **lora)
    yield case("8B zero0 bf16 lora", 0, **lora)
    both = {**lora["model"], **checkpointing["model"]}
    yield case("8B zero2 bf16 lora checkpointing", 2, tokens=8192, model=both)
    yield case("8B zero3 bf16 checkpointing", 3, **checkpointing)
    muon = {"optim": {"name": "muon"}}
    for zero in range(4):
        yield case(f"experts zero{zero} bf16 muon", zero, **muon)
    yield case("experts zero2 fp32 muon", 2, "fp32", **muon)
    for top_k in (2048, 8192):
        teacher = {"reference_model": "teacher", "top_k": top_k}
        yield case(
            f"8B zero2 bf16 distill {top_k}", 2, model=both, tokens=8192, task="distill", distill=teacher
        )


def measure(case: Case) -> dict[str, Any]:
    spec = case.spec()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    ranks = layout_of(spec.parallel, 1)
    world = join(detect(os.environ), ranks)
    torch.backends.cuda.enable_cudnn_sdp(False)
    facts = TokenFacts(SHAPES[case.shape]["vocab_size"], 1, 2, None)
    census = census_from(take_census(spec.model, facts))
    batch = batch_sizes(spec.train, ranks.data_parallel)
    config = deepspeed_config(spec, batch, HostFacts(Elements(census.numel, census.trained)))
    meter = MemoryMeter(world.device)
    meter.enter("load")
    keep = sharding_for(config, world)
    policy = build.build_model(spec.model, facts, 0, DTYPES[spec.train.precision], build.Part(sharding=keep))
    attend_per_segment(policy.causal_lm, spec.model.attention, spec.data.max_length)
    task = task_of(spec)
    engine = build_engine(policy, spec, config, world, task.objective(spec))
    ids = torch.ones(1, case.tokens, dtype=torch.int64)
    longest = task.for_probe(spec, make_micro_batch(ids, ids, ids * 0, (case.tokens,)))
    meter.enter("first_step")
    engine.probe(longest)
    meter.enter("steady")
    for _ in range(2):
        engine.step([longest] * batch.accumulation_steps, {"tokens": 1}, 1e-3)
    meter.enter("evaluation")
    engine.evaluate([longest])
    meter.enter("save")
    for part in engine.owned_fragments():
        assert part.data.numel() >= 0
    meter.enter("start")
    spec = with_device(spec, "cuda", world.places[0].device.memory)
    plan = memory(census, spec, ranks, {"here": 1}, case.tokens).stages[0]
    phases = [phase for phase in meter.peaks if phase != "start"]
    return {
        "case": case.name,
        "measured": {phase: meter.peaks[phase]["device_allocated"] for phase in phases},
        "reserved": {phase: meter.peaks[phase]["device_reserved"] for phase in phases},
        "planned": {phase: plan.phase(phase) for phase in phases},
    }  # fmt: skip


def child(case: Case, output: Path) -> None:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        found = measure(case)
    except BaseException as error:  # the parent continues with the next case
        traceback.print_exc()
        found = {"case": case.name, "error": f"{type(error).__name__}: {error}"}
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def without_values() -> None:
    """Let steps be applied though nothing is computed."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for module in (stage_1_and_2, stage3, bf16_optimizer, fused_optimizer, unfused_optimizer):
        module.is_invalid_grad_norm = lambda *_: False  # nothing is computed, so it may be any number
    gradients._weight_norm = lambda *_, **__: 1.0  # DeepSpeed takes the root of their sum
    for kind in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3, CheckOverflow):
        kind.has_overflow = lambda self, *_, **__: False
    StepClip._global_norm = lambda self, gradients: torch.ones(())  # type: ignore[method-assign]
    CheckOverflow.check_using_norm = lambda self, *_, **__: False


def main(output: Path, names: list[str]) -> None:
    without_values()
    build._weights = lambda *_: NoValues()  # type: ignore[assignment]
    by_name = {case.name: case for case in cases()}
    for name in names or by_name:
        child(by_name[name], output)


def table(output: Path) -> None:
    """Of each case what was allocated in GiB, and the plan's error."""
    phases = ("load", "steady", "evaluation", "save")
    print(f"| case | {' | '.join(phases)} |\n|{' --- |' * (len(phases) + 1)}")
    for found in map(json.loads, output.read_text(encoding="utf-8").splitlines()):
        sizes = [(found["measured"][phase], found["planned"][phase]) for phase in phases]
        cells = [f"{measured / GIB:.2f}, {planned / measured - 1:+.1%}" for measured, planned in sizes]
        print(f"| {found['case']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        table(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
