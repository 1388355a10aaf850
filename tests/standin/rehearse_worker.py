# ruff: noqa: E402  CUDA is not to be asked before the forks, and imports would ask it
"""Runs on the stand-in for a GPU: rank 0 of several goes through the phases of `dsft rehearse`, and
torch's own allocator gives the peaks.

python -m tests.standin.rehearse_worker OUTPUT.jsonl SPEC.json …     a spec is {"ranks", "spec"}

Writes a line per spec: {phase: {"peak": bytes, "planned": bytes, "collectives": [[kind, ranks, calls, bytes,
sent]]}}. bitsandbytes' own functions allocate, and the kernels that they start compute nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
import deepspeed
import torch.distributed as dist
from deepspeed.ops.op_builder.builder import OpBuilder

from dsft.commands.rehearse import _trained, run_phases, setup_of
from dsft.engine.meter import CUDA, Meter
from dsft.engine.rehearsal import LoneRank, Nothing, NoValues
from dsft.model import attention_choice, lora
from dsft.model.quantize import load_bitsandbytes
from dsft.plan.build import build_plan
from dsft.plan.memory.ranks import memory
from dsft.spec.schema import Spec
from tests.standin.memory_worker import without_values


class NoKernels:
    """bitsandbytes' library."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def without_kernels() -> None:
    OpBuilder._loaded_ops["cpu_adam"] = Nothing()
    load_bitsandbytes()  # it asks CUDA, so not before the fork
    operations: Any = importlib.import_module("bitsandbytes.backends.cuda.ops")
    operations.lib = NoKernels()
    for kernels in (operations.str2optimizer32bit, operations.str2optimizer8bit_blockwise):
        kernels["adam"] = [operations.lib.adam] * 3


class Allocator(Meter):
    def enter(self, phase: str) -> None:
        torch.cuda.synchronize()
        self.now.peak["cuda"] = torch.cuda.max_memory_allocated()
        super().enter(phase)
        torch.cuda.reset_peak_memory_stats()


def measure(given: dict[str, Any]) -> dict[str, Any]:
    without_kernels()
    plan = build_plan(Spec.model_validate(given["spec"]), given["ranks"])
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(given["ranks"]), "LOCAL_RANK": "0"}
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=given["ranks"])
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    setup = setup_of(plan)
    world = LoneRank(0, given["ranks"], 0, plan.layout, CUDA, trained=_trained(plan, setup.cut))
    meter = Allocator()
    with meter:
        run_phases(setup, world, meter, NoValues())
    tokens = setup.batch.shape.numel()
    planned = memory(plan.census, setup.spec, plan.layout, plan.hosts, tokens).stages[0]
    return {
        name: {
            "peak": one.peak["cuda"],
            "planned": planned.phase(name),
            "collectives": [[*key, *one.collectives[key]] for key in one.collectives],
        }
        for name, one in meter.phases.items()
    }


def main(output: Path, specs: list[str]) -> None:
    without_values()
    lora._row_norms = lambda linear: torch.empty(linear.out_features)
    # Kernels compute nothing, and cuDNN has none.
    attention_choice.differ, attention_choice.CUDNN_CAPABILITIES = lambda pairs: False, ()  # type: ignore[assignment]
    for text in specs:
        if pid := os.fork():
            os.waitpid(pid, 0)
            continue
        try:
            found: Any = measure(json.loads(text))
        except BaseException as error:  # the parent continues with the next case
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
