"""Backward passes of rank 0 of two on the stand-in GPU, at ZeRO 1 and 2: torch's sanitizer looks for tensors
that two streams use without waiting for each other, and every wait between streams is noted.

python -m tests.standin.overlap_worker
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from torch import Tensor, nn
from torch.cuda import _sanitizer

from dsft.engine import reduction
from dsft.engine.initialize import import_muon
from dsft.plan.ds_config import deepspeed_config
from dsft.spec.batch import batch_sizes
from tests.specs import minimal_spec
from tests.standin import inside

WIDTH, BUCKET, MICRO_BATCHES = 16, 512, 2
SIZES = (256, 256, 640, 640, 640, 640, 256, 640, 640, 640, 256, 256, 256)
"""Elements of the parameters in the order of the backward pass: two to a bucket, and larger than one."""
CASES: dict[str, tuple[int, str, str | None, str]] = {
    "ZeRO 2, bf16": (2, "bf16", None, "none"),
    "ZeRO 2, bf16, sent as it is": (2, "bf16", "bf16", "none"),
    "ZeRO 2, fp32": (2, "fp32", None, "none"),
    "ZeRO 1, fp32": (1, "fp32", None, "none"),
    "on the host": (2, "bf16", None, "cpu"),
}
"""ZeRO stage, precision, type of the reduction, place of the optimizer."""
FAULTS = ("deepspeed", "all-reduce", "memory", "w", "s", "W")
"""Left out: dsft's class, also with DeepSpeed's default of an all-reduce; its hold on gradients in
reduction; and each kind of wait."""


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, n // WIDTH) / 8) for n in SIZES[::-1])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.layers:
            y = x @ weight
            x = y[:, :WIDTH] + y.mean(1, keepdim=True)
        return x.sum()


def config_of(zero_stage: int, precision: str, reduce_dtype: str | None, place: str) -> dict[str, Any]:
    spec = minimal_spec(
        parallel={
            "zero_stage": zero_stage,
            "offload_optimizer": {"device": place},
            "allow_torch_adam": True,
        },
        train={
            "accumulation_steps": MICRO_BATCHES,
            "precision": precision,
            "reduce_dtype": reduce_dtype,
            "max_steps": 1,
            "max_grad_norm": 0,
        },
    )
    config = deepspeed_config(spec, batch_sizes(spec.train, 2))
    config["zero_optimization"]["reduce_bucket_size"] = BUCKET
    return config


@dataclass
class Noted:
    """Notes what a backward pass asks for, by its letter in `order`: "s" where the stream of reductions waits
    for the backward pass, "r" for a reduction, "w" where the backward pass waits for a reduction, "W" for all
    of them. gradients: address and elements of each, and how many "w" were before it. fault: what is left
    out."""

    fault: str = ""
    order: str = ""
    gradients: list[tuple[int, int, int]] = field(default_factory=list)

    def start(self) -> None:
        wait_event, reduce = torch.cuda.Stream.wait_event, comm.reduce
        backward = torch.cuda.current_stream()

        def event(stream: Any, event: Any) -> None:
            self.order += "w"
            if self.fault != "w":
                wait_event(stream, event)

        def stream(one: Any, other: Any) -> None:
            letter = "W" if one == backward else "s"
            self.order += letter
            if self.fault != letter:
                wait_event(one, other.record_event())

        def reduced(*args: Any, **kwargs: Any) -> Any:
            self.order += "r"
            return reduce(*args, **kwargs)

        torch.cuda.Stream.wait_event = event  # type: ignore[method-assign]
        torch.cuda.Stream.wait_stream = stream  # type: ignore[method-assign]
        comm.reduce = reduced

    def watch(self, optimizer: Any) -> None:
        """Note the gradients that this optimizer takes."""
        take = optimizer.reduce_independent_p_g_buckets_and_remove_grads

        def taken(param: nn.Parameter, i: int) -> None:
            gradient = optimizer.get_gradient_for_reduction(param)
            self.gradients.append((gradient.data_ptr(), gradient.numel(), self.order.count("w")))
            take(param, i)
            if self.fault == "memory":
                for _, held in optimizer._in_reduction.values():
                    held.clear()

        optimizer.reduce_independent_p_g_buckets_and_remove_grads = taken

    def reused(self) -> int:
        """Return how many gradients were put where one was that is larger than a bucket, without a wait
        for it."""
        sent, filled, large = 0, 0, {}
        found = 0
        for address, elements, waits in self.gradients:
            found += address in large and waits <= large[address]
            if filled and filled + elements > BUCKET:
                sent, filled = sent + 1, 0
            filled += elements
            if elements > BUCKET:
                large[address] = sent  # the number of its reduction, and of the wait for it
        return found


def trained(
    zero_stage: int, precision: str, reduce_dtype: str | None, place: str, noted: Noted
) -> dict[str, Any]:
    """A step's backward passes, and whether the sums of rank 0's part are right: the other sends nothing."""
    gc.collect()  # an engine that is freed waits for the device, which would be counted here
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    module, x = Rows().to("cuda", dtype), torch.ones(4, WIDTH, device="cuda", dtype=dtype)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(module(x), list(module.parameters()))])
    expected /= 2  # the mean over two ranks of the mean over the micro-batches, which are the same
    config = config_of(zero_stage, precision, reduce_dtype, place)
    config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = noted.fault == "all-reduce"
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=torch.optim.SGD(module.parameters(), 0.1),
            config=config, dist_init_required=False,
        )  # fmt: skip
    if noted.fault not in ("deepspeed", "all-reduce"):
        reduction.install_reduction(engine)
    noted.watch(engine.optimizer)
    found: dict[str, Any] = {"orders": [], "reused": 0}
    with inside.counted() as counts:
        for number in range(MICRO_BATCHES):
            engine.set_gradient_accumulation_boundary(number == MICRO_BATCHES - 1)
            loss = engine(x)
            noted.order, noted.gradients = "", []
            try:
                engine.backward(loss)
            except _sanitizer.CUDASanitizerErrors as error:
                return {"race": str(error).splitlines()[0]}
            found["orders"].append(noted.order)
            found["reused"] += noted.reused()
    if place == "cpu":
        sums = engine.optimizer.single_partition_of_fp32_groups[0].grad.cuda()
    else:
        sums = torch.cat([g.flatten() for g in engine.optimizer.averaged_gradients[0]])
    torch.testing.assert_close(sums, expected[: len(sums)].to(sums.dtype), rtol=0, atol=0)
    engine.destroy()
    return found | {"device_syncs": counts["device_syncs"], "stream_syncs": counts["stream_syncs"]}


def main() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    import_muon()
    noted = Noted()
    noted.start()
    _sanitizer.enable_cuda_sanitizer()
    results = {name: trained(*case, noted) for name, case in CASES.items()}
    for fault in FAULTS:
        noted.fault = fault
        results[fault] = trained(*CASES["ZeRO 2, fp32"], noted)
    inside.report(results)


if __name__ == "__main__":
    main()
