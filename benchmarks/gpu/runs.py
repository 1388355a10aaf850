"""Models, rows and runs for the cases of `scripts/gpu`: takes settings, gives folders, and what a run of dsft
or of a peer measured. Weights are drawn by a fixed seed and rows made by one, so nothing is downloaded.

    FOLDER/models/NAME   weights and the byte-level tokenizer, drawn on the device
    FOLDER/SET           rows.jsonl, spec.yaml, given.json (what benchmarks/sft_loops.py and its like take)
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import MODELS
from benchmarks.paired import end
from dsft.plan.memory.offload import ALLOCATOR

ROOT = Path(__file__).resolve().parents[2]
SEED, LEARNING_RATE, BETA = 42, 1e-5, 0.1
LETTERS = "abcdefghijklmnopqrstuvwxyz     "


@dataclass
class Run:
    """Of dsft: its folder, its exit code (None where it was ended after enough steps), what it printed, and
    its metrics, one record a step."""

    folder: Path
    code: int | None
    printed: str
    records: list[dict[str, float]]

    @property
    def losses(self) -> list[float]:
        return [record["train/loss"] for record in self.records]

    def must_end_well(self) -> Run:
        if self.code not in (0, None):
            raise RuntimeError(f"dsft/train.py ended with exit code {self.code}: {last_words(self.printed)}")
        return self


def last_words(printed: str) -> str:
    """The message of an error, or the end of what was printed."""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return " | ".join((errors or lines)[-2:])[-600:]


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu" else "cpu"


# --- models and rows ----------------------------------------------------------------------------------------


def model_folder(folder: Path, name: str) -> Path:
    """Made once, by a process of its own, so that this one holds nothing on the GPU."""
    made = folder / "models" / name
    if not (made / "made").exists():
        command = [sys.executable, "-m", "benchmarks.gpu.runs", str(made), name]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    return made


def make_model(made: Path, name: str) -> None:
    """Drawn by the seed on the device, in bf16 where it is large."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dsft.data.tokenizer.load import byte_level_tokenizer

    config = dict(MODELS[name])
    torch.manual_seed(SEED)
    kind = AutoConfig.for_model(config.pop("model_type"), **config)
    dtype = torch.float32 if name in ("small", "100m") else torch.bfloat16
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(kind, dtype=dtype)
    model.save_pretrained(made)
    byte_level_tokenizer().save_pretrained(made)
    (made / "made").touch()


def write_rows(path: Path, rows: str, count: int, max_length: int) -> None:
    """A byte is a token. documents: max_length tokens with the end's; short: log-normal, 205 on average, as
    instruction data has; pairs: prompts of a fifth of max_length on average, answers of twice that."""
    draw = random.Random(SEED)

    def text(length: float) -> str:
        return "".join(draw.choices(LETTERS, k=max(1, int(length)))).strip() or "a"

    def drawn(mean: float, largest: int) -> float:
        return min(mean * draw.lognormvariate(-0.5 * 0.6**2, 0.6), largest)

    with path.open("w", encoding="utf-8") as out:
        for _ in range(count):
            if rows == "documents":
                row = {"text": "".join(draw.choices(LETTERS.strip(), k=max_length - 1))}
            elif rows == "short":
                row = {
                    "prompt": text(drawn(60, max_length // 4)),
                    "completion": text(drawn(135, max_length // 2)),
                }
            else:
                row = {"prompt": text(drawn(max_length / 5, max_length // 3))}
                row |= {key: text(drawn(max_length / 2.5, max_length // 2)) for key in ("chosen", "rejected")}
            out.write(json.dumps(row) + "\n")


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    found: dict[str, Any] = {}
    for name, value in keys.items():
        at = found
        *before, last = name.split(".")
        for word in before:
            at = at.setdefault(word, {})
        at[last] = {**at.get(last, {}), **value} if isinstance(value, dict) else value
    return found


def has_key(name: str) -> bool:
    """Whether this version's spec has the key `section.key`."""
    from dsft.spec.schema import Spec

    section, _, key = name.partition(".")
    return key in getattr(Spec.model_fields[section].annotation, "model_fields", {})


def write_spec(path: Path, keys: Mapping[str, Any]) -> Path:
    from dsft.spec.load import dump_spec
    from dsft.spec.schema import Spec

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_spec(Spec.model_validate(nested(keys))), encoding="utf-8")
    return path


def base_spec(model: Path, rows: Path, kind: str, max_length: int) -> dict[str, Any]:
    tasks = {"documents": "pretrain", "short": "sft", "pairs": "dpo"}
    return {
        "name": "run",
        "task": tasks[kind],
        "model.name_or_path": str(model),
        "data.train": [{"path": str(rows)}],
        "data.max_length": max_length,
        "data.packing": True,
        "data.num_workers": 0,
        "train.seed": SEED,
        "optim.learning_rate": LEARNING_RATE,
        "optim.lr_scheduler_type": "constant",
        "checkpoint.every": None,
        "wandb.mode": "disabled",
    } | ({"dpo.beta": BETA} if kind == "pairs" else {})


def given_of(spec_path: Path, ranks: int = 1) -> dict[str, Any]:
    """The very examples, steps and micro-batches of the spec, for a loop that is not dsft's."""
    from benchmarks.dpo import answers
    from dsft.data.sets.load import load_data
    from dsft.data.steps.pack import pack
    from dsft.data.steps.steps import TrainSteps
    from dsft.data.tokenizer.load import open_tokenizer, pad_id
    from dsft.spec.batch import batch_sizes
    from dsft.spec.load import load_spec

    spec = load_spec(spec_path)
    if spec.task == "dpo":  # a loop that is not dsft's has the prompt before each answer
        spec = load_spec(spec_path, ["dpo.share_prompts=false"])
    tokenizer = open_tokenizer(spec.model)[0]
    dataset = load_data(spec, tokenizer).train
    batch = batch_sizes(spec.train, ranks, spec.data, spec.task)
    steps = TrainSteps(dataset, batch, 0, spec.train.seed, pad_id(tokenizer))
    orders = [[int(i) for i in steps.step(index).example_ids] for index in range(steps.steps_per_epoch)]
    lengths, budget = dataset.lengths.astype("int64"), batch.tokens_per_micro_batch
    is_pairs = spec.task == "dpo"
    rows = [
        answers(e) if is_pairs else {"input_ids": e.input_ids.tolist(), "trained": e.trained.tolist()}
        for e in dataset
    ]
    packs = [
        [
            [[order[i] for i in members] for members in pack(lengths[order], budget, ranks, rank)]
            for rank in range(ranks)
        ]
        for order in orders
        if budget is not None
    ]
    return {
        "pairs" if is_pairs else "examples": rows,
        "steps": orders,
        "packs": packs or [[[] for _ in range(ranks)] for _ in orders],
        "micro_batch_size": batch.micro_batch_size,
        "max_length": spec.data.max_length,
        "learning_rate": spec.optim.learning_rate,
        "beta": BETA,
        "optimizer": spec.optim.name,
        "device": device(),
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[spec.train.precision],
    }


# --- runs ---------------------------------------------------------------------------------------------------


def environment(on: str | None = None) -> dict[str, str]:
    """Of a run: no network, no reports, this folder's compiled operations; `on` cpu: no GPU."""
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    if on == "cpu":
        fixed |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | fixed


def metrics(run: Path) -> list[dict[str, float]]:
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [line for line in lines if "train/loss" in line]


def train(
    spec: Path,
    *words: str,
    until: int | None = None,
    ranks: int = 1,
    on: str | None = None,
    launcher: Sequence[str] | None = None,
) -> Run:
    """dsft/train.py, to its end, or until its metrics have `until` steps: it is then killed with all that it
    started, so that nothing of 8 billion parameters is saved. What it prints goes to this process's own
    output too."""
    folder = spec.parent / "runs" / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(launcher or (torchrun if ranks > 1 else []))]
    command += [str(ROOT / "dsft" / "train.py"), str(spec), f"output_dir={folder.parent}", *words]
    log = spec.parent / "printed.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(on), stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            while process.poll() is None:
                if until is not None and len(metrics(folder)) >= until:
                    break
                time.sleep(0.05)
            code = process.poll()
        finally:
            end(process)
    printed = log.read_text(errors="replace")
    print(printed, flush=True)
    return Run(folder, code, printed, metrics(folder))


def peer(module: str, variant: str, work: Path) -> dict[str, Any]:
    """A run of benchmarks/MODULE.py on one rank, with torch's allocator as dsft's ranks have it; gives what
    it wrote."""
    result = work / f"{module}-{variant}.json"
    result.unlink(missing_ok=True)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "HF_DATASETS_CACHE": str(work / "datasets")}
    place |= {ALLOCATOR: os.environ.get(ALLOCATOR, "expandable_segments:True")}
    command = [sys.executable, "-m", f"benchmarks.{module}", variant, str(work), str(result)]
    log = work / "printed.txt"
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=environment() | place, stdout=output, stderr=subprocess.STDOUT
        )
    printed = log.read_text(errors="replace")
    print(printed, flush=True)
    if done.returncode != 0:
        raise RuntimeError(f"{module} {variant}: {last_words(printed)}")
    return dict(json.loads(result.read_text()))


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), sys.argv[2])
