"""Adapters on weights in 4 bits: peak memory of a rank, from its start to the end of training, and the
processor time of a step; of dsft, of dsft with 16-bit weights, and of TRL with bitsandbytes and peft.

    python -m benchmarks.quantize [--rounds 1] [--steps 6] [--tokens 128] [--out FILE]

Makes a Llama of 301 million parameters in bf16, and rows of --tokens bytes, one to a step, on which all train
adapters of rank 16 of all linear layers, in bf16 with AdamW, one process with one thread on a CPU. Each
sample is a process of its own, and the variants take turns.

peaks    most of VmRSS, pages of mapped files included, and of RssAnon, which has none of them, in GiB, looked
         at every 20 ms: after the imports, before the first step, and at the end
steps    processor seconds of each step, so that others on the machine count little

    python -m benchmarks.quantize --sample VARIANT FOLDER       is one sample, a line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import paired
from benchmarks.load import LARGE, make_folder

LAYERS, RANK, RATE = 20, 16, 1e-4
VARIANTS = {"dsft nf4": "nf4", "dsft 16 bits": None, "trl nf4": "nf4"}


class Memory(threading.Thread):
    """Looks at the memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = [0, 0]
        self.marks: dict[str, list[float]] = {}
        self.steps: list[float] = []

    def run(self) -> None:
        while True:
            now = paired.status_bytes("VmRSS"), paired.status_bytes("RssAnon")
            self.most = [*map(max, self.most, now)]
            time.sleep(0.02)

    def mark(self, name: str) -> None:
        self.marks[name] = [round(size / 2**30, 3) for size in self.most]

    def timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.steps:
                self.mark("load")
            began = time.process_time()
            found = step(*args, **kwargs)
            self.steps.append(time.process_time() - began)
            return found

        return run


def sample(variant: str, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    leave, os._exit = os._exit, sys.exit  # type: ignore[assignment]  dsft's script ends the process by it
    given, memory = json.loads((folder / "given.json").read_text()), Memory()
    (trl if variant.startswith("trl") else dsft)(variant, folder, given, memory)
    memory.mark("training")
    print(
        json.dumps({"variant": variant, "peaks": memory.marks, "steps": memory.steps[-given["steps"] :]}),
        flush=True,
    )
    leave(0)


def dsft(variant: str, folder: Path, given: dict[str, Any], memory: Memory) -> None:
    import runpy

    from dsft.engine.zero import ZeroEngine
    from dsft.model.quantize import load_bitsandbytes
    from tests.launching import ROOT

    load_bitsandbytes()
    memory.start()
    time.sleep(0.1)
    memory.mark("imports")
    timed: Any = memory.timed(ZeroEngine.step)
    ZeroEngine.step = timed  # type: ignore[method-assign]
    spec = {
        "name": variant.replace(" ", "-"),
        "task": "pretrain",
        "model": {"name_or_path": str(folder / "model"), "quantize": VARIANTS[variant]}
        | {"lora": {"rank": RANK, "alpha": 2 * RANK}},
        "data": {"train": [{"path": str(folder / "rows.jsonl")}], "max_length": given["tokens"]},
        "parallel": {"zero_stage": 0, "allow_torch_adam": True},
        "train": {"micro_batch_size": 1, "accumulation_steps": 1, "max_steps": given["steps"]}
        | {"precision": "bf16"},
        "optim": {"learning_rate": RATE},
        "checkpoint": {"every": None},
        "output_dir": str(folder / "runs"),
    }
    file = folder / f"{spec['name']}.yaml"
    file.write_text(json.dumps(spec))
    sys.argv = ["train.py", str(file)]
    try:
        runpy.run_path(str(ROOT / "dsft" / "train.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def trl(variant: str, folder: Path, given: dict[str, Any], memory: Memory) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    memory.start()
    time.sleep(0.1)
    memory.mark("imports")
    form = paired.quantized({"quantize": VARIANTS[variant], "dtype": "bfloat16"})
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16, **form)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    args = SFTConfig(
        output_dir=str(folder / "peer"),
        per_device_train_batch_size=1,
        max_steps=given["steps"],
        learning_rate=RATE,
        optim="adamw_torch_fused",
        max_length=given["tokens"],
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"text": row} for row in rows]),
        processing_class=tokenizer,
        peft_config=lora,
    )
    step = memory.timed(trainer.training_step)
    trainer.training_step = step  # type: ignore[method-assign]
    optimizer = trainer.create_optimizer()
    update = optimizer.step

    def timed_update(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        found = update(*args, **kwargs)
        memory.steps[-1] += time.process_time() - began
        return found

    optimizer.step = timed_update  # type: ignore[method-assign]
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", nargs=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.sample:
        sample(options.sample[0], Path(options.sample[1]))
    from dsft.data.tokenizer.load import byte_level_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder / "model", LARGE | {"num_hidden_layers": LAYERS}, "1GB")
        byte_level_tokenizer().save_pretrained(folder / "model")
        text = "The rows are all as long as this, and only their numbers differ: " * 99
        rows = [{"text": f"{number:03} {text}"[: options.tokens - 1]} for number in range(options.steps)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "given.json").write_text(json.dumps({"steps": options.steps, "tokens": options.tokens}))
        found = []
        for _ in range(options.rounds):
            for variant in VARIANTS:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.quantize", "--sample", variant, str(folder)],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                lines = [line for line in done.stdout.splitlines() if line.startswith('{"variant"')]
                if not lines:
                    raise SystemExit(f"{variant}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                found.append(json.loads(lines[0]))
                print(lines[0], flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
