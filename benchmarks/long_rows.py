"""Tokens per second and memory of rows split over two processes: dsft beside DeepSpeed's own Ulysses.

    OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu python -m benchmarks.long_rows [--rounds 3] [--tokens 4096]

A fresh Llama in fp32 with a vocabulary of 8,192, ZeRO 1 and gradient checkpointing; every step trains on one
long row of random tokens on both ranks together. A sample is a launch of its own; variants take turns:

split      dsft's engine with parallel.sequence_parallel 2
chunks     the same with model.mlp_chunks 8
deepspeed  transformers' model under UlyssesSPAttentionHF.register_with_transformers with sdpa; the loss is
           the cross entropy of the rank's own logits, divided by the targets of the whole row
whole      dsft's engine with the row whole on each rank, so two rows a step: what splitting costs

Of the steps of a launch the median is taken, without the first two. The loss of the first step shows that the
work is the same.

    torchrun … -m benchmarks.long_rows --rank VARIANT      one sample: a line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import paired
from dsft.system.process import end
from tests.make import make_micro_batch

VOCABULARY, RANKS, SEED, RATE = 8192, 2, 1, 1e-4
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
CHUNKS: Mapping[str, int] = {"split": 1, "chunks": 8, "whole": 1}
VARIANTS = ("split", "chunks", "deepspeed", "whole")
Step = Callable[[], float]  # one step on the row; gives this rank's share of the loss


def rank(variant: str, tokens: int, steps: int) -> None:
    """Rank 0 prints the sample."""
    from dsft.engine.join import join
    from dsft.rank.environment import detect
    from dsft.spec.layout import Layout

    world = join(detect(os.environ), Layout(RANKS, 1, 1 if variant == "whole" else RANKS))
    step = deepspeeds(world, tokens) if variant == "deepspeed" else ours(world, tokens, CHUNKS[variant])
    loss = sum(world.gather(step()))
    step()
    seconds = []
    for _ in range(steps):
        world.gather(None)
        began = time.perf_counter()
        step()
        seconds.append(max(world.gather(time.perf_counter() - began)))
    rows = RANKS if variant == "whole" else 1
    peaks = world.gather(paired.peak_bytes())
    if world.rank == 0:
        sample = {"tokens_per_second": rows * tokens / statistics.median(seconds), "loss": loss / rows}
        print(json.dumps(sample | {"peak_mb": max(peaks) / 1e6}), flush=True)
    world.close()


def row(tokens: int) -> Any:
    import torch

    from dsft.data.steps.batch import NO_TARGET

    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(SEED))
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = NO_TARGET
    made = make_micro_batch(ids, torch.arange(tokens)[None], targets, lengths=(tokens,))
    return made.to(torch.device("cpu"))


def policy_of(spec: Any, keep: Any) -> Any:
    import torch

    from dsft.model.build import Part, build_model
    from dsft.model.config import TokenFacts

    facts = TokenFacts(VOCABULARY, None, None, None)
    return build_model(spec.model, facts, SEED, torch.float32, Part(sharding=keep))


def spec_of(split: int, chunks: int = 1) -> Any:
    from dsft.spec.schema import Spec

    return Spec.model_validate(
        {
            "name": "bench",
            "task": "pretrain",
            "model": {"from_config": LLAMA, "gradient_checkpointing": True, "mlp_chunks": chunks},
            "data": {"train": [{"path": "builtin:quickstart"}], "packing": True},
            "parallel": {"zero_stage": 1, "sequence_parallel": split},
            "train": {"micro_batch_size": 1, "accumulation_steps": 1, "precision": "fp32"},
            "optim": {"learning_rate": RATE},
        }
    )


def ours(world: Any, tokens: int, chunks: int) -> Step:
    from dsft.dist.sequence import exchange_of
    from dsft.engine.build import build_engine
    from dsft.engine.partition import sharding_for
    from dsft.model.attention import attend_per_segment
    from dsft.objective.next_token import next_token
    from dsft.plan.ds_config import deepspeed_config
    from dsft.spec.batch import batch_sizes

    spec = spec_of(world.layout.sequence_parallel, chunks)
    config = deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel))
    policy = policy_of(spec, sharding_for(config, world))
    attend_per_segment(policy.causal_lm, "auto", tokens, exchange=exchange_of(world))
    engine: Any = build_engine(policy, spec, config, world, next_token())
    made, count = row(tokens), (tokens - 1) * world.layout.data_parallel

    def step() -> float:
        (total,) = engine.step([made], {"tokens": count, "sequences": 1}, RATE).sums
        return float(total) / (tokens - 1)

    return step


def deepspeeds(world: Any, tokens: int) -> Step:
    import deepspeed
    import torch
    import torch.nn.functional as F
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AutoConfig, AutoModelForCausalLM

    from dsft.model.weights import Sharding

    words = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = AutoConfig.for_model(LLAMA["model_type"], vocab_size=VOCABULARY, **words)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.load_state_dict(policy_of(spec_of(1), Sharding()).causal_lm.state_dict())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", RANKS, micro_batch_size=1)
    engine, *_ = deepspeed.initialize(
        model=model,
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "sequence_parallel_size": RANKS,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        },
        optimizer=torch.optim.AdamW(model.parameters(), RATE),
        dist_init_required=False,
    )
    made, mine = row(tokens), slice(world.rank * tokens // RANKS, (world.rank + 1) * tokens // RANKS)
    ids, positions, targets = (
        x[:, mine] for x in (made.tokens.input_ids, made.tokens.position_ids, made.tokens.targets)
    )

    def step() -> float:
        logits = engine(input_ids=ids, position_ids=positions, use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        # DeepSpeed divides gradients by ranks ÷ sequence_parallel_size, which is 1 here
        engine.backward(total / (tokens - 1))
        engine.step()
        return float(total.detach()) / (tokens - 1)

    return step


def report(samples: paired.Samples, arguments: argparse.Namespace) -> str:
    head = (
        f"Rows of {arguments.tokens:,} tokens, {arguments.steps} steps a launch, {arguments.rounds} rounds; "
        f"load average {os.getloadavg()[0]:.1f}. {paired.machine_line(paired.machine())}"
    )
    key = "tokens_per_second"
    body = [
        [
            name,
            paired.spread(paired.column(found, key), 0),
            str(paired.ratio(samples, key, "split", name)) if "split" in samples else "",
            paired.spread(paired.column(found, "peak_mb"), 0),
            f"{paired.column(found, 'loss')[-1]:.6f}",
        ]
        for name, found in samples.items()
    ]
    header = [
        "",
        "tokens/s (min / median / max)",
        "split ÷ this, round by round",
        "peak MB of a rank",
        "loss",
    ]
    return f"{head}\n\n{paired.markdown(header, body)}"


def launch(variant: str, arguments: argparse.Namespace) -> list[str]:
    words = ["--standalone", "--nproc_per_node", str(RANKS), "-m", "benchmarks.long_rows"]
    words += ["--rank", variant, "--tokens", str(arguments.tokens), "--steps", str(arguments.steps)]
    return [sys.executable, "-m", "torch.distributed.run", *words]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second and memory of rows split over two ranks.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a launch, after two that are not counted")
    parser.add_argument("--tokens", type=int, default=4096, help="of a row")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=paired.new_file, help="where the table goes as well")
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
