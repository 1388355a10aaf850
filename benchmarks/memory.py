"""The plan's memory of a host against what its processes really take.

    python -m benchmarks.memory [--layouts NAME …] [--work FOLDER] [--out FILE]

Trains a fresh Llama of 50 to 500 million parameters for two steps on two processes of this machine's CPU,
once for each layout: ZeRO 0 to 3, offload, a pipeline, types, checkpointing, LoRA, DPO. Each rank's peak is
the kernel's (VmHWM), the largest over load, steps and save, as the run writes it into memory.json; a host's
is the sum over its ranks. The plan's is `dsft plan`'s figure for the host. Peaks do not depend on what else
the machine does, so that one run of each is enough.

    python -m benchmarks.memory --sample NAME FOLDER         one layout: a line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import paired

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
RANKS = 2
HOST = "localhost"
LENGTH = 128  # tokens of a row

SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
MIDDLE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
SHAPES = {"58M": SMALL, "134M": MIDDLE, "374M": LARGE}
VOCABULARY = 32_000

CPU, CHECKPOINTING = {"device": "cpu"}, {"gradient_checkpointing": True}


def layout(shape: str, zero: int, precision: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A spec's sections that are its own. sections: what it says beside them, by section."""
    train = {"precision": precision}
    own: dict[str, Any] = {"shape": shape, "parallel": {"zero_stage": zero}, "train": train}
    for name, keys in sections.items():
        own[name] = {**own.get(name, {}), **keys}
    return own


def dpo(**keys: Any) -> dict[str, Any]:
    return {"task": {"is": "dpo"}, "dpo": keys}


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0-fp32": layout("58M", 0, "fp32"),
    "zero0-bf16": layout("134M", 0, "bf16"),
    "zero1-fp32": layout("134M", 1, "fp32"),
    "zero1-bf16": layout("134M", 1, "bf16"),
    "zero2-fp32": layout("58M", 2, "fp32"),
    "zero2-bf16": layout("134M", 2, "bf16"),
    "zero3-fp32": layout("134M", 3, "fp32"),
    "zero3-bf16": layout("374M", 3, "bf16"),
    "zero1-bf16-offload": layout("134M", 1, "bf16", parallel={"offload_optimizer": CPU}),
    "zero2-bf16-offload": layout("58M", 2, "bf16", parallel={"offload_optimizer": CPU}),
    "zero3-bf16-offload-both": layout(
        "58M", 3, "bf16", parallel={"offload_optimizer": CPU, "offload_parameters": CPU}
    ),
    "zero3-bf16-offload": layout("134M", 3, "bf16", parallel={"offload_optimizer": CPU}),
    "zero3-fp32-offload": layout("58M", 3, "fp32", parallel={"offload_optimizer": CPU}),
    "pipeline-zero0-fp32": layout("134M", 0, "fp32", parallel={"pipeline_stages": 2}),
    "pipeline-zero1-bf16": layout("134M", 1, "bf16", parallel={"pipeline_stages": 2}),
    "zero2-fp32-activations": layout("58M", 2, "fp32", train={"micro_batch_size": 8}),
    "zero2-fp32-checkpointing": layout("58M", 2, "fp32", train={"micro_batch_size": 8}, model=CHECKPOINTING),
    "zero2-bf16-activations": layout("58M", 2, "bf16", train={"micro_batch_size": 8}),
    "zero0-bf16-lora": layout("374M", 0, "bf16", model={"lora": {"rank": 16}}),
    "zero3-bf16-lora": layout("374M", 3, "bf16", model={"lora": {"rank": 16}}),
    "zero2-bf16-sgd": layout("134M", 2, "bf16", optim={"name": "sgd"}),
    "dpo-zero1-bf16-precomputed": layout("58M", 1, "bf16", **dpo(reference="precomputed")),
    "dpo-zero1-bf16-live": layout("58M", 1, "bf16", **dpo(reference="live")),
    "dpo-zero3-bf16-live": layout("58M", 3, "bf16", **dpo(reference="live")),
}  # fmt: skip


def spec_of(name: str, work: Path) -> dict[str, Any]:
    own = dict(LAYOUTS[name])
    shape = SHAPES[own.pop("shape")] | {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    task = own.pop("task", {"is": "pretrain"})["is"]
    rows = "pairs" if task == "dpo" else "text"
    default: dict[str, Any] = {
        "model": {"from_config": {"model_type": "llama", "tie_word_embeddings": False, **shape}},
        "data": {"train": [{"path": f"{work}/{rows}.jsonl"}], "max_length": LENGTH, "num_workers": 0},
        "train": {"micro_batch_size": 1, "accumulation_steps": 2, "max_steps": 2},
        "optim": {"learning_rate": 1e-4},
        "parallel": {},
    }
    if task == "pretrain":
        default["data"]["packing"] = True  # rows of exactly LENGTH tokens
    for section, keys in own.items():
        default[section] = {**default.get(section, {}), **keys}
    cluster = {"hosts": {HOST: RANKS}, "accelerator": {"name": "cpu"}}
    return {**default, "name": name, "task": task, "cluster": cluster, "output_dir": f"{work}/runs"}


def make_rows(work: Path) -> None:
    """Texts, and pairs of exactly LENGTH byte-level tokens or a little less."""
    texts = [{"text": f"row {number} " + "of many words " * 40} for number in range(200)]
    pairs = []
    for number in range(64):
        prompt = f"{number} " + "a question " * 3
        pairs.append({"prompt": prompt, "chosen": "good " * 14, "rejected": "poor " * 14})
    for name, rows in (("text", texts), ("pairs", pairs)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (work / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def sample(name: str, work: Path) -> dict[str, Any]:
    """Bytes of the host: measured and planned, and both by rank and phase."""
    from dsft.plan.build import build_plan
    from dsft.spec.load import load_spec

    make_rows(work)
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(spec_of(name, work)), encoding="utf-8")  # JSON is YAML
    words = ["--standalone", "--nproc_per_node", str(RANKS), str(ROOT / "dsft" / "train.py"), str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], capture_output=True, text=True
    )
    if done.returncode:
        output = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{output}")
    ranks = json.loads((work / "runs" / name / "memory.json").read_text(encoding="utf-8"))["ranks"]
    plan = build_plan(load_spec(path, [], check_files=False))
    measured = sum(max(peaks["host_rss"] for peaks in phases.values()) for phases in ranks)
    return {
        "measured": measured,
        "planned": plan.memory.hosts[HOST],
        "parameters": plan.census.numel,
        "ranks": [{phase: peaks["host_rss"] for phase, peaks in phases.items()} for phases in ranks],
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, figures in found.items():
        measured, planned = figures["measured"], figures["planned"]
        rows.append(
            [
                name,
                f"{figures['parameters'] / 1e6:.0f}",
                f"{measured / GIB:.2f}",
                f"{planned / GIB:.2f}",
                f"{planned / measured - 1:+.1%}",
            ]
        )
    header = ["layout", "parameters (millions)", "measured (GiB)", "planned (GiB)", "error"]
    return paired.markdown(header, rows)


def summary(found: Mapping[str, Mapping[str, Any]]) -> str:
    errors = [figures["planned"] / figures["measured"] - 1 for figures in found.values()]
    median = statistics.median(abs(error) for error in errors)
    return (
        f"{len(errors)} layouts: the median error is {median:.1%}, the smallest and the largest are "
        f"{min(errors):+.1%} and {max(errors):+.1%} of what was measured."
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The plan's memory of a host against what is measured.")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--work", type=Path, help="folder of the runs; by default a temporary one")
    parser.add_argument("--out", type=paired.new_file, help="where the table goes as well")
    parser.add_argument("--sample", nargs=2, metavar=("NAME", "FOLDER"), help="one layout")
    options = parser.parse_args(words)
    if options.sample:
        print(json.dumps(sample(options.sample[0], Path(options.sample[1]))))
        return
    found: dict[str, dict[str, Any]] = {}
    for name in options.layouts:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            command = [sys.executable, "-m", "benchmarks.memory", "--sample", name, folder]
            found[name] = dict(paired.run(name, command, dict(os.environ), 1800).values)
        paired.note(f"{name}: {json.dumps(found[name])}")
    text = "\n".join([paired.machine_line(paired.machine()), "", table(found), "", summary(found)])
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
