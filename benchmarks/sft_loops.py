"""One run of a bare training loop under torchrun, timed: what a user would write by hand.

    torchrun … -m benchmarks.sft_loops VARIANT WORK RESULT    VARIANT: plain, plain-packed or deepspeed-packed

Takes the rows, the model folder and the settings that benchmarks/sft.py or benchmarks/gpu put into WORK:
`device` (cpu where it is not given), `dtype` (float32), `optimizer` (adamw, or sgd), `checkpointing`, and
`lora`, the rank of adapters, and `quantize` (nf4 or fp4).
Rank 0 writes RESULT: seconds and useful tokens of all steps but the first, each step's end and loss, and the
GPU's peaks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.paired import device_peaks, quantized
from dsft.data.steps.batch import Segments
from dsft.model.attention import SHAPES, attend_per_segment, packed_keywords

Batch = dict[str, Any]
Step = Callable[[Sequence[Batch], int], float]
ELEMENTS_AT_ONCE = 2**28  # whose gradients are in float32 at the same time


def main(variant: str, work: Path, result: Path) -> None:
    given = json.loads((work / "given.json").read_text())
    if device_of(given).type == "cpu":
        torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make = deepspeed_loop if variant == "deepspeed-packed" else plain
    is_packed = variant.endswith("packed")
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
                    "ends": ends,
                    "losses": losses,
                    "peaks": device_peaks(),
                }
            )
        )
    dist.destroy_process_group()


def device_of(given: Batch) -> torch.device:
    return torch.device(given.get("device", "cpu"))


def join(given: Batch) -> None:
    dist.init_process_group("gloo" if device_of(given).type == "cpu" else "nccl")


def load(work: Path, given: Batch) -> Any:
    """The model, on the device, in training mode."""
    dtype = getattr(torch, given.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=dtype, **quantized(given))
    model = model.to(device_of(given))
    if given.get("lora"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=given["lora"], lora_alpha=2 * given["lora"], target_modules="all-linear")
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    if given.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    return model


def optimizer_of(weights: Iterable[Tensor], given: Batch) -> torch.optim.Optimizer:
    if given.get("optimizer", "adamw") == "sgd":
        return torch.optim.SGD(weights, lr=given["learning_rate"])
    return torch.optim.AdamW(weights, lr=given["learning_rate"], weight_decay=0.0, fused=True)


class MasterWeights:
    """Fused AdamW without decay, or SGD, over float32 copies of weights in half precision, as mixed precision
    needs it; over the weights themselves where they are in float32. A part of them after the other."""

    def __init__(self, parameters: Iterable[nn.Parameter], given: Batch) -> None:
        self.parts: list[tuple[list[nn.Parameter], list[Tensor], torch.optim.Optimizer]] = []
        part: list[nn.Parameter] = []
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            part.append(p)
            if p is trained[-1] or sum(q.numel() for q in part) >= ELEMENTS_AT_ONCE:
                whole = [q if q.dtype == torch.float32 else q.detach().float() for q in part]
                optimizer = optimizer_of(whole, given)
                self.parts.append((part, whole, optimizer))
                part = []

    @torch.no_grad()
    def step(self) -> None:
        for part, whole, optimizer in self.parts:
            for p, master in zip(part, whole, strict=True):
                if p is not master and p.grad is not None:
                    master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
            for p, master in zip(part, whole, strict=True):
                if p is not master:
                    p.copy_(master)


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
        inputs = {"input_ids": ids[None], "position_ids": positions[None]}
        batches.append({"given": inputs, "labels": labels[None], "lengths": lengths})
    return batches


def attend_packed(model: Any, max_length: int, device: torch.device) -> None:
    """As dsft attends to packed rows on this device."""
    attend_per_segment(model, "auto", max_length, device)


def moved(batch: Batch, model: Any) -> Batch:
    """On the model's device, with what gives its attention the segments of a packed row."""
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch["given"].items()}
    if "lengths" in batch:
        own = getattr(model, "module", model)
        kind, shapes = own.config._attn_implementation, getattr(own, SHAPES)
        inputs |= packed_keywords(kind, inputs["position_ids"], Segments(batch["lengths"]), shapes)
    return batch | {"given": inputs, "labels": batch["labels"].to(device)}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over the targets, in float32."""
    batch = moved(batch, model)
    logits = model(**batch["given"], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def total(mine: Tensor) -> float:
    dist.all_reduce(mine)
    return float(mine)


def plain(work: Path, given: Batch, is_packed: bool) -> Step:
    join(given)
    model = load(work, given)
    if is_packed:
        attend_packed(model, given["max_length"], device_of(given))
    parallel = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = MasterWeights(model.parameters(), given)

    def train_step(batches: Sequence[Batch], targets: int) -> float:
        summed = torch.zeros((), device=device_of(given))
        for batch in batches:  # one micro-batch a step here, so that nothing is reduced twice
            loss = loss_of(parallel, batch)
            (loss * dist.get_world_size() / targets).backward()
            summed += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
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
