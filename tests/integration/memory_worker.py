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
import time
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from torch import nn

from dsft.engine import state
from dsft.engine.join import join
from dsft.engine.optimizer import AdamW, CpuAdamW
from dsft.plan.census import Census, Parameter
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.memory.gathered import Use, gathered_at_once
from dsft.plan.memory.ranks import memory
from dsft.plan.traffic import traffic
from dsft.rank.environment import detect
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout, layout_of
from dsft.spec.schema import Spec
from dsft.system.process import end
from tests.specs import minimal_spec

LAYERS, WIDTH = 32, 200
EXPERTS, NARROW = 4, 50  # experts of a layer, and how wide they are inside


class Experts(nn.Module):
    """The experts of a layer as transformers stores them: two parameters of one module. Every row passes
    through all of them. whole: elements that were gathered whenever the module was used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.full((EXPERTS, 2 * NARROW, WIDTH), 0.01))
        self.down_proj = nn.Parameter(torch.full((EXPERTS, WIDTH, NARROW), 0.01))
        self.whole: Callable[[], None] = lambda: None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.whole()
        gate, up = (rows @ self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        mixed: torch.Tensor = ((gate * up) @ self.down_proj.transpose(1, 2)).mean(0)
        mixed.register_hook(lambda _: self.whole())
        return mixed


def mixture() -> nn.Module:
    linears = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS // 4))
    return nn.Sequential(*(module for linear in linears for module in (linear, Experts())))


def dense() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def make_spec(precision: str, stage: int, offload: bool) -> Spec:
    return minimal_spec(
        parallel={"zero_stage": stage, "offload_optimizer": {"device": "cpu" if offload else "none"}},
        train={"accumulation_steps": 2, "precision": precision},
        cluster={"hosts": {"here": 2}, "accelerator": {"name": "cpu"}},  # so nothing is page-locked
    )


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages behind all tensors that Python holds, gradients included, by their addresses."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage
    return found


SENT = {  # collective -> the argument that is whole on a rank, how often a ring of two sends half of it
    "all_reduce": ("tensor", 2),
    "all_gather_into_tensor": ("output_tensor", 1),
    "reduce_scatter_tensor": ("input", 1),
    "reduce": ("tensor", 1),  # of equally large parts for either rank, each sends one
}


def count_collectives() -> list[int]:
    """Return where each later collective adds the bytes that this rank, one of two, sends. To be called
    before DeepSpeed joins the ranks, since it keeps the functions."""
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


def measure(spec: Spec, sent: list[int], make: Callable[[], nn.Module] = dense) -> dict[str, Any]:
    """Return the largest bytes seen between the backward and the update, and by the plan; whether forgetting
    the steps frees the moments; bytes sent in the last of two steps, and by the plan. sent: of
    `count_collectives`."""
    ranks = layout_of(spec.parallel, torch.distributed.get_world_size())
    # Held, since the thread of the last case's last collective may let go of what it has sent meanwhile, and
    # its address would be used again.
    before = live_storages()

    def live_bytes() -> int:
        return sum(one.nbytes() for address, one in live_storages().items() if address not in before)

    config = deepspeed_config(spec, batch_sizes(spec.train, ranks.data_parallel))
    for key in config["zero_optimization"]:
        if key.endswith("bucket_size"):
            config["zero_optimization"][key] = 1000
    dtype = torch.bfloat16 if spec.train.precision == "bf16" else torch.float32
    model = make().to(dtype)
    parameters = [Parameter(name, tuple(p.shape), 0, False, ()) for name, p in model.named_parameters()]
    elements = sum(parameter.numel for parameter in parameters)
    census = Census("Sequential", LAYERS, None, tuple(parameters))
    offloaded = spec.parallel.offload_optimizer.device == "cpu"
    optimizer = (CpuAdamW if offloaded else AdamW)(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    largest = 0
    for _ in range(2):
        sent.clear()
        for is_last in (False, True):
            engine.set_gradient_accumulation_boundary(is_last)
            output = engine(torch.ones(1, WIDTH, dtype=dtype))
            engine.backward(output.float().pow(2).mean(), scale_wrt_gas=False)
            time.sleep(0.05)  # the thread of the last collective may still hold what it has sent
            largest = max(largest, live_bytes())
            engine.step()
    hosts = {"here": ranks.world_size}
    rank = memory(census, spec, ranks, hosts).stages[0]
    held = live_bytes()
    state.empty_state(engine, 0)
    freed = held - live_bytes() >= 0.99 * 8 * elements / (ranks.world_size if spec.parallel.zero_stage else 1)
    engine.destroy()
    flows = traffic(census, spec, ranks, hosts)
    return {
        "measured": largest,
        "planned": rank.states - rank.buffers + rank.offloaded,
        "freed": freed,
        "sent": sum(sent),
        "to_send": sum(flow.bytes for flow in flows if flow.link == "within a host"),
    }


def gathered(limit: int, ahead: int) -> dict[str, int]:
    """Most elements that ZeRO 3 has in memory, with buffers, while a mixture of experts is used, and by the
    plan. limit, ahead: stage3_max_live_parameters and the prefetch bucket."""
    spec = make_spec("fp32", 3, False)
    config = deepspeed_config(spec, batch_sizes(spec.train, 2))
    for key in ("max_live_parameters", "max_reuse_distance"):
        config["zero_optimization"][f"stage3_{key}"] = limit
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = ahead
    model = mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found: list[int] = []

    arriving = vars(engine.optimizer.parameter_offload.get_param_coordinator())[
        "_PartitionedParameterCoordinator__inflight_param_registry"
    ]

    def count() -> None:
        handles = [one for handle in arriving.values() for one in handle.handles]
        buffers = [one.partitions[0] for one in handles if hasattr(one, "partitions")]
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *buffers)]
        found.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()) // 4)

    for one in model.modules():
        if isinstance(one, Experts):
            one.whole = count
        else:
            one.register_forward_pre_hook(lambda *_: count())  # after the fetch
    for _ in range(3):  # it gathers ahead from the second pass on, when it knows the order
        engine.backward(engine(torch.ones(1, WIDTH)).pow(2).mean())
        engine.step()
    engine.destroy()
    numbers = [(3 * n, (3 * n + 1, 3 * n + 2)) for n in range(LAYERS // 4)]
    forward = [Use(own, own) for linear, experts in numbers for own in ((linear,), experts)]
    every: list[Any] = list(model.parameters())
    sizes = {number: parameter.ds_numel for number, parameter in enumerate(every)}
    planned = gathered_at_once([Use(), *forward, Use(), *reversed(forward)], sizes, ahead, limit)
    return {"most": max(found), "planned": max(computing for _, computing, *_ in planned)}


def main(precisions: Sequence[str]) -> None:
    sent = count_collectives()
    launched = detect(os.environ)
    join(launched, Layout(launched.world_size, 1))
    gc.freeze()  # `live_storages` looks only at what comes from here on
    cases = [
        case for case in itertools.product(precisions, range(4), (False, True)) if case[1] or not case[2]
    ]
    cases.sort(key=lambda case: case == ("bf16", 1, False))  # last: its BF16_Optimizer outlives its engine
    both = [((name, 3, False), mixture) for name in precisions] + [(case, dense) for case in cases]
    for (precision, stage, offload), make in both:
        found = measure(make_spec(precision, stage, offload), sent, make)
        if torch.distributed.get_rank() == 0:
            words = f"{' offload' if offload else ''}{' experts' if make is mixture else ''}"
            case: dict[str, Any] = {"case": f"{precision} ZeRO {stage}{words}"}
            print("CASE " + json.dumps(case | found), flush=True)
    for limit, ahead in ((100_000, 50_000), (150_000, 50_000)):
        most = gathered(limit, ahead)
        if torch.distributed.get_rank() == 0:
            print("GATHERED " + json.dumps(most), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
    end(0)
