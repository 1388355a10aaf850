"""One run of a bare DPO loop under torchrun, timed, on dsft's micro-batches: what a user would write.

    torchrun … -m benchmarks.dpo_loops VARIANT WORK RESULT      VARIANT: plain

Takes the pairs, the model folder and the settings that benchmarks/dpo.py or benchmarks/gpu put into WORK.
Packed rows, the reference's log-probabilities from one pass before the first step, PyTorch's DDP and AdamW
over float32 weights. Rank 0 writes RESULT, as benchmarks/dpo_peers.py does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import device_peaks
from benchmarks.sft_loops import MasterWeights, attend_packed, device_of, join, load, moved, packed, total


def main(work: Path, result: Path) -> None:
    given = json.loads((work / "given.json").read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(given)
    model = load(work, given)
    attend_packed(model, given["max_length"], device_of(given))
    policy = Answers(model)
    rows = {"examples": [row for pair in given["pairs"] for row in answers(pair)]}
    mine = [step[rank] for step in given["packs"]]
    began = time.perf_counter()
    with torch.no_grad():
        reference = {id(pack): policy(batch_of(rows, pack)) for packs in mine for pack in packs}
    reference_seconds = time.perf_counter() - began

    parallel = DistributedDataParallel(policy) if world > 1 else policy
    optimizer = MasterWeights(model.parameters(), given)
    losses, ends = [], []
    for step, packs in zip(given["steps"], mine, strict=True):
        summed = torch.zeros((), device=device_of(given))
        for pack in packs:  # of each rank one alone: the micro-batch holds its share of a step
            rewards = given["beta"] * (parallel(batch_of(rows, pack)) - reference[id(pack)])
            loss = -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).sum()
            (loss * world / len(step)).backward()
            summed += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total(summed) / len(step))
        ends.append(time.perf_counter())
    if rank == 0:
        found = {"ends": ends, "losses": losses, "reference_seconds": reference_seconds}
        result.write_text(json.dumps(found | {"peaks": device_peaks()}))
    dist.destroy_process_group()


def answers(pair: Any) -> list[dict[str, list[Any]]]:
    """The chosen and the rejected row, prompt in front."""
    prompt = pair["prompt_ids"]
    return [
        {"input_ids": prompt + answer, "trained": [False] * len(prompt) + [True] * len(answer)}
        for answer in (pair["chosen_ids"], pair["rejected_ids"])
    ]


def batch_of(rows: Any, pack: Sequence[int]) -> Any:
    (batch,) = packed(rows, [[which for pair in pack for which in (2 * pair, 2 * pair + 1)]])
    return batch


class Answers(nn.Module):
    """A packed row of n pairs -> (n, 2): each answer's log-probabilities, summed. Logits are made where there
    is a target, and nowhere else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        batch = moved(batch, self.model)
        hidden = self.model.base_model(**batch["given"], use_cache=False).last_hidden_state[0]
        labels = batch["labels"][0]
        at = (labels != -100).nonzero().flatten()
        logits = self.model.lm_head(hidden[at]).float()
        logps = -F.cross_entropy(logits, labels[at], reduction="none")
        lengths = torch.tensor(batch["lengths"])
        segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(at.device)[at]
        return logps.new_zeros(len(lengths)).index_add(0, segment, logps).view(-1, 2)


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]))
