"""One run of transformers' Trainer or TRL's SFTTrainer under torchrun, timed; knows nothing of dsft.

    torchrun … -m benchmarks.sft_peers VARIANT WORK RESULT      VARIANT: trainer, trl or trl-packed

Takes the rows, the model folder and the settings that benchmarks/sft.py or benchmarks/gpu put into WORK (as
benchmarks/sft_loops.py does). Rank 0 writes RESULT: seconds and useful tokens of all steps but the first,
each step's end and loss, and the GPU's peaks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from benchmarks.paired import device_peaks, quantized

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


class Clock(TrainerCallback):
    """When each step ended, and what it logged."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def main(variant: str, work: Path, result: Path) -> None:
    given = json.loads((work / "given.json").read_text())
    examples = [given["examples"][index] for step in given["steps"] for index in step]
    model = load(work, given)
    clock = Clock()
    make = padded if variant == "trainer" else trl
    trainer = make(variant, work, given, examples, model)
    trainer.add_callback(clock)
    trainer.train()
    if int(os.environ["RANK"]) == 0:
        steps = len(clock.ends)
        tokens = sum(len(example["input_ids"]) for example in examples)
        result.write_text(
            json.dumps(
                {
                    "seconds": clock.ends[-1] - clock.ends[0],
                    "useful_tokens": tokens * (steps - 1) / steps,
                    "steps": steps,
                    "loss": clock.losses[-1],
                    "ends": clock.ends,
                    "losses": clock.losses,
                    "peaks": device_peaks(),
                }
            )
        )


def load(work: Path, given: dict[str, Any]) -> Any:
    """In float32, which the trainers' bf16 keeps as the master weights; frozen ones need none."""
    dtype = getattr(torch, given.get("dtype", "float32")) if given.get("lora") else torch.float32
    return AutoModelForCausalLM.from_pretrained(work / "model", dtype=dtype, **quantized(given))


def common(given: dict[str, Any], work: Path, per_rank: int) -> dict[str, Any]:
    """What both trainers are given: the same optimizer, rate and clipping as everyone else."""
    return {
        "output_dir": str(work / "peer_output"),
        "per_device_train_batch_size": per_rank,
        "num_train_epochs": 1,
        "learning_rate": given["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": given.get("device", "cpu") == "cpu",
        "bf16": given.get("dtype") == "bfloat16",
        "fp16": False,
        "gradient_checkpointing": bool(given.get("checkpointing")),
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": given.get("device", "cpu") != "cpu",
        "ddp_find_unused_parameters": False,
        "seed": 42,
    }


def padded(
    variant: str, work: Path, given: dict[str, Any], examples: list[dict[str, Any]], model: Any
) -> Trainer:
    """Batches padded to their longest row, in the order of the rows."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for number, row in enumerate(rows):
            n = len(row["input_ids"])
            ids[number, :n] = torch.tensor(row["input_ids"])
            mask[number, :n] = 1
            labels[number, :n] = torch.tensor(row["labels"])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return Trainer(
        model=model,
        args=TrainingArguments(**common(given, work, given["micro_batch_size"]), remove_unused_columns=False),
        data_collator=collate,
        train_dataset=rows_of(examples),
    )


def rows_of(examples: list[dict[str, Any]]) -> Dataset:
    """Labels stand on their own tokens; both trainers shift them."""
    return Dataset.from_list(
        [
            {
                "input_ids": e["input_ids"],
                "labels": [i if t else -100 for i, t in zip(e["input_ids"], e["trained"], strict=True)],
            }
            for e in examples
        ]
    )


def trl(variant: str, work: Path, given: dict[str, Any], examples: list[dict[str, Any]], model: Any) -> Any:
    """TRL's own collators and packing, at the work of the others: as many tokens per step and rank, in fp32
    and without recomputation, which are not its defaults."""
    from trl import SFTConfig, SFTTrainer

    packed = variant == "trl-packed"
    per_rank = given["micro_batch_size"]
    if packed:  # rows of max_length tokens: as many as hold what a padded micro-batch holds
        total = sum(len(example["input_ids"]) for example in examples)
        per_rank = max(1, round(total / len(examples) * per_rank / given["max_length"]))
    args = SFTConfig(
        **common(given, work, per_rank),
        max_length=given["max_length"],
        packing=packed,
    )
    adapter = None
    if given.get("lora"):
        from peft import LoraConfig

        adapter = LoraConfig(r=given["lora"], lora_alpha=2 * given["lora"], target_modules="all-linear")
    return SFTTrainer(
        model=model,
        peft_config=adapter,
        args=args,
        train_dataset=rows_of(examples),
        processing_class=AutoTokenizer.from_pretrained(work / "model"),
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
