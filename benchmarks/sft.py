"""Useful tokens per second and peak memory of fine-tuning: dsft against what a user would run instead.

    scripts/install && .venv/bin/python -m benchmarks.sft --rows alpaca.json --tokenizer FOLDER

Takes a file of instruction rows and a tokenizer with a chat template; a fresh Llama of 8 million parameters
is trained in fp32 for as many steps as the rows give. Everyone gets the same weights, rows, examples per step
(TRL's packing alone chooses its own), optimizer, rate and clipping. Peers run in an environment of their own
(benchmarks/peers.txt), which the first run makes in .cache/peers.

A sample is a process of its own under torchrun; variants take turns, round after round, and ratios are of
samples of one round. Tokens per second leave out the first step; padding counts for nothing. The last step's
loss shows that the work was the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import Samples, column, machine, machine_line, markdown, measure, ratio, spread

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = ROOT / ".cache" / "peers"
VARIANTS = {  # rows of the table
    "plain": "plain PyTorch loop (DDP), padded",
    "deepspeed-packed": "bare DeepSpeed loop, dsft's packed micro-batches",
    "trainer": "transformers Trainer, padded",
    "trl": "TRL SFTTrainer, padded",
    "trl-packed": "TRL SFTTrainer, packing=True",
    "dsft": "dsft, padded",
    "dsft-packed": "dsft, packed",
    "dsft-packed-small": "dsft, packed, a quarter of the default budget of tokens",
}
PEER_VARIANTS = ("trainer", "trl", "trl-packed")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
LEARNING_RATE = 1e-3


def main() -> None:
    arguments = parse()
    if arguments.sample:
        print(json.dumps(sample(arguments.sample, arguments.work, arguments.ranks)))
        return
    with tempfile.TemporaryDirectory(prefix="dsft-sft-") as folder:
        work = Path(folder)
        prepare(work, arguments)
        if any(variant in PEER_VARIANTS for variant in arguments.variants):
            make_peers()
        commands = {
            variant: [
                *(sys.executable, "-m", "benchmarks.sft", "--sample", variant),
                *("--work", folder, "--ranks", str(arguments.ranks)),
            ]
            for variant in arguments.variants
        }  # fmt: skip
        samples = measure(commands, arguments.rounds)
        given = json.loads((work / "given.json").read_text())
    print(report(samples, given, arguments))


def report(samples: Samples, given: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Markdown: what ran where, each variant's figures, and the ratios that the goals are about."""
    lengths = [len(given["examples"][index]["input_ids"]) for step in given["steps"] for index in step]
    versions = machine(("torch", "deepspeed", "transformers", "trl", "accelerate", "datasets"))
    versions |= dict(line.split("==") for line in peers_wanted() if line.partition("==")[0] in versions)
    head = (
        f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, in "
        f"{len(given['steps'])} steps; {arguments.ranks} ranks, {arguments.micro_batch_size} rows per rank "
        f"and step, fp32, ZeRO {arguments.zero_stage}; {arguments.rounds} rounds.\n{machine_line(versions)}\n"
    )
    figures = [
        [
            VARIANTS[name],
            spread(column(found, "useful_tokens_per_second"), 0),
            spread(column(found, "peak_rss_mb"), 0),
            f"{column(found, 'loss')[-1]:.6f}",
        ]
        for name, found in samples.items()
    ]
    table = markdown(["", "useful tokens/s, min / median / max", "peak MB of a rank", "last loss"], figures)
    ours = [name for name in samples if name.startswith("dsft")]
    ratios = [
        [
            f"{VARIANTS[own]} ÷ {VARIANTS[other]}",
            str(ratio(samples, "useful_tokens_per_second", own, other)),
            str(ratio(samples, "peak_rss_mb", own, other)),
        ]
        for own in ours
        for other in samples
        if other not in ours
    ]
    return "\n".join([head, table, "", markdown(["ratio, round by round", "speed", "peak memory"], ratios)])


def peers_wanted() -> list[str]:
    return [line for line in (HERE / "peers.txt").read_text().splitlines() if "==" in line]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, help="JSON or JSONL file of instruction rows")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer with a chat template")
    parser.add_argument("--count", type=int, default=128, help="rows that are trained on")
    parser.add_argument("--max-length", type=int, default=512, help="tokens; longer rows are cut")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="rows of a padded micro-batch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero-stage", type=int, default=2, help="of dsft and of the bare DeepSpeed loop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--sample", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(work: Path, arguments: argparse.Namespace) -> None:
    """WORK/given.json: examples, their order, settings, DeepSpeed's JSON; WORK/model: weights and tokenizer;
    WORK/spec.yaml and WORK/rows.json: dsft's own input, from which all of the former is made."""
    import torch

    from dsft.data.sets.load import load_data
    from dsft.data.steps.pack import pack
    from dsft.data.steps.steps import TrainSteps
    from dsft.data.tokenizer.load import open_tokenizer, pad_id
    from dsft.model.build import build_model
    from dsft.model.config import token_facts
    from dsft.plan.ds_config import deepspeed_config
    from dsft.spec.batch import batch_sizes
    from dsft.spec.load import dump_spec
    from dsft.spec.schema import Spec

    rows = json.loads(arguments.rows.read_text())[: arguments.count]
    (work / "rows.json").write_text(json.dumps(rows))
    spec = Spec.model_validate(
        {
            "name": "bench",
            "task": "sft",
            "model": {"from_config": LLAMA, "tokenizer": str(arguments.tokenizer)},
            "data": {
                "train": [{"path": str(work / "rows.json")}],
                "max_length": arguments.max_length,
                "on_too_long": "truncate",
            },
            "parallel": {"zero_stage": arguments.zero_stage},
            "train": {
                "micro_batch_size": arguments.micro_batch_size,
                "accumulation_steps": 1,
                "precision": "fp32",
            },
            "optim": {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant"},
            "checkpoint": {"every": None},
            "wandb": {"mode": "disabled"},
            "output_dir": str(work / "runs"),
        }
    )
    (work / "spec.yaml").write_text(dump_spec(spec))
    tokenizer = open_tokenizer(spec.model)[0]
    dataset = load_data(spec, tokenizer).train
    batch = batch_sizes(spec.train, arguments.ranks)
    steps = TrainSteps(dataset, batch, 0, spec.train.seed, pad_id(tokenizer))
    policy = build_model(spec.model, token_facts(tokenizer), spec.train.seed, torch.float32)
    policy.causal_lm.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    lengths = dataset.lengths.astype("int64")
    orders = [steps.step(index).example_ids for index in range(steps.steps_per_epoch)]
    budget = arguments.micro_batch_size * arguments.max_length
    given = {
        "examples": [{"input_ids": e.input_ids.tolist(), "trained": e.trained.tolist()} for e in dataset],
        "steps": orders,
        "packs": [  # [step][rank][micro-batch] -> examples, as dsft lays them
            [
                [
                    [order[i] for i in members]
                    for members in pack(lengths[list(order)], budget, arguments.ranks, rank)
                ]
                for rank in range(arguments.ranks)
            ]
            for order in orders
        ],
        "micro_batch_size": arguments.micro_batch_size,
        "max_length": arguments.max_length,
        "learning_rate": LEARNING_RATE,
        "deepspeed": deepspeed_config(spec, batch),
    }
    (work / "given.json").write_text(json.dumps(given))


def make_peers() -> None:
    """The peers' environment, once for these versions."""
    python, made = PEERS / "bin" / "python", PEERS / "installed"
    wanted = (HERE / "peers.txt").read_text()
    if made.exists() and made.read_text() == wanted:
        return
    print("making the peers' environment in .cache/peers (minutes, once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(PEERS)], check=True)
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(HERE / "peers.txt")], check=True)
    made.write_text(wanted)


def sample(variant: str, work: Path, ranks: int) -> dict[str, Any]:
    """One launch. peak_rss_mb: of the largest process; seconds and useful_tokens: of all steps but the
    first."""
    result = work / f"{variant}.json"
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as runs:
        if variant.startswith("dsft"):
            script = [str(ROOT / "dsft" / "train.py"), str(work / "spec.yaml")]
            script += [f"model.name_or_path={work / 'model'}", "model.from_config=null"]
            script += [f"output_dir={runs}", f"data.packing={'false' if variant == 'dsft' else 'true'}"]
            if variant == "dsft-packed-small":
                script.append(f"data.max_tokens_per_micro_batch={small_budget(work)}")
        elif variant in PEER_VARIANTS:
            script = ["-m", "benchmarks.sft_peers", variant, str(work), str(result)]
        else:
            script = ["-m", "benchmarks.sft_loops", variant, str(work), str(result)]
        launch(script, ranks, work / f"{variant}.log", is_peer=variant in PEER_VARIANTS)
        found = (
            of_metrics(Path(runs, "bench")) if variant.startswith("dsft") else json.loads(result.read_text())
        )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the launcher and of all that it waited for
    return {
        "useful_tokens_per_second": found["useful_tokens"] / found["seconds"],
        "peak_rss_mb": max(used.ru_maxrss * 1024, found.get("peak_rss", 0)) / 1e6,
        "loss": found["loss"],
        "process_cpu_seconds": used.ru_utime + used.ru_stime,
    }


def launch(
    script: Sequence[str],
    ranks: int,
    log: Path,
    *,
    is_peer: bool = False,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Under torchrun, in this environment or the peers', to its end; exits with the end of what it wrote
    where it fails."""
    python = str(PEERS / "bin" / "python") if is_peer else sys.executable
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *script]
    fixed = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        environ = os.environ | fixed | dict(environment or {})
        code = subprocess.run(command, env=environ, stdout=output, stderr=output).returncode
    if code:
        sys.exit(f"{log.stem} failed:\n{log.read_text()[-4000:]}")


def small_budget(work: Path) -> int:
    """A quarter of the tokens that a padded micro-batch can have."""
    given = json.loads((work / "given.json").read_text())
    return int(given["micro_batch_size"]) * int(given["max_length"]) // 4


def of_metrics(run: Path) -> dict[str, float]:
    """What a run of dsft itself says, from the second step on."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    return {
        "seconds": sum(step["perf/step_time"] for step in steps[1:]),
        "useful_tokens": steps[-1]["train/num_tokens"] - steps[0]["train/num_tokens"],
        "loss": steps[-1]["train/loss"],
        "peak_rss": peak_of_run(run),
    }


def peak_of_run(run: Path) -> float:
    """Bytes, of a run of dsft's largest rank. It sets the kernel's mark back at the start of each phase, so
    what the kernel says at its end is the last phase's."""
    phases = json.loads((run / "memory.json").read_text())["phases"].values()
    peaks = [phase["host_rss"] for phase in phases]
    return max(peak["measured"] if isinstance(peak, dict) else peak for peak in peaks)


if __name__ == "__main__":
    main()
