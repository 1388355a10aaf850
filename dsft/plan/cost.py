"""Estimate the seconds of an optimizer step, to rank the layouts of a run. The speeds are assumptions, so
this is not a forecast.

seconds = computing × imbalance ÷ (1 - bubble) + Σ traffic ÷ link speed + the optimizer's pass over host
memory

No overlap is assumed. Imbalance: ratio of the largest stage's work to the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.plan.census import Census
from dsft.plan.cut import cut_of
from dsft.plan.flops import gpu_of, orthogonal_flops, work
from dsft.plan.reference import policy_passes, reference_passes, scores_in_training
from dsft.plan.traffic import Flow, Link, bubble, hidden_size
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Spec

REACHED = 0.55
"""Share of a device's peak that matrix products reach; of three runs on an H200 (docs/gpu.md)."""

HALF_TOKENS = 512
"""Tokens of a micro-batch that computes at half of that speed: with so few rows, matrix products are limited
by reading the weights."""

GPU_TFLOPS, CPU_TFLOPS = 312.0, 0.1
"""Peak of a device if neither its name nor the spec gives it: that of an A100 in bf16, and of a few cores."""

GPU_LINKS: Mapping[Link, float] = {
    "within a host": 300e9,
    "between hosts": 50e9,
    "host memory": 40e9,
    "disk": 5e9,
}
"""Bytes per second of a rank: NVLink of an A100 if the GPU is not in `flops.GPUS`, one network card of 400
Gb/s per GPU, PCIe 5; the disk is shared by all ranks of a host."""

CPU_LINKS: Mapping[Link, float] = {
    "within a host": 5e9,
    "between hosts": 1.25e9,
    "host memory": 10e9,
    "disk": 2e9,
}
"""Bytes per second of a rank: shared memory, 10 Gb/s Ethernet, a disk; Ethernet and disk are shared by all
ranks of a host. Nothing is copied to host memory, since that is the device's own memory."""

ADAM_BYTES = 28
"""Bytes per element that an AdamW update reads and writes: it reads weight, gradient and two moments and
writes all but the gradient, 4 bytes each."""

HOST_MEMORY = 200e9
"""Bytes per second of a host's memory, shared by all its ranks."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, by cause.

    computing   forward and backward of the policy with recomputation, and forward of a reference
    idle        pipeline bubble, and waiting for the largest stage
    travelling  traffic over all links
    updating    update by an optimizer on the host, or the products of muon
    """

    computing: float
    idle: float
    travelling: float
    updating: float

    @property
    def seconds(self) -> float:
        return self.computing + self.idle + self.travelling + self.updating


@dataclass(frozen=True)
class StepSize:
    """What a step computes.

    tokens         of all examples, with padding
    length         tokens of the example that a token is in, on average
    micro_batches  of a rank
    """

    tokens: float
    length: float
    micro_batches: float


def full_step(spec: Spec, batch: BatchSizes) -> StepSize:
    """Return the size of a step whose rows all have data.max_length tokens."""
    tokens = batch.global_batch_size * spec.longest_example
    return StepSize(tokens, spec.data.max_length, batch.accumulation_steps)


def cost(  # noqa: PLR0913, PLR0917
    census: Census,
    spec: Spec,
    batch: BatchSizes,
    flows: Sequence[Flow],
    hosts: Mapping[str, int],
    size: StepSize | None = None,
) -> Cost:
    """Estimate the cost of a step. hosts: host -> number of ranks; size: None for a full step."""
    size, steps = size or full_step(spec, batch), batch.accumulation_steps
    speeds = assumed(spec)
    tokens = size.tokens / (size.micro_batches * batch.data_parallel)
    tokens = min(tokens, batch.tokens_per_micro_batch or tokens) / batch.sequence_parallel
    speed = speeds["tflops"] * 1e12 * REACHED
    flops = step_flops(census, spec, size.length) * size.tokens
    computing = flops * _slower(census, tokens) / (speed * sum(hosts.values()))
    share = bubble(spec.parallel.pipeline_stages, size.micro_batches)
    shared = ("disk", "between hosts") if spec.is_on_cpu else ("disk",)  # by all ranks of a host
    most = max(hosts.values())
    on_host = spec.parallel.offload_optimizer.device != "none"
    updated = census.trained * most / sum(hosts.values()) if on_host else 0
    products = orthogonal_flops(census) if spec.optim.facts.matrices is not None else 0
    dividing = sum(hosts.values()) if spec.parallel.zero_stage else spec.parallel.pipeline_stages

    def seconds(flow: Flow) -> float:
        is_each = steps > 1 and flow.times % steps == 0  # for each micro-batch
        sent = flow.bytes * (size.micro_batches / steps if is_each else 1)
        return float(sent * (most if flow.link in shared else 1) / speeds["links"][flow.link])

    return Cost(
        computing,
        computing * _imbalance(census, spec) / (1 - share) - computing,
        sum(map(seconds, flows)),
        updated * ADAM_BYTES / HOST_MEMORY + products / (speed * dividing),
    )


def step_flops(census: Census, spec: Spec, length: float | None = None) -> float:
    """Return FLOPs per token of examples of `length` tokens, by default data.max_length: of the model, of
    recomputation, of the pass that counts the tokens of experts, of KTO's estimate, of the head's product
    again where several tokens of each target are scored, and of a reference's forward passes; a precomputed
    reference scores each example once per run, and mismatched answers once per epoch."""
    length = length or spec.data.max_length
    needed = work(census, hidden_size(census))
    whole = sum(p.active for p in census.parameters if not p.embedding or p.aliases)
    layers = sum(p.active for p in census.parameters if p.layer is not None)
    attention = needed.per_square * length / 3  # of the forward pass
    found = needed.per_token + needed.per_square * length
    recomputed = sum(map(spec.model.checkpoints, range(census.num_layers)))
    found += (2 * layers + attention) * recomputed / census.num_layers
    if spec.model.experts.balance == "global_batch":
        found += 2 * whole + attention
    if spec.reference is not None and spec.reference.teacher_values:
        found += 2 * (whole - layers)
    passes: float = policy_passes(spec) + reference_passes(spec)
    if spec.reference is not None and not scores_in_training(spec):
        passes += 1 / max(1.0, spec.train.num_train_epochs) + policy_passes(spec)
    return found + (2 * whole + attention) * passes


def _slower(census: Census, tokens: float) -> float:
    """Return how many times longer matrix products take with the rows of a micro-batch of `tokens` tokens
    than with many. An expert has top_k/experts of these rows, where all are chosen equally often."""
    multiplied = [p for p in census.parameters if not p.embedding or p.aliases]
    longer = sum(p.active * (1 + HALF_TOKENS * p.experts / (p.top_k * tokens)) for p in multiplied)
    return longer / sum(p.active for p in multiplied)


def _imbalance(census: Census, spec: Spec) -> float:
    """Return the ratio of the largest stage's work to the mean; work is counted as the elements that multiply
    a token, those of the layers and the head."""
    cut = cut_of(spec.parallel, census)
    work = [
        sum(
            p.active
            for p in census.stage(stage, cut)
            if p.layer is not None or (stage == cut.stages - 1 and (not p.embedding or p.aliases))
        )
        for stage in range(cut.stages)
    ]
    return max(work) * cut.stages / sum(work)


def assumed(spec: Spec) -> dict[str, Any]:
    """Return the assumptions of the estimate: a rank's peak in 10^12 FLOP/s, the share of it that is reached,
    and bytes per second of each link."""
    accelerator, on_cpu = spec.accelerator, spec.is_on_cpu
    gpu = gpu_of(accelerator.name) if accelerator else None
    links = dict(CPU_LINKS if on_cpu else GPU_LINKS)
    if gpu is not None:
        links["within a host"] = gpu.link
        links["host memory"] = min(gpu.link, links["host memory"])
    given = (accelerator.peak_tflops if accelerator else None) or (gpu.tflops if gpu else None)
    return {
        "tflops": given or (CPU_TFLOPS if on_cpu else GPU_TFLOPS),
        "reached": REACHED,
        "links": links,
    }
