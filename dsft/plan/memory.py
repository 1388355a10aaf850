"""Bytes that parameters, gradients, optimizer states and activations take on each GPU and each host. Takes a
census, a spec and a layout; pure arithmetic, which tests/integration/test_memory.py holds against what
DeepSpeed allocates, and each run against what it measures (memory.json).

The numbers are those of a run's fullest moment (`dsft.plan.moments`). Padding of flat buffers is not among
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from dsft.plan.batch import batch_sizes
from dsft.plan.census import Census
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import SUB_GROUP, bucket_size, gradients_stay_bf16
from dsft.plan.head import (
    BYTES_PER_LOGIT,
    PLAIN_BYTES_PER_LOGIT,
    SCORED_PARTS,
    chunk_limit,
    in_chunks,
    kept_rows,
)
from dsft.plan.layout import Layout
from dsft.plan.moments import NONE, Moment, Part, Row, Tensors, each, moments, one, total
from dsft.plan.swapped import Swapped, swapped
from dsft.plan.units import FP32
from dsft.spec.pairs import longest_example
from dsft.spec.schema import Spec

PROCESS = 420 << 20
"""Bytes of a process with nothing of the model: Python, torch, transformers and DeepSpeed, measured on a CPU
at the end of a run of 150,000 parameters (docs/plan.md). With CUDA it is more."""
WITH_ZERO = 90 << 20  # what ZeRO 1 to 3 import besides: torch's compiler, for Muon (deepspeed utils.py:72)

SPARE = 1 / 10
"""Of a figure, what a host must have beside it, since plans were mostly a little below the measured peaks
(docs/plan.md)."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank of a pipeline stage takes in its fullest moment; on its GPU, but `offloaded`, in
    its host's memory. Beside them those of other moments: one_layer, logits, loading.

    parameters  weights in the type that forward and backward use
    gradients   what accumulates, and what is being reduced or read by the update
    master      fp32 weights that the optimizer updates, where they are not the parameters themselves
    moments     the optimizer's states
    buffers     reduction buckets and copies of what travels; at ZeRO 3 the gathered parameters
    activations what the backward needs of the micro-batches in flight, by the shapes of the matrices
    one_layer   those of the largest layer: what is recomputed at a time, and what evaluation takes
    head        of the last stage: the logits that are there at once, at most, and the fp32 sum of their
                chunks' gradients by the output layer's weight
    logits      the logits alone, which is what evaluation takes
    offloaded   fp32 weights, moments and gradients on the CPU, and activations where they are kept there
    reference   weights of a reference beside the policy (`with_reference`); those on the CPU are in offloaded
    loading     while model and engine are made
    retained    on a CPU: freed blocks of other moments that the C library does not give back
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
    retained: int = 0

    @property
    def states(self) -> int:
        """On the GPU, without activations and head."""
        kept = self.parameters + self.master + self.moments + self.reference
        return kept + self.gradients + self.buffers

    @property
    def device(self) -> int:
        return self.states + self.activations + self.head

    def phase(self, phase: str) -> int:
        """On the GPU, in one of the phases that a run's memory is measured in; 0 for another."""
        kept = self.parameters + self.master + self.reference
        return {
            "load": self.loading + self.reference,
            "first_step": self.device,
            "steady": self.device,
            "evaluation": kept + self.moments + self.one_layer + self.logits,
            "save": kept + self.moments,
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
    steps = batch_sizes(spec.train, layout.data_parallel).accumulation_steps
    most = tokens or most_tokens(spec, layout)
    stages = tuple(
        stage_memory(stage, census, spec, layout, most, steps) for stage in range(layout.pipeline_stages)
    )
    return Memory(stages, of_host(stages, spec, layout, hosts))


def most_tokens(spec: Spec, layout: Layout) -> int:
    """Of a micro-batch, as the spec allows."""
    size = batch_sizes(spec.train, layout.data_parallel).micro_batch_size
    return spec.data.max_tokens_per_micro_batch or size * longest_example(spec.data, spec.task)


def stage_memory(
    stage: int, census: Census, spec: Spec, layout: Layout, tokens: int, micro_batches: int = 1
) -> RankMemory:
    """One rank of a stage, where micro-batches of at most so many tokens pass through the stages."""
    work = _work(stage, census, spec, _Flow(layout, micro_batches, tokens))
    part = replace(_part(stage, census, spec, layout, micro_batches), backward=work.moment)
    found = list(moments(part).values())
    fullest = max(found, key=lambda moment: total(moment) - (0 if part.on_cpu else _offloaded(moment)))
    small, large = max(_sum(moment).small for moment in found), max(_sum(moment).large for moment in found)
    rows = {row: fullest.get(row, NONE).total for row in get_args(Row)}
    if not part.on_cpu:
        rows["offloaded"] = max(map(_offloaded, found))
    return RankMemory(
        stage=stage,
        elements=sum(part.trained) + sum(part.frozen),
        one_layer=work.one_layer,
        logits=work.logits,
        loading=total(found[0]) - _offloaded(found[0]),
        retained=small + large - total(fullest) if part.on_cpu else 0,
        **rows,
    )


def _offloaded(moment: Moment) -> int:
    return moment.get("offloaded", NONE).total


def _sum(moment: Moment) -> Tensors:
    return sum(moment.values(), NONE)


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


def swapped_of(census: Census, spec: Spec, ranks: int, sub_group: int = SUB_GROUP) -> Swapped:
    """What one rank swaps to its disk."""
    return swapped(census, spec, ranks, sub_group, moment_bytes(spec), weight_bytes(spec))


def needed(size: int) -> int:
    """Bytes that a host must have, where the plan counts so many."""
    return size + int(size * SPARE)


def runs_on_cpu(spec: Spec) -> bool:
    accelerator = spec.cluster.accelerator if spec.cluster else None
    return accelerator is not None and accelerator.name.lower() == "cpu"


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
    """What a forward and a backward take; one_layer, logits: as in RankMemory."""

    moment: Moment
    one_layer: int
    logits: int


def _part(stage: int, census: Census, spec: Spec, layout: Layout, micro_batches: int) -> Part:
    parameters = census.stage(stage, cut_of(spec.parallel, census))
    parallel, on_cpu = spec.parallel, runs_on_cpu(spec)
    devices = (parallel.offload_optimizer.device, parallel.offload_parameters.device)
    stays = gradients_stay_bf16(spec, batch_sizes(spec.train, layout.data_parallel))
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
        accumulates=micro_batches > 1,
        pipeline=parallel.pipeline_stages > 1,
        on_cpu=on_cpu,
        is_bf16=spec.train.precision == "bf16",
        pinned=not on_cpu and parallel.offload_optimizer.pin_memory is not False,
        locked=swapped_of(census, spec, layout.data_parallel).locked if "nvme" in devices else 0,
        gradient=weight_bytes(spec) if stays else FP32,
    )


def _work(stage: int, census: Census, spec: Spec, flow: _Flow) -> _Work:
    """The activations of all micro-batches in flight, and the head.

    Of each matrix of a layer the backward needs the input, and what follows it needs the output: in + out
    elements per token, in the type of the weights. Where q, k and v share an input it is counted for each,
    which stands for what the two norms, rotary embeddings and the activation function keep. With gradient
    checkpointing a layer keeps its input alone, and one layer at a time is recomputed.
    """
    matrices: dict[int, list[int]] = {}
    for parameter in census.stage(stage, cut_of(spec.parallel, census)):
        if parameter.layer is not None and len(parameter.shape) == 2:
            matrices.setdefault(parameter.layer, []).extend(parameter.shape)
    token, flight = flow.tokens * weight_bytes(spec), flow.in_flight(stage)
    layers = [each(sizes, token) for sizes in matrices.values()]
    one_layer = max(layers, key=lambda layer: layer.total, default=NONE)
    inputs = each([_embedding(census)[1]] * len(layers) * flight, token)
    is_last = stage == flow.layout.pipeline_stages - 1
    logits, gradient = _head(census, spec, flow.tokens) if is_last else (0, 0)
    kept, on_host = sum(layers * flight, NONE), NONE
    if spec.model.gradient_checkpointing:
        kept, on_host = (one_layer, inputs) if spec.model.activation_offload else (one_layer + inputs, NONE)
    moment: Moment = {"activations": kept, "head": one(logits) + one(gradient), "offloaded": on_host}
    return _Work(moment, one_layer.total, logits)


def _embedding(census: Census) -> tuple[int, int]:
    """Words of the vocabulary, hidden size."""
    found = next((p for p in census.parameters if p.embedding), None)
    vocabulary, hidden = found.shape if found is not None else (0, 0)
    return vocabulary, hidden


def _head(census: Census, spec: Spec, tokens: int) -> tuple[int, int]:
    """Logits, and the sum of their chunks' gradients by the weight, which fp16 and preference pairs have no
    need of; were every token a target."""
    vocabulary, hidden = _embedding(census)
    chunk = chunk_limit("cpu" if runs_on_cpu(spec) else "cuda")
    if not in_chunks(tokens * vocabulary, chunk):
        return tokens * vocabulary * PLAIN_BYTES_PER_LOGIT, 0
    outside = [p for p in census.parameters if p.layer is None and p.shape == (vocabulary, hidden)]
    weights = [p for p in outside if not p.embedding] or outside  # tied: the embedding's
    if spec.train.precision == "fp16" or not any(p.trained for p in weights):
        return min(tokens * vocabulary * BYTES_PER_LOGIT, chunk), 0
    if spec.task != "dpo":
        return min(tokens * vocabulary * BYTES_PER_LOGIT, chunk), vocabulary * hidden * FP32
    row = vocabulary * weight_bytes(spec)
    kept = kept_rows(tokens, row, chunk)
    at_once = min(tokens * vocabulary * BYTES_PER_LOGIT, chunk // SCORED_PARTS if kept == tokens else chunk)
    return kept * row + at_once, 0


def weight_bytes(spec: Spec) -> int:
    return FP32 if spec.train.precision == "fp32" else 2


def moment_bytes(spec: Spec) -> int:
    if spec.optim.name == "adamw":
        return 2 * FP32
    return FP32 if spec.optim.momentum else 0
