"""One run of a bare training loop under torchrun, timed: what a user would write by hand.

    torchrun … -m benchmarks.sft_loops VARIANT WORK RESULT      VARIANT: plain or deepspeed-packed

Takes the rows, the model folder and the settings that benchmarks/sft.py put into WORK. Rank 0 writes RESULT:
seconds and useful tokens of all steps but the first, and the last step's loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dsft.model.attention import KEYWORD, attend_per_segment

Batch = dict[str, Any]
Step = Callable[[Sequence[Batch], int], float]


def main(variant: str, work: Path, result: Path) -> None:
    torch.set_num_threads(1)
    given = json.loads((work / "given.json").read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make = plain if variant == "plain" else deepspeed_loop
    is_packed = variant == "deepspeed-packed"
    train_step = make(work, given, is_packed)
    losses, ends = [], []
    for step, packs in zip(given["steps"], given["packs"], strict=True):
        examples = [given["examples"][index] for index in step]
        targets = sum(sum(example["trained"][1:]) for example in examples)
        batches = packed(given, packs[rank]) if is_packed else padded(examples, given, rank, world)
        losses.append(train_step(batches, targets))
        ends.append(time.perf_counter())
    if rank == 0:
        tokens = [sum(len(given["examples"][i]["input_ids"]) for i in step) for step in given["steps"]]
        result.write_text(
            json.dumps(
                {
                    "seconds": ends[-1] - ends[0],
                    "useful_tokens": sum(tokens[1:]),
                    "steps": len(ends),
                    "loss": losses[-1],
                }
            )
        )
    dist.destroy_process_group()


def padded(examples: Sequence[Any], given: Batch, rank: int, world: int) -> list[Batch]:
    """This rank's rows, one micro-batch after the other, each padded to its longest row."""
    mine, size = examples[rank::world], given["micro_batch_size"]
    return [collate(mine[i : i + size]) for i in range(0, len(mine), size)]


def collate(rows: Sequence[Any]) -> Batch:
    """(B, T) each; labels are shifted: position t has the token that it predicts, or -100."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        n = len(row["input_ids"])
        ids[number, :n] = torch.tensor(row["input_ids"])
        mask[number, :n] = 1
        labels[number, : n - 1] = shifted(row)
    return {"given": {"input_ids": ids, "attention_mask": mask}, "labels": labels}


def shifted(row: Any) -> Tensor:
    pairs = zip(row["input_ids"][1:], row["trained"][1:], strict=True)
    return torch.tensor([i if is_target else -100 for i, is_target in pairs])


def packed(given: Batch, packs: Sequence[Sequence[int]]) -> list[Batch]:
    """The very micro-batches that dsft lays, each as one row without padding."""
    batches = []
    for members in packs:
        rows = [given["examples"][index] for index in members]
        ids = torch.tensor([i for row in rows for i in row["input_ids"]])
        labels = torch.cat([F.pad(shifted(row), (0, 1), value=-100) for row in rows])
        lengths = tuple(len(row["input_ids"]) for row in rows)
        positions = torch.cat([torch.arange(length) for length in lengths])
        segments = tuple((length, 0) for length in lengths)
        inputs = {"input_ids": ids[None], "position_ids": positions[None], KEYWORD: segments}
        batches.append({"given": inputs, "labels": labels[None]})
    return batches


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over the targets, in float32."""
    logits = model(**batch["given"], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def total(mine: Tensor) -> float:
    dist.all_reduce(mine)
    return float(mine)


def plain(work: Path, given: Batch, is_packed: bool) -> Step:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    model.train()
    parallel = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["learning_rate"], weight_decay=0.0, fused=True)

    def train_step(batches: Sequence[Batch], targets: int) -> float:
        summed = torch.zeros(())
        for batch in batches:  # one micro-batch a step here, so that nothing is reduced twice
            loss = loss_of(parallel, batch)
            (loss * dist.get_world_size() / targets).backward()
            summed += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total(summed) / targets

    return train_step


def deepspeed_loop(work: Path, given: Batch, is_packed: bool) -> Step:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    if is_packed:
        attend_per_segment(model, "sdpa", given["max_length"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["learning_rate"], weight_decay=0.0, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given["deepspeed"])
    engine.train()

    def train_step(batches: Sequence[Batch], targets: int) -> float:
        summed = torch.zeros(())
        for number, batch in enumerate(batches, start=1):
            engine.set_gradient_accumulation_boundary(number == len(batches))
            loss = loss_of(engine, batch)
            engine.backward(loss * dist.get_world_size() / targets, scale_wrt_gas=False)
            summed += loss.detach()
        engine.step()
        return total(summed) / targets

    return train_step


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
