"""Steps of training on the stand-in GPU, with right numbers: what each asks of the device, where it waits.

python -m tests.standin.step_worker ["TASK ZERO_STAGE" …]
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups
from torch.utils._pytree import tree_leaves

from dsft.data.steps.batch import NO_TARGET, Answers, GlobalStep, MicroBatch
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.comm_timer import CommunicationTimer
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.engine.replicas import Replicas
from dsft.model.attention import attend_per_segment
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy
from dsft.objective.answers import answer_logps
from dsft.objective.next_token import next_token
from dsft.objective.preference import preference
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.run.loop import Progress, Record, Schedule, fit
from dsft.run.trainer import watch_hosts
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Dpo
from tests.make import make_micro_batch
from tests.specs import llama, minimal_spec
from tests.standin import inside
from tests.trainers import PlainTrainer

VOCABULARY, LENGTH, SEGMENTS, MICRO_BATCHES = 64, 8, 4, 2
FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA = llama(32, 64, 1, 2, max_position_embeddings=64, vocab_size=VOCABULARY)
COUNTED, LAST = (4, 5), 6
"""The steps that are counted, and the last one. ZeRO 3 looks at the first two."""
NEVER = 1000


def packed(draw: torch.Generator, *, of_pairs: bool, number: int = SEGMENTS) -> MicroBatch:
    """One row of `number` segments, each a chosen or a rejected answer where they are pairs."""
    ids = torch.randint(3, VOCABULARY, (1, LENGTH * number), generator=draw)
    targets = ids.roll(-1, 1)
    targets[:, LENGTH - 1 :: LENGTH] = NO_TARGET
    positions, pairs = torch.arange(LENGTH).repeat(number)[None], None
    if of_pairs:
        shape = (number // 2, 2)
        reference = torch.full(shape, -30.0, dtype=torch.float64)
        pairs = Answers(torch.arange(number // 2), torch.full(shape, LENGTH - 1), reference)
    return make_micro_batch(ids, positions, targets, (LENGTH,) * number, answers=pairs)


def on_device(batch: MicroBatch) -> int:
    """Return how many tensors of a micro-batch are on the device."""
    held = [batch.tokens, *(vars(part) for part in (batch.segments, batch.answers) if part)]
    return len({id(one) for one in tree_leaves(held) if isinstance(one, torch.Tensor) and one.is_cuda})


@dataclass
class Steps:
    """On the device as they are made, so that each step's copies are counted with it."""

    device: torch.device
    of_pairs: bool

    def step(self, index: int) -> GlobalStep:
        draw = torch.Generator().manual_seed(index)
        made = tuple(packed(draw, of_pairs=self.of_pairs).to(self.device) for _ in range(MICRO_BATCHES))
        pairs = MICRO_BATCHES * SEGMENTS // 2
        targets = pairs * (LENGTH - 1)
        counts = {"tokens": 2 * targets, "examples": pairs, "chosen_tokens": targets}
        return GlobalStep(made, counts, 2 * pairs * LENGTH, 0.0, ())


@dataclass
class Counting:
    """Told by the loop when a step begins. steps: what was asked of the device from one to the next; seconds:
    how long that took the host, which computes the numbers."""

    steps: list[Counter[str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    open: Any = None

    def ask(self) -> Callable[[], None]:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.seconds[-1] += time.perf_counter()
        self.open = inside.counted()
        self.steps.append(self.open.__enter__())
        self.seconds.append(-time.perf_counter())
        return lambda: None


def trained(world: World, task: str, zero_stage: int, log_every: int) -> dict[str, Any]:
    spec = minimal_spec(
        model={"from_config": LLAMA},
        parallel={"zero_stage": zero_stage},
        train={"accumulation_steps": MICRO_BATCHES, "precision": "bf16", "max_steps": 1},
    )
    config = deepspeed_config(spec, batch_sizes(spec.train, 1))
    policy = build_model(spec.model, FACTS, 1, torch.bfloat16, Part(sharding=sharding_for(config, world)))
    attend_per_segment(policy.causal_lm, "auto", LENGTH)
    objective = preference(Dpo(loss_type="hinge")) if task == "dpo" else next_token()
    engine = build_engine(policy, spec, config, world, objective)
    counting = Counting()
    records: list[Record] = []
    waits, replicas = CommunicationTimer(world.device), Replicas(engine.replicated, world, NEVER)
    watch = watch_hosts(world, waits, lambda line: None)
    trainer = PlainTrainer(objective, world, records.append, waits, watch=watch, replicas=replicas)
    trainer.ask = counting.ask  # type: ignore[method-assign]
    schedule = Schedule(LAST, log_every, None, None, lambda step: 1e-3, 3, seed=1)
    steps = Steps(world.device, task == "dpo")
    engine.first_step = lambda *given: engine.step(*given[:3])  # type: ignore[method-assign]
    with inside.waits() as places:
        # The check of a start's first steps waits for the device, and is not counted.
        fit(engine, steps, schedule, trainer, Progress(applied_steps=1))
    moved = bytes_beside_autograd(engine, policy, steps.step(LAST))
    engine._engine.destroy()  # type: ignore[attr-defined]
    groups.mpu = None
    gc.collect()
    return {
        "tensors": sum(on_device(batch) for batch in steps.step(0).micro_batches),
        "steps": [counting.steps[number - 1] for number in COUNTED],
        "seconds": [counting.seconds[number - 1] for number in COUNTED],
        "waits": {place: number / LAST for place, number in places.items()},
        "bytes": moved / sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters()),
        "losses": {int(record["train/global_step"]): record["train/loss"] for record in records},
    }


def bytes_beside_autograd(engine: Any, policy: Policy, step: GlobalStep) -> int:
    """Return the bytes that a step moves beside its forward and backward passes and AdamW."""
    with inside.Moved() as whole:
        engine.step(step.micro_batches, step.counts, 1e-3)
    with GatheredParameters(list(policy.parameters())), inside.Moved() as passes:
        for batch in step.micro_batches:
            torch.autograd.grad(engine._sums(batch).sum(), list(policy.parameters()))
    return int(whole.bytes - passes.bytes)


def answers(device: torch.device, number: int) -> dict[str, Any]:
    """The answers of one row, forward and backward."""
    batch = packed(torch.Generator(), of_pairs=True, number=number).to(device)
    logps = torch.full(batch.tokens.targets.shape, -1.0, device=device, requires_grad=True)
    with inside.counted() as taken:
        found = answer_logps(logps, batch)
        found.sum().backward()
    return {"taken": taken, "sums": found.flatten().tolist()}


def main(names: list[str]) -> None:
    world = join(detect(os.environ), Layout(1, 1))
    torch.backends.cuda.enable_cudnn_sdp(False)
    results: dict[str, Any] = {"answers": [answers(world.device, number) for number in (2, 40)]}
    for task, zero_stage in map(str.split, names):
        results[f"{task}, ZeRO {zero_stage}"] = trained(world, task, int(zero_stage), log_every=1)
    results["no record"] = trained(world, "sft", 1, log_every=NEVER)
    inside.report(results)
    world.close()


if __name__ == "__main__":
    main(sys.argv[1:])
