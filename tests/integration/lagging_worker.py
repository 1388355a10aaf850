"""One rank of real engines whose rank 1 is slowed from outside after a while: rank 0 prints, per case,
the messages of its watch, with their steps. Started by test_lagging.py with two ranks.

    python lagging_worker.py HEALTHY SLOWED [WORD …]     steps before and after; WORD: cases whose name has it

A process beside rank 1 stops and continues it (SIGSTOP, SIGCONT) in turn, as a core that it shares with
another program would.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.utils import groups

from dsft.data.steps.batch import GlobalStep, MicroBatch
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.comm_timer import CommunicationTimer
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts
from dsft.objective.next_token import next_token
from dsft.plan.cut import balanced
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.run.loop import Progress, Record, Schedule, fit
from dsft.run.trainer import watch_hosts
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from tests.make import make_micro_batch
from tests.specs import llama, minimal_spec
from tests.trainers import PlainTrainer

SECONDS = 1.0  # that a verdict rests on, in place of 10
VOCABULARY, LENGTH, ROWS, SLOWED_RANK = 128, 64, 2, 1
FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA = llama(64, 128, 4, 2, max_position_embeddings=128, vocab_size=VOCABULARY)
IN_TURN = """
import os, signal, sys, time
rank = int(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # and the rank continues
try:
    while os.getppid() == rank:
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.04)
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.015)
finally:
    os.kill(rank, signal.SIGCONT)
"""


@dataclass(frozen=True)
class Case:
    """slowed: as a whole, or in its data alone."""

    name: str
    zero_stage: int = 2
    slowed: str = "whole"


CASES = (
    Case("ZeRO 2"),
    Case("ZeRO 3", zero_stage=3),
    Case("data", slowed="data"),
)


@dataclass
class Steps:
    """Each step's rows are as long as the others'. From step `begins` on, rank 1 is slow."""

    case: Case
    world: World
    accumulation: int
    begins: int
    slowing: subprocess.Popen[bytes] | None = None
    halfway: float = 0.0
    late: float = 0.0

    def step(self, index: int) -> GlobalStep:
        slow = index >= self.begins and self.world.rank == SLOWED_RANK
        if index == self.begins // 2:
            self.halfway = time.monotonic()
        if index == self.begins:  # as long again as a step took
            self.late = (time.monotonic() - self.halfway) / (self.begins - self.begins // 2)
        if slow and self.case.slowed == "data":
            time.sleep(self.late)
        elif slow and self.slowing is None:
            self.slowing = subprocess.Popen([sys.executable, "-c", IN_TURN, str(os.getpid())])
        draw = torch.Generator().manual_seed(1000 * index + self.world.data_rank)
        micro_batches = tuple(rows(draw) for _ in range(self.accumulation))
        targets = ROWS * (LENGTH - 1) * self.accumulation * self.world.layout.data_parallel
        return GlobalStep(micro_batches, {"tokens": targets}, targets, 0.0, ())

    def stop(self) -> None:
        if self.slowing is not None:
            self.slowing.terminate()
            self.slowing.wait()


def rows(draw: torch.Generator) -> MicroBatch:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw)
    targets = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
    return make_micro_batch(ids, torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous(), targets)


def main(healthy: int, slowed: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    world = join(detect(os.environ), Layout(ranks, 1))
    for case in CASES:
        if all(word in case.name for word in words):
            own = replace(world, layout=Layout(ranks, 1))
            result = outcome(case, own, healthy, slowed)
            if world.rank == 0:
                print("CASE " + json.dumps({"case": case.name} | result), flush=True)
            groups.mpu = None
            gc.collect()
    world.close()


def outcome(case: Case, world: World, healthy: int, slowed: int) -> dict[str, Any]:
    spec = minimal_spec(
        model={"from_config": LLAMA},
        parallel={"zero_stage": case.zero_stage},
        train={"micro_batch_size": ROWS, "accumulation_steps": 4, "precision": "fp32", "max_steps": 1},
        optim={"learning_rate": 1e-4},
    )
    config = deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel))
    keep, cut = sharding_for(config, world), balanced([1] * 4, 1)
    policy = build_model(spec.model, FACTS, 1, torch.float32, Part(world.stage, cut, keep))
    objective = next_token()
    engine = build_engine(policy, spec, config, world, objective)
    records: list[Record] = []
    messages: list[tuple[int, str]] = []
    waits = CommunicationTimer(world.device)
    watch = watch_hosts(world, waits, lambda line: messages.append((len(records) + 1, line)))
    watch._detector._seconds = SECONDS
    trainer = PlainTrainer(objective, world, records.append, waits, watch=watch)
    schedule = Schedule(healthy + slowed, 1, None, None, lambda step: 1e-4, 3, seed=1)
    with ended(Steps(case, world, 4, healthy)) as steps:
        fit(engine, steps, schedule, trainer, Progress())
    engine._engine.destroy()  # type: ignore[attr-defined]
    ratios = [record["rel/straggler_ratio"] for record in records if "rel/straggler_ratio" in record]
    return {"messages": messages, "ratios": ratios, "last": records[-1]}


@contextmanager
def ended(steps: Steps) -> Iterator[Steps]:
    try:
        yield steps
    finally:
        steps.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
