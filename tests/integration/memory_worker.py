"""One rank of the memory measurement: prints, per case, the bytes that live tensors take and those that the
plan says, without buffers; and the bytes that its collectives send in a step. Started by test_memory.py with
two ranks."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from dsft.engine import state
from dsft.engine.world import join
from dsft.plan.batch import batch_sizes
from dsft.plan.census import Census, Parameter
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.layout import Layout, layout_of
from dsft.plan.memory.ranks import memory
from dsft.plan.traffic import traffic
from dsft.rank.environment import detect
from dsft.spec.schema import Spec
from dsft.system.process import end

LAYERS, WIDTH = 32, 200


def make_spec(precision: str, stage: int, offload: bool) -> Spec:
    return Spec.model_validate(
        {
            "name": "memory",
            "task": "pretrain",
            "model": {"from_config": {"model_type": "llama"}},
            "data": {"train": [{"path": "builtin:quickstart"}]},
            "parallel": {"zero_stage": stage, "offload_optimizer": {"device": "cpu" if offload else "none"}},
            "train": {"micro_batch_size": 1, "accumulation_steps": 2, "precision": precision},
            "optim": {"learning_rate": 1e-3},
            "cluster": {"hosts": {"here": 2}, "accelerator": {"name": "cpu"}},  # so nothing is page-locked
        }
    )


def live_bytes() -> int:
    """Bytes of the distinct storages behind all tensors that Python holds, gradients included."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


SENT = {  # collective -> the argument that is whole on a rank, how often a ring of two sends half of it
    "all_reduce": ("tensor", 2),
    "all_gather_into_tensor": ("output_tensor", 1),
    "reduce_scatter_tensor": ("input", 1),
}


def count_collectives() -> list[int]:
    """Where each later collective adds the bytes that this rank, one of two, sends. To be called before
    DeepSpeed joins the ranks, since it keeps the functions."""
    sent: list[int] = []

    def counted(plain: Callable[..., Any], argument: str, times: int) -> Callable[..., Any]:
        arguments = inspect.signature(plain)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(times * arguments.bind(*args, **kwargs).arguments[argument].nbytes // 2)
            return plain(*args, **kwargs)

        return call

    for name, (argument, times) in SENT.items():
        setattr(torch.distributed, name, counted(getattr(torch.distributed, name), argument, times))
    return sent


def measure(spec: Spec, sent: list[int]) -> dict[str, Any]:
    """Largest bytes seen between the backward and the update, and by the plan; whether forgetting the steps
    frees the moments; bytes sent in the last of two steps, and by the plan. sent: of `count_collectives`."""
    ranks = layout_of(spec.parallel, torch.distributed.get_world_size())
    before = live_bytes()
    config = deepspeed_config(spec, batch_sizes(spec.train, ranks.data_parallel))
    for key in config["zero_optimization"]:
        if key.endswith("bucket_size"):
            config["zero_optimization"][key] = 1000
    dtype = torch.bfloat16 if spec.train.precision == "bf16" else torch.float32
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)
    parameters = [Parameter(name, tuple(p.shape), None, False, ()) for name, p in model.named_parameters()]
    census = Census("Sequential", LAYERS, None, tuple(parameters))
    offloaded = spec.parallel.offload_optimizer.device == "cpu"
    optimizer = (DeepSpeedCPUAdam if offloaded else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    largest = 0
    for _ in range(2):
        sent.clear()
        for is_last in (False, True):
            engine.set_gradient_accumulation_boundary(is_last)
            output = engine(torch.ones(1, WIDTH, dtype=dtype))
            engine.backward(output.float().pow(2).mean(), scale_wrt_gas=False)
            largest = max(largest, live_bytes() - before)
            engine.step()
    hosts = {"here": ranks.world_size}
    rank = memory(census, spec, ranks, hosts).stages[0]
    held = live_bytes()
    state.reset_state(engine)
    freed = held - live_bytes() >= 0.99 * 8 * LAYERS * WIDTH**2 / (
        ranks.world_size if spec.parallel.zero_stage else 1
    )
    engine.destroy()
    flows = traffic(census, spec, ranks, hosts)
    return {
        "measured": largest,
        "planned": rank.states - rank.buffers + rank.offloaded,
        "freed": freed,
        "sent": sum(sent),
        "to_send": sum(flow.bytes for flow in flows if flow.link == "within a host"),
    }


def main(precisions: Sequence[str]) -> None:
    sent = count_collectives()
    launched = detect(os.environ)
    join(launched, Layout(launched.world_size, 1, launched.world_size))
    cases = [
        case for case in itertools.product(precisions, range(4), (False, True)) if case[1] or not case[2]
    ]
    cases.sort(key=lambda case: case == ("bf16", 1, False))  # last: its BF16_Optimizer outlives its engine
    for precision, stage, offload in cases:
        found = measure(make_spec(precision, stage, offload), sent)
        if torch.distributed.get_rank() == 0:
            case: dict[str, Any] = {"case": f"{precision} ZeRO {stage}{' offload' if offload else ''}"}
            print("CASE " + json.dumps(case | found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
    end(0)
