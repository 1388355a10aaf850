"""About how long an optimizer step takes, by which layouts of one run are ranked against each other. Takes a
census, a spec and what travels; pure arithmetic on assumed speeds, no forecast.

seconds = computing × imbalance ÷ (1 - bubble) + Σ traffic ÷ link + the optimizer's pass over the host's
memory, as if nothing ran beside anything else. Imbalance: of the largest stage's work to the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.plan.batch import BatchSizes
from dsft.plan.census import Census
from dsft.plan.cut import cut_of
from dsft.plan.flops import peak_tflops, work
from dsft.plan.memory.sizes import runs_on_cpu
from dsft.plan.reference import dpo_of, needs_reference
from dsft.plan.traffic import Flow, Link, bubble, hidden_size
from dsft.spec.schema import Spec

REACHED = 0.4
"""Of a device's peak, in matrix products: what well-tuned training reaches on GPUs."""

HALF_TOKENS = 512
"""Of a micro-batch that computes at half of what is reached: products of so few rows wait for the weights."""

GPU_TFLOPS, CPU_TFLOPS = 312.0, 0.1
"""Peak of a device of which neither name nor spec tell it: an A100's in bf16, a few cores'."""

GPU_LINKS: Mapping[Link, float] = {
    "within a host": 300e9,
    "between hosts": 50e9,
    "host memory": 40e9,
    "disk": 5e9,
}
"""Bytes a second of a rank: NVLink, a network card of 400 Gb/s for each GPU, PCIe 5; a disk is all ranks'."""

CPU_LINKS: Mapping[Link, float] = {
    "within a host": 5e9,
    "between hosts": 1.25e9,
    "host memory": 10e9,
    "disk": 2e9,
}
"""Shared memory, 10 Gb/s Ethernet, a disk; the last two are all ranks'. Nothing travels to the host's memory,
which is the device's."""

ADAM_BYTES = 28
"""Read and written per element by an AdamW update: weight, gradient and moments read, all but the gradient
written, 4 bytes each."""

HOST_MEMORY = 200e9
"""Bytes a second of a host's memory, which all its ranks share."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a step.

    computing  forward and backward of the policy, the forward of a reference; recomputed: of it, what
               gradient checkpointing computes again
    idle       of a pipeline: its bubble, and waiting for its largest stage
    travelling over all links
    updating   of an optimizer on the host
    """

    computing: float
    recomputed: float
    idle: float
    travelling: float
    updating: float

    @property
    def seconds(self) -> float:
        return self.computing + self.idle + self.travelling + self.updating


def cost(
    census: Census, spec: Spec, batch: BatchSizes, flows: Sequence[Flow], hosts: Mapping[str, int]
) -> Cost:
    """hosts: host -> ranks."""
    model, recomputed = _flops(census, spec)
    speed = _speed(spec, batch) * sum(hosts.values())
    tokens = batch.global_batch_size * spec.longest_example
    computing = (model + recomputed) * tokens / speed
    share = bubble(spec.parallel.pipeline_stages, batch.accumulation_steps)
    stretched = computing * _imbalance(census, spec) / (1 - share)
    return Cost(
        computing,
        recomputed * tokens / speed,
        stretched - computing,
        sum(flow.bytes / _link_speed(flow.link, spec, hosts) for flow in flows),
        _updating(census, spec, hosts),
    )


def _flops(census: Census, spec: Spec) -> tuple[float, float]:
    """Of a token: what the model and its reference need, and what is computed again."""
    length, width = spec.data.max_length, hidden_size(census)
    needed = work(census, width)
    whole = sum(p.numel for p in census.parameters if not p.embedding or p.aliases)
    layers = sum(p.numel for p in census.parameters if p.layer is not None)
    attention = needed.per_square * length / 3  # the forward's
    again = 2 * layers + attention if spec.model.gradient_checkpointing else 0
    return (
        needed.per_token + needed.per_square * length + _passes(spec) * (2 * whole + attention),
        again,
    )


def _imbalance(census: Census, spec: Spec) -> float:
    """By the elements that multiply a token: those of layers, and the head."""
    cut = cut_of(spec.parallel, census)
    work = [0] * cut.stages
    for stage in range(cut.stages):
        is_last = stage == cut.stages - 1
        work[stage] = sum(
            p.numel
            for p in census.stage(stage, cut)
            if p.layer is not None or (is_last and (not p.embedding or p.aliases))
        )
    return max(work) * cut.stages / sum(work)


def _passes(spec: Spec) -> float:
    """Forward passes of a reference for each of the policy: a precomputed one sees each pair once a run."""
    if not needs_reference(spec):
        return 0
    if dpo_of(spec).reference == "precomputed":
        return 1 / max(1.0, spec.train.num_train_epochs)
    return 1


def assumed(spec: Spec) -> dict[str, Any]:
    """What the seconds rest on: a rank's peak in 10^12 operations a second, the share of it that is reached,
    each link's bytes a second."""
    return {
        "tflops": _tflops(spec),
        "reached": REACHED,
        "links": dict(CPU_LINKS if runs_on_cpu(spec) else GPU_LINKS),
    }


def _tflops(spec: Spec) -> float:
    accelerator = spec.cluster.accelerator if spec.cluster else None
    known = accelerator and (accelerator.peak_tflops or peak_tflops(accelerator.name))
    return known or (CPU_TFLOPS if runs_on_cpu(spec) else GPU_TFLOPS)


def _speed(spec: Spec, batch: BatchSizes) -> float:
    """FLOPs a second of one rank, by the tokens of a micro-batch."""
    tokens = batch.tokens_per_micro_batch or batch.micro_batch_size * spec.longest_example
    return _tflops(spec) * 1e12 * REACHED * tokens / (tokens + HALF_TOKENS)


def _link_speed(link: Link, spec: Spec, hosts: Mapping[str, int]) -> float:
    """Bytes a second of one rank."""
    on_cpu = runs_on_cpu(spec)
    speed = (CPU_LINKS if on_cpu else GPU_LINKS)[link]
    shared = link == "disk" or (on_cpu and link == "between hosts")
    return speed / max(hosts.values()) if shared else speed


def _updating(census: Census, spec: Spec, hosts: Mapping[str, int]) -> float:
    if spec.parallel.offload_optimizer.device == "none":
        return 0
    on_host = census.trained * max(hosts.values()) / sum(hosts.values())
    return on_host * ADAM_BYTES / HOST_MEMORY
