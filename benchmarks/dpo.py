"""Pairs per second and peak memory of DPO: dsft's ways to its reference, TRL, and a bare loop.

    scripts/install && .venv/bin/python -m benchmarks.dpo --rows pairs.json --tokenizer FOLDER --json FILE

Takes a file of preference pairs and a tokenizer with a chat template; a fresh Llama of 8 million parameters
is trained in fp32 for one epoch. Everyone gets the same weights, tokens (cut as dsft cuts them), pairs in
each step, optimizer, rate, clipping and beta; that their losses are the same, step by step, is in the
table. TRL runs in an environment of its own (benchmarks/peers.txt), made in .cache/peers by the first run.

A sample is a process of its own under torchrun; variants take turns, round after round, and ratios are of
samples of one round. Pairs per second leave out the first step. With the reference's pass: all pairs of the
epoch ÷ the seconds of the pass and of all steps, the first taken to be as fast as the others; dsft's pass is
a process of its own, whose imports and loading count, while TRL's model is there already. Peak memory is the
largest process's, as the kernel has it; that of all ranks and their children together is looked at ten
times a second, with pages that they share counted once for each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paired import (
    Samples,
    column,
    machine,
    machine_line,
    markdown,
    measure,
    new_file,
    ratio,
    spread,
)
from benchmarks.sft import LLAMA, ROOT, launch, make_peers, peak_of_run, peers_wanted

VARIANTS = {  # rows of the table
    "trl-live": "TRL DPOTrainer, live reference",
    "trl-precomputed": "TRL DPOTrainer, `precompute_ref_log_probs`",
    "plain": "plain PyTorch loop, packed, precomputed",
    "dsft-live": "dsft, live, packed",
    "dsft-precomputed": "dsft, precomputed, packed",
    "dsft-shared": "dsft, precomputed, packed, prompts shared",
}
PEER_VARIANTS = ("trl-live", "trl-precomputed")
DSFT = {
    "dsft-live": ("dpo.reference=live", "dpo.share_prompts=false"),
    "dsft-precomputed": ("dpo.reference=precomputed", "dpo.share_prompts=false"),
    "dsft-shared": ("dpo.reference=precomputed", "dpo.share_prompts=true"),
}
TRAINING, WITH_PASS = "pairs_per_second", "pairs_per_second_with_pass"
RSS, RSS_ALL = "peak_rss_mb", "peak_rss_of_all_mb"
GOALS = (  # what of it, over what, at least (or at most, of memory)
    (TRAINING, "dsft-precomputed", "trl-live", 2.5),
    (TRAINING, "dsft-precomputed", "trl-precomputed", 2.5),
    (TRAINING, "dsft-shared", "trl-live", 3.0),
    (TRAINING, "dsft-shared", "trl-precomputed", 3.0),
    (WITH_PASS, "dsft-precomputed", "trl-live", 2.0),
    (WITH_PASS, "dsft-precomputed", "trl-precomputed", 2.0),
    (WITH_PASS, "dsft-shared", "trl-live", 2.0),
    (WITH_PASS, "dsft-shared", "trl-precomputed", 2.0),
    (TRAINING, "dsft-precomputed", "dsft-live", 1.25),
    (TRAINING, "dsft-precomputed", "plain", None),
    (RSS, "dsft-precomputed", "trl-live", 0.65),
    (RSS, "dsft-precomputed", "trl-precomputed", 0.65),
    (RSS, "dsft-shared", "trl-live", 0.65),
    (RSS, "dsft-shared", "trl-precomputed", 0.65),
    (RSS_ALL, "dsft-precomputed", "trl-live", None),
    (RSS_ALL, "dsft-precomputed", "trl-precomputed", None),
    (RSS, "dsft-precomputed", "plain", None),
)
LEARNING_RATE, BETA = 1e-5, 0.1
EVERY = 0.1  # seconds between two looks at the memory of all processes


def main() -> None:
    arguments = parse()
    if arguments.sample:
        print(json.dumps(sample(arguments.sample, arguments.work, arguments.ranks, arguments.threads)))
        return
    with tempfile.TemporaryDirectory(prefix="dsft-dpo-") as folder:
        work = Path(folder)
        given = prepare(work, arguments)
        if any(variant in PEER_VARIANTS for variant in arguments.variants):
            make_peers()
        commands = {
            variant: [
                *(sys.executable, "-m", "benchmarks.dpo", "--sample", variant, "--work", folder),
                *("--ranks", str(arguments.ranks), "--threads", str(arguments.threads)),
            ]
            for variant in arguments.variants
        }
        load = os.getloadavg()[0]
        samples = measure(commands, arguments.rounds)
    print(report(samples, given, arguments, (load, os.getloadavg()[0])))
    if arguments.json is not None:
        found = {name: [asdict(sample) for sample in mine] for name, mine in samples.items()}
        facts = {"machine": facts_of(arguments), "ratios": ratios(samples), "samples": found}
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


# --- results ----------------------------------------------------------------------------------------------


def facts_of(arguments: argparse.Namespace) -> dict[str, str]:
    versions = machine(("torch", "deepspeed", "transformers", "trl", "accelerate", "datasets"))
    versions |= dict(line.split("==") for line in peers_wanted() if line.partition("==")[0] in versions)
    return versions | {"threads per process": str(arguments.threads)}


def report(
    samples: Samples, given: dict[str, Any], arguments: argparse.Namespace, load: tuple[float, float]
) -> str:
    """Markdown: what ran where, each variant's figures, and the ratios that the goals are about."""
    prompts, chosen, rejected = (
        sum(len(pair[f"{what}_ids"]) for pair in given["pairs"]) for what in ("prompt", "chosen", "rejected")
    )
    head = (
        f"{len(given['pairs'])} pairs of {2 * prompts + chosen + rejected} tokens "
        f"({prompts + chosen + rejected} with each prompt once) in "
        f"{len(given['steps'])} steps; {arguments.ranks} rank(s) of {arguments.threads} thread(s), "
        f"{arguments.micro_batch_size} pairs per rank and step, fp32; {arguments.rounds} rounds; load "
        f"average {load[0]:.1f} before, {load[1]:.1f} after.\n{machine_line(facts_of(arguments))}\n"
    )
    first = next(iter(samples.values()))[0].values["losses"]
    figures = [
        [
            VARIANTS[name],
            spread(column(found, TRAINING)),
            spread(column(found, WITH_PASS)),
            spread(column(found, "reference_seconds"), 1),
            spread([sample.cpu_seconds for sample in found], 0),
            spread(column(found, RSS), 0),
            spread(column(found, RSS_ALL), 0),
            f"{difference(found[-1].values['losses'], first):.1e}",
        ]
        for name, found in samples.items()
    ]
    header = [
        *("min / median / max", "pairs/s", "with the reference's pass", "seconds of the pass"),
        "seconds of the processor, start to end",
        *("peak MB of a process", "of all processes", f"loss, off {VARIANTS[next(iter(samples))]}'s"),
    ]
    rows = [
        [what, f"{VARIANTS[over]} ÷ {VARIANTS[under]}", text, goal]
        for what, over, under, text, goal in ratios(samples)
    ]
    return "\n".join(
        [head, markdown(header, figures), "", markdown(["of", "ratio, round by round", "", "goal"], rows)]
    )


def difference(mine: list[float], others: list[float]) -> float:
    """The largest of a step's loss, in nats."""
    return max(abs(a - b) for a, b in zip(mine, others, strict=True))


def ratios(samples: Samples) -> list[list[str]]:
    rows = []
    for what, over, under, goal in GOALS:
        if over not in samples or under not in samples:
            continue
        found = ratio(samples, what, over, under)
        is_memory = what in (RSS, RSS_ALL)
        verdict = "–"
        if goal is not None:
            reached = found.median <= goal if is_memory else found.median >= goal
            verdict = f"{'≤' if is_memory else '≥'} {goal}: {'reached' if reached else 'missed'}"
        rows.append([what, over, under, str(found), verdict])
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, help="JSON file of preference pairs")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer with a chat template")
    parser.add_argument("--count", type=int, default=32, help="pairs that are trained on")
    parser.add_argument(
        "--max-length",
        type=int,
        default=1024,
        help="tokens of a prompt and an answer",
    )
    parser.add_argument("--micro-batch-size", type=int, default=4, help="pairs per rank and step")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of a rank")
    parser.add_argument("--zero-stage", type=int, default=0, help="of dsft")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=new_file, help="file for all samples and ratios")
    parser.add_argument("--sample", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- what is trained on -------------------------------------------------------------------------------------


def prepare(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """WORK/given.json: the pairs' tokens, their order and settings; WORK/model: weights and tokenizer;
    WORK/spec.yaml and WORK/rows.json: dsft's own input, from which all of the former is made."""
    import torch

    from dsft.data.sets.load import load_data
    from dsft.data.steps.pack import pack
    from dsft.data.steps.steps import TrainSteps
    from dsft.data.tokenizer.load import open_tokenizer, pad_id
    from dsft.model.build import build_model
    from dsft.model.config import token_facts
    from dsft.spec.batch import batch_sizes
    from dsft.spec.load import dump_spec
    from dsft.spec.schema import Spec

    rows = json.loads(arguments.rows.read_text())[: arguments.count]
    (work / "rows.json").write_text(json.dumps(rows))
    spec = Spec.model_validate(settings(arguments, work))
    tokenizer = open_tokenizer(spec.model)[0]
    (work / "spec.yaml").write_text(dump_spec(spec))
    dataset = load_data(spec, tokenizer).train
    batch = batch_sizes(spec.train, arguments.ranks, spec.data, spec.task)
    steps = TrainSteps(dataset, batch, 0, spec.train.seed, pad_id(tokenizer))
    policy = build_model(spec.model, token_facts(tokenizer), spec.train.seed, torch.float32)
    policy.causal_lm.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    lengths, budget = dataset.lengths.astype("int64"), batch.tokens_per_micro_batch
    assert budget is not None
    orders = [steps.step(index).example_ids for index in range(steps.steps_per_epoch)]
    given = {
        "pairs": [answers(example) for example in dataset],
        "steps": orders,
        "packs": [  # [step][rank][micro-batch] -> pairs, as dsft lays them
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
        "beta": BETA,
    }
    (work / "given.json").write_text(json.dumps(given))
    return given


def settings(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """dsft's spec; what the variants differ in is given to each."""
    return {
        "name": "bench",
        "task": "dpo",
        "model": {"from_config": LLAMA, "tokenizer": str(arguments.tokenizer)},
        "data": {
            "train": [{"path": str(work / "rows.json")}],
            "max_length": arguments.max_length,
            "on_too_long": "truncate",
            "max_truncated_fraction": 1.0,
            "packing": True,
        },
        "dpo": {"beta": BETA, "share_prompts": False},
        "parallel": {"zero_stage": arguments.zero_stage},
        "train": {
            "micro_batch_size": arguments.micro_batch_size,
            "accumulation_steps": 1,
            "precision": "fp32",
            "num_train_epochs": 1,
        },
        "optim": {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant"},
        "checkpoint": {"every": None},
        "wandb": {"mode": "disabled"},
        "output_dir": str(work / "runs"),
    }


def answers(example: Any) -> dict[str, list[int]]:
    """Of a pair whose prompt is in front of both answers. What comes behind an answer's last target, as
    a template's line break, nobody gets: no target sees it."""
    ends = example.segments
    rows = zip(parts_of(example.input_ids, ends), parts_of(example.trained, ends), strict=True)
    (chosen, prompt), (rejected, same) = (
        (ids[: trained.nonzero()[0][-1] + 1].tolist(), int(trained.argmax())) for ids, trained in rows
    )
    assert prompt == same and chosen[:prompt] == rejected[:prompt]
    return {"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:], "rejected_ids": rejected[prompt:]}


def parts_of(values: Any, lengths: tuple[int, int]) -> tuple[Any, Any]:
    return values[: lengths[0]], values[lengths[0] :]


# --- one sample ---------------------------------------------------------------------------------------------


def sample(variant: str, work: Path, ranks: int, threads: int) -> dict[str, Any]:
    """One launch, its figures and each step's loss."""
    with tempfile.TemporaryDirectory(dir=work) as runs:
        result = Path(runs, "result.json")
        if variant in DSFT:
            script = [str(ROOT / "dsft" / "train.py"), str(work / "spec.yaml"), f"output_dir={runs}"]
            script += [f"model.name_or_path={work / 'model'}", "model.from_config=null", *DSFT[variant]]
        else:
            module = "benchmarks.dpo_peers" if variant in PEER_VARIANTS else "benchmarks.dpo_loops"
            script = ["-m", module, variant, str(work), str(result)]
        with Watch() as watch:
            launch(
                script,
                ranks,
                work / f"{variant}.log",
                is_peer=variant in PEER_VARIANTS,
                threads=threads,
                environment={"HF_DATASETS_CACHE": runs},  # where TRL keeps its pass from one run to the next
            )
        if variant in DSFT:
            found = of_run(Path(runs, "bench"), (work / f"{variant}.log").read_text())
        else:
            found = of_ends(json.loads(result.read_text()))
    given = json.loads((work / "given.json").read_text())
    return figures(found, [len(step) for step in given["steps"]]) | {
        RSS: max(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, found.get("peak_rss", 0))
        / 1e6,
        RSS_ALL: watch.peak / 1e6,
    }


def figures(found: dict[str, Any], pairs: list[int]) -> dict[str, Any]:
    """found: seconds of all steps but the first, losses of all, reference_seconds; pairs: of each step."""
    training = sum(pairs[1:]) / found["seconds"]
    epoch = found["reference_seconds"] + sum(pairs) / training
    return {
        TRAINING: training,
        WITH_PASS: sum(pairs) / epoch,
        "reference_seconds": found["reference_seconds"],
        "losses": found["losses"],
    }


def of_ends(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "seconds": found["ends"][-1] - found["ends"][0],
        "losses": found["losses"],
        "reference_seconds": found["reference_seconds"],
    }


def of_run(run: Path, log: str) -> dict[str, Any]:
    """What a run of dsft itself says, in its folder and of its pass."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    scored = re.search(r"pairs scored in ([0-9.]+) s", log)
    return {
        "seconds": sum(step["perf/step_time"] for step in steps[1:]),
        "losses": [step["train/loss"] for step in steps],
        "reference_seconds": float(scored[1]) if scored else 0.0,
        "peak_rss": peak_of_run(run),
    }


class Watch:
    """The largest sum, while the block runs, of what this process's grandchildren have resident, in bytes:
    the ranks and what they start, without the launcher."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.is_set():
            self.peak = max(self.peak, resident_now())
            time.sleep(EVERY)


def resident_now() -> int:
    return sum(resident(rank) for launcher in children(os.getpid()) for rank in children(launcher))


def resident(process: int) -> int:
    """Its bytes and those of all that it started."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:  # it ended meanwhile
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(child) for child in children(process))


def children(process: int) -> list[int]:
    """Of all its threads (proc(5)): psutil looks at every process of the machine, which costs time."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*"):
        try:
            found += map(int, (thread / "children").read_text().split())
        except OSError:  # it ended meanwhile
            continue
    return found


if __name__ == "__main__":
    main()
