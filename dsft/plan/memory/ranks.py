"""Bytes that parameters, gradients, optimizer states and activations take on each GPU and each host. Takes a
census, a spec and a layout; pure arithmetic, which tests/integration/test_memory.py holds against what
DeepSpeed allocates, and each run against what it measures (memory.json).

The numbers are those of the phase with the peak (`dsft.plan.memory.phases`). Padding of flat buffers is not
among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from dsft.plan.batch import BatchSizes, batch_sizes
from dsft.plan.census import Census, Parameter
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import accumulates, bucket_size, gradients_stay_bf16
from dsft.plan.layout import Layout
from dsft.plan.memory.offload import swapped
from dsft.plan.memory.phases import NONE, Part, Phase, Row, Tensors, each, gathered, one, phases, total
from dsft.plan.memory.sizes import (
    BYTES_PER_LOGIT,
    FP32,
    PLAIN_BYTES_PER_LOGIT,
    SCORED_PARTS,
    chunk_limit,
    in_chunks,
    kept_rows,
    moment_bytes,
    runs_on_cpu,
    weight_bytes,
)
from dsft.spec.schema import Spec

PROCESS = 420 << 20
"""Bytes of a process with nothing of the model: Python, torch, transformers and DeepSpeed, measured on a CPU
at the end of a run of 150,000 parameters (docs/plan.md). With CUDA it is more."""
WITH_ZERO = 90 << 20
"""What ZeRO 1 to 3 import besides: torch's compiler, for Muon (zero/utils.py:72 MuonWithAuxAdam)."""

DRIVER = 1536 << 20
"""Bytes of a GPU that CUDA's context, its libraries and NCCL's buffers take beside torch's allocator. An
estimate, not measured: transformers' documentation ("Anatomy of Model's Memory") has 1,343 MB for CUDA's
kernels alone; they differ with the GPU, the driver and the number of ranks."""
FRAGMENTS = 1 / 40
"""Of what torch has allocated at most, about, what its allocator has reserved on top (docs/plan.md)."""

BACKWARD = 0.55
"""Of a layer's activations, about, that have gradients at once: measured of Llamas with torch's allocator."""

SPARE = 1 / 10
"""Of a figure, what a host must have beside it, since plans were mostly a little below the measured peaks
(docs/plan.md)."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank of a pipeline stage takes at its peak; on its GPU, but `offloaded`, in
    its host's memory. Beside them those of other phases: one_layer, logits, loading.

    parameters  weights in the type that forward and backward use
    gradients   what accumulates, and what is being reduced or read by the update
    master      fp32 weights that the optimizer updates, where they are not the parameters themselves
    moments     the optimizer's states
    buffers     reduction buckets and copies of what travels; at ZeRO 3 the gathered parameters
    activations what the backward needs of the micro-batches in flight, by the shapes of the matrices
    one_layer   those of the largest layer: what is recomputed at a time, and what evaluation takes
    head        of the last stage: the logits that are there at once, at most, and the fp32 sum of their
                chunks' gradients by the output layer's weight
    logits      the logits that evaluation has at once
    offloaded   fp32 weights, moments and gradients on the CPU, and activations where they are kept there
    reference   weights of a reference beside the policy (`with_reference`); those on the CPU are in offloaded
    loading     while model and engine are made
    between     what stays from one step to the next
    forward     what evaluation adds to that, at ZeRO 3 with the parameters that it gathers
    retained    on a CPU: freed blocks of other phases that the C library does not give back
    beside      on a GPU, about: what is taken of it beyond torch's tensors (DRIVER, FRAGMENTS)
    """

    stage: int
    elements: int
    parameters: int
    gradients: int
    master: int
    moments: int
    buffers: int
    activations: int
    one_layer: int
    head: int
    logits: int
    offloaded: int
    reference: int = 0
    loading: int = 0
    between: int = 0
    forward: int = 0
    retained: int = 0
    beside: int = 0

    @property
    def states(self) -> int:
        """On the GPU, without activations and head."""
        kept = self.parameters + self.master + self.moments + self.reference
        return kept + self.gradients + self.buffers

    @property
    def device(self) -> int:
        """What torch allocates."""
        return self.states + self.activations + self.head

    @property
    def gpu(self) -> int:
        """What the device must have."""
        return self.device + self.beside

    def phase(self, phase: str) -> int:
        """On the GPU, in one of the phases that a run's memory is measured in; 0 for another."""
        return {
            "load": self.loading + self.reference,
            "first_step": self.device,
            "steady": self.device,
            "evaluation": self.between + self.forward + self.reference,
            "save": self.between + self.reference,
        }.get(phase, 0)


@dataclass(frozen=True)
class Memory:
    """stages: one rank of each; hosts: host -> bytes of all its processes, those of the GPUs too where the
    accelerator is the CPU."""

    stages: tuple[RankMemory, ...]
    hosts: Mapping[str, int]


def memory(
    census: Census, spec: Spec, layout: Layout, hosts: Mapping[str, int], tokens: int | None = None
) -> Memory:
    """`hosts`: host -> ranks, in the order of the ranks; `tokens`: of the largest micro-batch, by default the
    most that the spec allows."""
    batch = batch_sizes(spec.train, layout.data_parallel)
    most = tokens or most_tokens(spec, layout)
    stages = tuple(
        stage_memory(stage, census, spec, layout, most, batch) for stage in range(layout.pipeline_stages)
    )
    return Memory(stages, of_host(stages, spec, layout, hosts))


def most_tokens(spec: Spec, layout: Layout) -> int:
    """Of a micro-batch, as the spec allows."""
    size = batch_sizes(spec.train, layout.data_parallel).micro_batch_size
    return spec.data.max_tokens_per_micro_batch or size * spec.longest_example


def stage_memory(
    stage: int, census: Census, spec: Spec, layout: Layout, tokens: int, batch: BatchSizes | None = None
) -> RankMemory:
    """One rank of a stage, where micro-batches of at most so many tokens pass through the stages. batch: of a
    step; None of a model that is not trained, which has one micro-batch at a time."""
    work = _work(stage, census, spec, _Flow(layout, batch.accumulation_steps if batch else 1, tokens))
    part = _part(stage, census, spec, layout, batch)
    part = replace(part, forward=work.forward, backward=work.backward)
    named = phases(part)
    found = list(named.values())
    fullest = max(found, key=total if part.on_cpu else on_device)
    small, large = max(_sum(phase).small for phase in found), max(_sum(phase).large for phase in found)
    rows = {row: fullest.get(row, NONE).total for row in get_args(Row)}
    if not part.on_cpu:
        rows["offloaded"] = max(map(_offloaded, found))
    return RankMemory(
        stage=stage,
        elements=sum(part.trained) + sum(part.frozen),
        one_layer=work.one_layer,
        logits=work.logits,
        loading=max(on_device(named[name]) for name in ("load", "flattening") if name in named),
        between=on_device(named["between"]),
        forward=max(work.one_layer, work.logits) + (gathered(part).total if part.zero == 3 else 0),
        retained=small + large - total(fullest) if part.on_cpu else 0,
        beside=0 if part.on_cpu else DRIVER + int(on_device(fullest) * FRAGMENTS),
        **rows,
    )


def _offloaded(phase: Phase) -> int:
    return phase.get("offloaded", NONE).total


def on_device(phase: Phase) -> int:
    return total(phase) - _offloaded(phase)


def _sum(phase: Phase) -> Tensors:
    return sum(phase.values(), NONE)


class OnRank(Protocol):
    """Bytes on a rank's GPU, of its host, and what its process keeps of what it has freed."""

    @property
    def device(self) -> int: ...
    @property
    def offloaded(self) -> int: ...
    @property
    def retained(self) -> int: ...


def of_host(stages: Sequence[OnRank], spec: Spec, layout: Layout, hosts: Mapping[str, int]) -> dict[str, int]:
    """Host -> bytes of all its processes, what is on the GPUs too where these are the CPU. hosts: host ->
    ranks, in the order of the ranks."""
    totals: dict[str, int] = {}
    first, process = 0, PROCESS + (WITH_ZERO if spec.parallel.zero_stage else 0)
    for host, slots in hosts.items():
        ranks = [stages[layout.stage(rank)] for rank in range(first, first + slots)]
        computed = sum(rank.device + rank.retained for rank in ranks) if runs_on_cpu(spec) else 0
        totals[host] = slots * process + sum(rank.offloaded for rank in ranks) + computed
        first += slots
    return totals


def needed(size: int) -> int:
    """Bytes that a host must have, where the plan counts so many."""
    return size + int(size * SPARE)


@dataclass(frozen=True)
class _Flow:
    """What passes through the stages in a step: so many micro-batches of at most so many tokens."""

    layout: Layout
    micro_batches: int
    tokens: int

    def in_flight(self, stage: int) -> int:
        """1F1B: a stage has begun as many micro-batches as stages follow it, and its own."""
        return min(self.layout.pipeline_stages - stage, self.micro_batches)


@dataclass(frozen=True)
class _Work:
    """What a forward and a backward take; one_layer, logits: as in RankMemory, those of a forward alone."""

    forward: Phase
    backward: Phase
    one_layer: int
    logits: int


def _part(stage: int, census: Census, spec: Spec, layout: Layout, batch: BatchSizes | None) -> Part:
    parameters = census.stage(stage, cut_of(spec.parallel, census))
    parallel, on_cpu = spec.parallel, runs_on_cpu(spec)
    devices = (parallel.offload_optimizer.device, parallel.offload_parameters.device)
    stays = batch is not None and gradients_stay_bf16(spec, batch)
    return Part(
        trained=tuple(p.numel for p in parameters if p.trained),
        frozen=tuple(p.numel for p in parameters if not p.trained),
        zero=parallel.zero_stage,
        ranks=layout.data_parallel,
        weight=weight_bytes(spec),
        reduced=2 if spec.train.reduce_dtype == "bf16" else FP32,
        moment=moment_bytes(spec),
        bucket=bucket_size(census.trained),
        gathered=bucket_size(census.numel),
        optimizer=devices[0],
        parameters=devices[1],
        groups=2 if spec.optim.weight_decay or spec.optim.groups else 1,
        accumulates=batch is not None and accumulates(spec, batch),
        pipeline=parallel.pipeline_stages > 1,
        on_cpu=on_cpu,
        is_bf16=spec.train.precision == "bf16",
        pinned=not on_cpu and parallel.offload_optimizer.pin_memory is not False,
        locked=swapped(census, spec, layout.data_parallel).locked if "nvme" in devices else 0,
        gradient=weight_bytes(spec) if stays else FP32,
    )


def _work(stage: int, census: Census, spec: Spec, flow: _Flow) -> _Work:
    """The activations of all micro-batches in flight, and the head: its logits are gone when the backward
    begins, the gradient of its weight is not.

    With gradient checkpointing a layer keeps its input alone, and one layer at a time is recomputed. Of the
    layer through which the backward goes BACKWARD of its activations have gradients at once.
    """
    found: dict[int, list[Parameter]] = {}
    for parameter in census.stage(stage, cut_of(spec.parallel, census)):
        if parameter.layer is not None:
            found.setdefault(parameter.layer, []).append(parameter)
    token, flight = flow.tokens * weight_bytes(spec), flow.in_flight(stage)
    hidden = _embedding(census)[1]
    layers = [each(_kept(own, hidden, spec), token) for own in found.values()]
    one_layer = max(layers, key=lambda layer: layer.total, default=NONE)
    inputs = each([hidden] * len(layers) * flight, token)
    is_last = stage == flow.layout.pipeline_stages - 1
    logits, gradient, scored = _head(census, spec, flow.tokens) if is_last else (0, 0, 0)
    flowing = one(int(one_layer.total * BACKWARD))
    ahead, back, on_host = sum(layers * flight, NONE), sum(layers * flight, NONE), NONE
    if spec.model.gradient_checkpointing:
        ahead, back = inputs, one_layer + inputs
        if spec.model.activation_offload:
            ahead, back, on_host = NONE, one_layer, inputs
    forward: Phase = {"activations": ahead, "head": one(logits) + one(gradient), "offloaded": on_host}
    backward: Phase = {"activations": back + flowing, "head": one(gradient), "offloaded": on_host}
    return _Work(forward, backward, one_layer.total, scored)


def _kept(own: Sequence[Parameter], hidden: int, spec: Spec) -> list[int]:
    """Elements per token that the backward needs of a layer of these parameters, in the type of the weights.

    Of each matrix the input, and what follows it needs the output; the widest once more, for what the
    activation function gives. Where q, k and v share an input it is counted for each, which stands for what
    the two norms and rotary embeddings keep; trained norms of narrower weights keep two hidden vectors more.
    An adapter's matrices have one input with the layer's own, and so add their rank.
    """
    matrices = [p.shape for p in own if len(p.shape) == 2 and ".lora_" not in p.name]
    ranks = [min(p.shape) for p in own if len(p.shape) == 2 and ".lora_" in p.name]
    norms = weight_bytes(spec) < FP32 and any(p.trained and len(p.shape) == 1 for p in own)
    widest = max((shape[0] for shape in matrices), default=0)
    return [size for shape in matrices for size in shape] + [widest, *ranks] + [hidden] * (2 * norms)


def _embedding(census: Census) -> tuple[int, int]:
    """Words of the vocabulary, hidden size."""
    found = next((p for p in census.parameters if p.embedding), None)
    vocabulary, hidden = found.shape if found is not None else (0, 0)
    return vocabulary, hidden


def _head(census: Census, spec: Spec, tokens: int) -> tuple[int, int, int]:
    """Logits, the sum of their chunks' gradients by the weight, which fp16 and preference pairs have no need
    of, and the logits of a forward alone; were every token a target."""
    vocabulary, hidden = _embedding(census)
    chunk = chunk_limit("cpu" if runs_on_cpu(spec) else "cuda")
    if not in_chunks(tokens * vocabulary, chunk):
        plain = tokens * vocabulary * PLAIN_BYTES_PER_LOGIT
        return plain, 0, plain
    scored = min(tokens * vocabulary * BYTES_PER_LOGIT, chunk // SCORED_PARTS)
    outside = [p for p in census.parameters if p.layer is None and p.shape == (vocabulary, hidden)]
    weights = [p for p in outside if not p.embedding] or outside  # tied: the embedding's
    if spec.train.precision == "fp16" or not any(p.trained for p in weights):
        return min(tokens * vocabulary * BYTES_PER_LOGIT, chunk), 0, scored
    if not spec.task_kind.preference:
        return min(tokens * vocabulary * BYTES_PER_LOGIT, chunk), vocabulary * hidden * FP32, scored
    row = vocabulary * weight_bytes(spec)
    kept = kept_rows(tokens, row, chunk)
    at_once = min(tokens * vocabulary * BYTES_PER_LOGIT, chunk // SCORED_PARTS if kept == tokens else chunk)
    return kept * row + at_once, 0, scored
