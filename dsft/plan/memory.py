"""Bytes that parameters, gradients and optimizer states take on each GPU and each host. Takes a census, a
spec and a layout; pure arithmetic, which tests/integration/test_memory.py holds against what DeepSpeed
allocates.

The numbers are those of a step's fullest moment. Activations, logits and padding are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsft.plan.census import Census, Parameter
from dsft.plan.ds_config import BUCKET, LIVE, PERSIST_BELOW
from dsft.plan.layout import Layout
from dsft.spec.schema import Spec

FP32 = 4  # bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank of a pipeline stage takes; the first five on its GPU, the last in its host's
    memory.

    parameters  weights in the type that forward and backward use
    gradients   what accumulates, and what is being reduced
    master      fp32 weights that the optimizer updates, where they are not the parameters themselves
    moments     the optimizer's states
    buffers     reduction buckets and, at ZeRO 3, at most so many gathered parameters
    offloaded   fp32 weights, moments and gradients on the CPU
    """

    stage: int
    elements: int
    parameters: int
    gradients: int
    master: int
    moments: int
    buffers: int
    offloaded: int

    @property
    def device(self) -> int:
        return self.parameters + self.gradients + self.master + self.moments + self.buffers


@dataclass(frozen=True)
class Memory:
    """stages: one rank of each; hosts: host -> bytes, including the GPUs' where the accelerator is the
    CPU."""

    stages: tuple[RankMemory, ...]
    hosts: Mapping[str, int]


def memory(census: Census, spec: Spec, layout: Layout, hosts: Mapping[str, int]) -> Memory:
    """`hosts`: host -> ranks, in the order of the ranks."""
    parts = [census.stage(stage, layout.pipeline_stages) for stage in range(layout.pipeline_stages)]
    stages = tuple(_rank(stage, part, spec, layout.data_parallel) for stage, part in enumerate(parts))
    on_cpu = runs_on_cpu(spec)
    totals: dict[str, int] = {}
    first = 0
    for host, slots in hosts.items():
        ranks = [stages[layout.stage(rank)] for rank in range(first, first + slots)]
        totals[host] = sum(rank.offloaded + (rank.device if on_cpu else 0) for rank in ranks)
        first += slots
    return Memory(stages, totals)


def runs_on_cpu(spec: Spec) -> bool:
    accelerator = spec.cluster.accelerator if spec.cluster else None
    return accelerator is not None and accelerator.name.lower() == "cpu"


def _rank(stage: int, parameters: tuple[Parameter, ...], spec: Spec, ranks: int) -> RankMemory:
    zero = spec.parallel.zero_stage
    whole = sum(parameter.numel for parameter in parameters)
    trained = sum(parameter.numel for parameter in parameters if parameter.trained)
    share = -(-trained // ranks) if zero else trained
    states = share * (FP32 + _moment_bytes(spec))
    offloaded = spec.parallel.offload_optimizer.device != "none"
    fp32_without_zero = zero == 0 and spec.train.precision == "fp32"
    return RankMemory(
        stage=stage,
        elements=whole,
        parameters=_parameters(parameters, spec, ranks),
        gradients=_gradients(trained, share, spec),
        master=0 if offloaded or fp32_without_zero else share * FP32,
        moments=0 if offloaded else share * _moment_bytes(spec),
        buffers=_buffers(whole, spec),
        # the gradients twice: as they accumulate, and as the CPU optimizer reads them
        offloaded=states + 2 * share * FP32 if offloaded else 0,
    )


def _weight_bytes(spec: Spec) -> int:
    return 2 if spec.train.precision == "bf16" else FP32


def _moment_bytes(spec: Spec) -> int:
    if spec.optim.name == "adamw":
        return 2 * FP32
    return FP32 if spec.optim.momentum else 0


def _parameters(parameters: tuple[Parameter, ...], spec: Spec, ranks: int) -> int:
    if spec.parallel.zero_stage < 3:
        return sum(parameter.numel for parameter in parameters) * _weight_bytes(spec)
    shares = sum(-(-parameter.numel // ranks) for parameter in parameters)
    kept = sum(parameter.numel for parameter in parameters if parameter.numel <= PERSIST_BELOW)
    return (shares + kept) * _weight_bytes(spec)


def _gradients(whole: int, share: int, spec: Spec) -> int:
    """Of a rank's GPU, for `whole` trained elements. Which gradients DeepSpeed holds at once differs with
    stage and type."""
    zero, bf16 = spec.parallel.zero_stage, spec.train.precision == "bf16"
    offloaded = spec.parallel.offload_optimizer.device != "none"
    if zero == 0:
        return whole * (2 + FP32) if bf16 else whole * FP32  # bf16: and their fp32 copy in the update
    if zero == 1 and not offloaded:
        # bf16: BF16_Optimizer's fp32 buffer is whole. fp32: whole until reduced into the rank's share.
        return whole * (2 + FP32) if bf16 else (whole + share) * FP32
    if not offloaded:
        return share * FP32
    return {1: whole, 2: share, 3: 0}[zero] * _weight_bytes(spec)


def _buffers(whole: int, spec: Spec) -> int:
    """Buckets are allocated in full; at ZeRO 3 gathered parameters come on top, up to what may live at
    once."""
    zero = spec.parallel.zero_stage
    reduced = 2 if spec.train.reduce_dtype == "bf16" else FP32
    overlapped = zero == 2 and spec.parallel.pipeline_stages == 1
    if zero == 0 or (zero == 1 and spec.train.precision == "bf16"):
        return 0
    gathered = min(whole, LIVE) * _weight_bytes(spec) if zero == 3 else 0
    return BUCKET * reduced * (2 if overlapped else 1) + gathered
