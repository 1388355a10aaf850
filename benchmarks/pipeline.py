"""The pipeline's idle share against its formula, and its tokens per second beside ZeRO's, on two processes.

    OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu python -m benchmarks.pipeline [--rounds 3] [--out FILE]

A fresh Llama of 13 million parameters in fp32, whose two stages have four equal layers each: its vocabulary
of 64 makes embedding and head cost next to nothing. A step is 2, 4, 8 or 16 micro-batches of one row without
padding. A sample is a launch of its own; variants take turns:

pipeline    dsft's engine: DeepSpeed's 1F1B schedule, ZeRO 1
dualpipev   DeepSpeed's DualPipeV over four stages of two layers, the first and the last on rank 0; ZeRO 1
zero1       dsft's engine, data parallel: half of the micro-batches on each rank
zero3       the same

Idle share of a step: 1 - the time in which the ranks are inside DeepSpeed's instructions that compute,
forward and backward, ÷ (ranks × the time from the first one's begin to the last one's end); reduction and
update stand behind that window. Both are read from the clock that the processes of a machine share, so other
jobs, which stretch computing and waiting alike, change it less than they change seconds. The formula's is
(stages - 1) ÷ (micro-batches + stages - 1). Replayed: the same of a step in which every part
takes its processor time, which no other job changes, and nothing but its input is waited for. Tokens per
second are of whole steps, from a barrier to the slower rank's end. Of the steps of a launch the median is
taken, without the first two; the loss of the second shows that the work is the same.

    torchrun … -m benchmarks.pipeline --rank VARIANT      one sample: a line of JSON
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import paired
from dsft.system.process import end
from tests.make import make_micro_batch

VOCABULARY = 64
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1056,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}
MICRO_BATCHES = (2, 4, 8, 16)
WATCHED = ("pipeline", "dualpipev")
VARIANTS = (*WATCHED, "zero1", "zero3")
RANKS, SEED, RATE = 2, 1, 1e-4
Step = Callable[[int], float]  # of so many micro-batches in all; gives this rank's share of the loss


class Computed(NamedTuple):
    """One forward or backward of one stage (of DualPipeV: the half stage), in the order of its micro-batches.
    began, ended: of the machine's clock, in seconds; processor: seconds of the thread."""

    stage: int
    is_forward: bool
    began: float
    ended: float
    processor: float


def formula(micro_batches: int, stages: int = RANKS) -> float:
    """Idle share of 1F1B (Narayanan et al. 2021, section 2.2.1, as a share of the whole)."""
    return (stages - 1) / (micro_batches + stages - 1)


# --- one rank -----------------------------------------------------------------------------------------------


def rank(variant: str, tokens: int, steps: int) -> None:
    """Rank 0 prints the sample."""
    from dsft.engine.join import join
    from dsft.rank.environment import detect
    from dsft.spec.layout import Layout

    stages = RANKS if variant in WATCHED else 1
    world = join(detect(os.environ), Layout(RANKS, stages))
    step, computed = MAKERS[variant](world, tokens)
    *_, loss = (sum(world.gather(step(2 * RANKS))) for _ in range(2))
    found: dict[str, list[float]] = {}
    for number in [n for n in numbers(variant) for _ in range(steps)]:
        computed.clear()
        world.gather(None)
        began = time.perf_counter()
        step(number)
        ranks = world.gather((time.perf_counter() - began, list(computed)))
        figures = {"tokens_per_second": number * tokens / max(seconds for seconds, _ in ranks)}
        figures |= idle([mine for _, mine in ranks]) if variant in WATCHED else {}
        for key, value in figures.items():
            found.setdefault(f"{key} {number}", []).append(value)
    peaks = world.gather(paired.peak_bytes())
    if world.rank == 0:
        sample = {key: statistics.median(values) for key, values in found.items()}
        print(json.dumps(sample | {"loss": loss, "peak_mb": max(peaks) / 1e6}), flush=True)
    world.close()


def numbers(variant: str) -> tuple[int, ...]:
    """Of micro-batches: DualPipeV wants twice as many as ranks; ZeRO, for which their number makes no
    difference but for the update's share, has the largest."""
    if variant not in WATCHED:
        return MICRO_BATCHES[-1:]
    return tuple(n for n in MICRO_BATCHES if variant == "pipeline" or n >= 2 * RANKS)


def idle(ranks: Sequence[Sequence[Computed]]) -> dict[str, float]:
    """Of one step: the idle share of all ranks, the same by processor time, and what the last rank computes ÷
    what the first does."""
    busy = [sum(one.ended - one.began for one in mine) for mine in ranks]
    every = [one for mine in ranks for one in mine]
    window = max(one.ended for one in every) - min(one.began for one in every)
    processor = [sum(one.processor for one in mine) for mine in ranks]
    return {
        "idle": 1 - sum(busy) / (len(ranks) * window),
        "replayed": 1 - sum(processor) / (len(ranks) * replayed(ranks)),
        "last_to_first": processor[-1] / processor[0],
    }


def replayed(ranks: Sequence[Sequence[Computed]]) -> float:
    """Seconds of a step in which each rank computes in the order that it did, each part takes its processor
    time, and waits for nothing but its own input: that of the stage before, or the gradient of the one
    behind."""
    last = max(one.stage for mine in ranks for one in mine)
    clocks, done = [0.0] * len(ranks), [0] * len(ranks)
    ends: dict[tuple[int, bool, int], float] = {}
    numbers: Counter[tuple[int, bool]] = Counter()
    while any(done[r] < len(mine) for r, mine in enumerate(ranks)):
        for r, mine in enumerate(ranks):
            while done[r] < len(mine):
                one = mine[done[r]]
                number = numbers[one.stage, one.is_forward]
                source = one.stage + (-1 if one.is_forward else 1)
                ready = ends.get((source, one.is_forward, number)) if 0 <= source <= last else 0.0
                if ready is None:
                    break
                clocks[r] = max(clocks[r], ready) + one.processor
                ends[one.stage, one.is_forward, number] = clocks[r]
                numbers[one.stage, one.is_forward] += 1
                done[r] += 1
    return max(clocks)


def watch(engine: Any) -> list[Computed]:
    """What DeepSpeed's pipeline engine will compute."""
    from deepspeed.runtime.pipe import schedule

    computed: list[Computed] = []

    def timed(run: Callable[..., None], is_forward: bool) -> Callable[..., None]:
        def measured(engine: Any, buffer_id: int, **phase: int) -> None:
            own = engine.stage_id
            stage = 2 * engine.num_stages - 1 - own if phase.get("phase") else own
            began, processor = time.perf_counter(), time.thread_time()
            run(engine, buffer_id, **phase)
            taken = time.thread_time() - processor
            computed.append(Computed(stage, is_forward, began, time.perf_counter(), taken))

        return measured

    own = dict(engine._INSTRUCTION_MAP)
    for kind, is_forward in ((schedule.ForwardPass, True), (schedule.BackwardPass, False)):
        own[kind] = timed(own[kind], is_forward)
    engine._INSTRUCTION_MAP = own
    return computed


# --- engines ------------------------------------------------------------------------------------------------


def spec_of(zero_stage: int, stages: int) -> Any:
    from dsft.spec.schema import Spec

    return Spec.model_validate(
        {
            "name": "bench",
            "task": "pretrain",
            "model": {"from_config": LLAMA, "gradient_checkpointing": False},
            "data": {"train": [{"path": "builtin:quickstart"}], "packing": False},
            "parallel": {"zero_stage": zero_stage, "pipeline_stages": stages},
            "train": {"micro_batch_size": 1, "accumulation_steps": MICRO_BATCHES[-1], "precision": "fp32"},
            "optim": {"learning_rate": RATE},
        }
    )


def config_of(spec: Any, world: Any) -> dict[str, Any]:
    from dsft.plan.ds_config import deepspeed_config
    from dsft.spec.batch import batch_sizes

    return deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel))


def part(spec: Any, stage: int, stages: int, keep: Any) -> Any:
    """Of as many equal ones as there are stages."""
    import torch

    from dsft.model.build import Part, build_model
    from dsft.model.config import TokenFacts
    from dsft.plan.cut import Cut

    facts = TokenFacts(VOCABULARY, None, None, None)
    cut = Cut((LLAMA["num_hidden_layers"] // stages,) * stages)
    return build_model(spec.model, facts, SEED, torch.float32, Part(stage, cut, keep))


def rows(number: int, tokens: int) -> list[Any]:
    """Micro-batches of one row of random tokens, each of which predicts the next one."""
    import torch

    from dsft.data.steps.batch import NO_TARGET

    draw = torch.Generator().manual_seed(SEED)
    positions = torch.arange(tokens)[None]
    made = []
    for _ in range(number):
        ids = torch.randint(VOCABULARY, (1, tokens), generator=draw)
        targets = ids.roll(-1, dims=1)
        targets[:, -1] = NO_TARGET
        made.append(make_micro_batch(ids, positions, targets).to(torch.device("cpu")))
    return made


def ours(zero_stage: int, stages: int, world: Any, tokens: int) -> tuple[Step, list[Computed]]:
    from dsft.engine.build import build_engine
    from dsft.engine.partition import sharding_for
    from dsft.objective.next_token import next_token

    spec = spec_of(zero_stage, stages)
    config = config_of(spec, world)
    policy = part(spec, world.stage, stages, sharding_for(config, world))
    engine: Any = build_engine(policy, spec, config, world, next_token())
    all_rows = rows(MICRO_BATCHES[-1], tokens)

    def step(number: int) -> float:
        mine, count = all_rows[:number][world.data_rank :: world.layout.data_parallel], number * (tokens - 1)
        (total,) = engine.step(mine, {"tokens": count}, RATE).sums
        return float(total) / count

    return step, watch(engine._engine) if stages > 1 else []


def dualpipev(world: Any, tokens: int) -> tuple[Step, list[Computed]]:
    """Not through dsft's engine, which has no use for it: rows of one shape alone can go through."""
    from deepspeed.pipe import DualPipeVModule
    from torch import nn

    from dsft.engine.initialize import initialize_deepspeed
    from dsft.model.weights import Sharding
    from dsft.objective.next_token import next_token

    spec, objective, made = spec_of(1, RANKS), next_token(), rows(MICRO_BATCHES[-1], tokens)
    own = (world.rank, 2 * RANKS - 1 - world.rank)
    policies = {number: part(spec, number, 2 * RANKS, Sharding()) for number in own}
    to_come = {number: iter(made) for number in own}

    class Stage(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.policy, self.number = policies[number], number

        def forward(self, inputs: Any) -> Any:
            batch = next(to_come[self.number])
            found = self.policy(inputs, batch.tokens, num_targets=batch.num_targets)
            return getattr(found, "logps", found)

    def loss(logps: Any, micro_batch: Any) -> Any:
        (total,) = objective.sums(logps, micro_batch)
        return total / (tokens - 1)

    layers = [Stage(number) if number in own else nn.Identity() for number in range(2 * RANKS)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the topology and the seed
        module = DualPipeVModule(layers, num_stages=RANKS, loss_fn=loss, partition_method="uniform")
    trained = {name: p for policy in policies.values() for name, p in policy.named_trained().items()}
    parts = initialize_deepspeed(module, trained, spec, config_of(spec, world))
    for group in parts.optimizer.param_groups:
        group["lr"] = RATE

    def step(number: int) -> float:
        parts.engine.set_train_batch_size(number)
        to_come.update((which, iter(made)) for which in own)
        mean = parts.engine.train_batch((batch.tokens.input_ids, batch) for batch in made[:number])
        return float(mean) if world.rank == 0 else 0.0

    return step, watch(parts.engine)


MAKERS: Mapping[str, Callable[[Any, int], tuple[Step, list[Computed]]]] = {
    "pipeline": functools.partial(ours, 1, RANKS),
    "dualpipev": dualpipev,
    "zero1": functools.partial(ours, 1, 1),
    "zero3": functools.partial(ours, 3, 1),
}


# --- all samples --------------------------------------------------------------------------------------------


def report(samples: paired.Samples, arguments: argparse.Namespace) -> str:
    head = (
        f"{arguments.tokens} tokens in a micro-batch, {arguments.steps} steps a launch, {arguments.rounds} "
        f"rounds; load average {os.getloadavg()[0]:.1f}. {paired.machine_line(paired.machine())}"
    )
    tables = [idle_table(name, samples[name]) for name in WATCHED if name in samples]
    return "\n\n".join([head, *tables, speed_table(samples)])


def idle_table(name: str, found: Sequence[paired.Sample]) -> str:
    body = []
    for number in numbers(name):
        measured = paired.column(found, f"idle {number}")
        body.append(
            [
                str(number),
                f"{formula(number):.3f}",
                paired.spread(measured, 3),
                f"{statistics.median(measured) / formula(number):.2f}",
                paired.spread(paired.column(found, f"replayed {number}"), 3),
                paired.spread(paired.column(found, f"last_to_first {number}")),
            ]
        )
    header = ["micro-batches", "1F1B's formula", f"{name}, idle (min / median / max)", "median ÷ formula"]
    return paired.markdown([*header, "replayed", "rank 1 computes ÷ rank 0"], body)


def speed_table(samples: paired.Samples) -> str:
    key = f"tokens_per_second {MICRO_BATCHES[-1]}"
    body = [
        [
            name,
            paired.spread(paired.column(found, key), 0),
            str(paired.ratio(samples, key, "pipeline", name)) if "pipeline" in samples else "",
            paired.spread(paired.column(found, "peak_mb"), 0),
            f"{paired.column(found, 'loss')[-1]:.6f}",
        ]
        for name, found in samples.items()
    ]
    header = [f"{MICRO_BATCHES[-1]} micro-batches", "tokens/s (min / median / max)"]
    return paired.markdown([*header, "pipeline ÷ this, round by round", "peak MB of a rank", "loss"], body)


def launch(variant: str, arguments: argparse.Namespace) -> list[str]:
    words = ["--standalone", "--nproc_per_node", str(RANKS), "-m", "benchmarks.pipeline"]
    words += ["--rank", variant, "--tokens", str(arguments.tokens), "--steps", str(arguments.steps)]
    return [sys.executable, "-m", "torch.distributed.run", *words]


def main() -> None:
    parser = argparse.ArgumentParser(description="Idle share and tokens per second of the pipeline.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each number of micro-batches")
    parser.add_argument("--tokens", type=int, default=192, help="of a micro-batch")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=paired.new_file, help="where the tables go as well")
    parser.add_argument("--rank", choices=VARIANTS, help="one sample")
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank, arguments.tokens, arguments.steps)
        return
    variants = {name: launch(name, arguments) for name in arguments.variants}
    text = report(paired.measure(variants, arguments.rounds), arguments)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
    end(0)
