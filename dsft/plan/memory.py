"""Bytes that parameters, gradients, optimizer states and activations take on each GPU and each host. Takes a
census, a spec and a layout; pure arithmetic, which tests/integration/test_memory.py holds against what
DeepSpeed allocates, and each run against what it measures (memory.json).

The numbers are those of a step's fullest moment. Padding of flat buffers is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dsft.plan.batch import batch_sizes
from dsft.plan.census import Census, Parameter
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import LIVE, PERSIST_BELOW, SUB_GROUP, bucket_size
from dsft.plan.head import (
    BYTES_PER_LOGIT,
    PLAIN_BYTES_PER_LOGIT,
    SCORED_PARTS,
    chunk_limit,
    in_chunks,
    kept_rows,
)
from dsft.plan.layout import Layout
from dsft.plan.swapped import Swapped, swapped
from dsft.spec.pairs import longest_example
from dsft.spec.schema import Spec

FP32 = 4  # bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank of a pipeline stage takes; on its GPU, but the last, in its host's memory.

    parameters  weights in the type that forward and backward use
    gradients   what accumulates, and what is being reduced
    master      fp32 weights that the optimizer updates, where they are not the parameters themselves
    moments     the optimizer's states
    buffers     reduction buckets and, at ZeRO 3, at most so many gathered parameters
    activations what the backward needs of the micro-batches in flight, by the shapes of the matrices
    one_layer   of them, those of the largest layer: what is recomputed at a time, and what evaluation takes
    head        of the last stage: the logits that are there at once, at most, and the fp32 sum of their
                chunks' gradients by the output layer's weight
    logits      of them, the logits, which is what evaluation takes
    offloaded   fp32 weights, moments and gradients on the CPU, and activations where they are kept there
    reference   weights of a reference beside the policy (`with_reference`); those on the CPU are in offloaded
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
            "load": kept,
            "first_step": self.device,
            "steady": self.device,
            "evaluation": kept + self.moments + self.one_layer + self.logits,
            "save": kept + self.moments,
        }.get(phase, 0)


@dataclass(frozen=True)
class Memory:
    """stages: one rank of each; hosts: host -> bytes, including the GPUs' where the accelerator is the
    CPU."""

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
    return Memory(stages, of_host(stages, layout, hosts, on_cpu=runs_on_cpu(spec)))


def most_tokens(spec: Spec, layout: Layout) -> int:
    """Of a micro-batch, as the spec allows."""
    size = batch_sizes(spec.train, layout.data_parallel).micro_batch_size
    return spec.data.max_tokens_per_micro_batch or size * longest_example(spec.data, spec.task)


def stage_memory(
    stage: int, census: Census, spec: Spec, layout: Layout, tokens: int, micro_batches: int = 1
) -> RankMemory:
    """One rank of a stage, where micro-batches of at most so many tokens pass through the stages."""
    flow = _Flow(layout, micro_batches, tokens)
    return _with_activations(_rank(stage, census, spec, layout), census, spec, flow)


class OnRank(Protocol):
    """Bytes on a rank's GPU, and of its host."""

    @property
    def device(self) -> int: ...
    @property
    def offloaded(self) -> int: ...


def of_host(
    stages: Sequence[OnRank], layout: Layout, hosts: Mapping[str, int], *, on_cpu: bool
) -> dict[str, int]:
    """Host -> bytes of all its ranks, the GPUs' too where these are the CPU. hosts: host -> ranks, in the
    order of the ranks."""
    totals: dict[str, int] = {}
    first = 0
    for host, slots in hosts.items():
        ranks = [stages[layout.stage(rank)] for rank in range(first, first + slots)]
        totals[host] = sum(rank.offloaded + (rank.device if on_cpu else 0) for rank in ranks)
        first += slots
    return totals


def swapped_of(census: Census, spec: Spec, ranks: int, sub_group: int = SUB_GROUP) -> Swapped:
    """What one rank swaps to its disk."""
    return swapped(census, spec, ranks, sub_group, moment_bytes(spec), weight_bytes(spec))


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


def _rank(stage: int, census: Census, spec: Spec, layout: Layout) -> RankMemory:
    ranks = layout.data_parallel
    parameters = census.stage(stage, cut_of(spec.parallel, census))
    zero = spec.parallel.zero_stage
    whole = sum(parameter.numel for parameter in parameters)
    trained = sum(parameter.numel for parameter in parameters if parameter.trained)
    share = -(-trained // ranks) if zero else trained
    states = share * (FP32 + moment_bytes(spec))
    offloaded = spec.parallel.offload_optimizer.device != "none"
    fp32_without_zero = zero == 0 and spec.train.precision == "fp32"
    return RankMemory(
        stage=stage,
        elements=whole,
        parameters=_parameters(parameters, spec, ranks),
        gradients=_gradients(trained, share, spec),
        master=0 if offloaded or fp32_without_zero else share * FP32,
        moments=0 if offloaded else share * moment_bytes(spec),
        buffers=_buffers(whole, bucket_size(census.trained), spec),
        activations=0,
        one_layer=0,
        head=0,
        logits=0,
        # the gradients twice: as they accumulate, and as the CPU optimizer reads them
        offloaded=states + 2 * share * FP32 if offloaded else 0,
    )


def _with_activations(rank: RankMemory, census: Census, spec: Spec, flow: _Flow) -> RankMemory:
    """With the activations of all micro-batches in flight.

    Of each matrix of a layer the backward needs the input, and what follows it needs the output: in + out
    elements per token, in the type of the weights. Where q, k and v share an input it is counted for each,
    which stands for what the two norms, rotary embeddings and the activation function keep. With gradient
    checkpointing a layer keeps its input alone, and one layer at a time is recomputed.
    """
    part = census.stage(rank.stage, cut_of(spec.parallel, census))
    layers: dict[int, int] = {}
    for parameter in part:
        if parameter.layer is not None and len(parameter.shape) == 2:
            layers[parameter.layer] = layers.get(parameter.layer, 0) + sum(parameter.shape)
    hidden = _embedding(census)[1]
    token = flow.tokens * weight_bytes(spec)
    one_layer = max(layers.values(), default=0) * token
    inputs = len(layers) * hidden * token * flow.in_flight(rank.stage)
    is_last = rank.stage == flow.layout.pipeline_stages - 1
    logits, gradient = _head(census, spec, flow.tokens) if is_last else (0, 0)
    if not spec.model.gradient_checkpointing:
        kept, on_host = sum(layers.values()) * token * flow.in_flight(rank.stage), 0
    elif spec.model.activation_offload:
        kept, on_host = one_layer, inputs
    else:
        kept, on_host = one_layer + inputs, 0
    return replace(
        rank,
        activations=kept,
        one_layer=one_layer,
        head=logits + gradient,
        logits=logits,
        offloaded=rank.offloaded + on_host,
    )


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


def _parameters(parameters: tuple[Parameter, ...], spec: Spec, ranks: int) -> int:
    if spec.parallel.zero_stage < 3:
        return sum(parameter.numel for parameter in parameters) * weight_bytes(spec)
    shares = sum(-(-parameter.numel // ranks) for parameter in parameters)
    kept = sum(parameter.numel for parameter in parameters if parameter.numel <= PERSIST_BELOW)
    return (shares + kept) * weight_bytes(spec)


def _gradients(whole: int, share: int, spec: Spec) -> int:
    """Of a rank's GPU, for `whole` trained elements. Which gradients DeepSpeed holds at once differs with
    stage and type."""
    zero, bf16 = spec.parallel.zero_stage, spec.train.precision == "bf16"
    offloaded = spec.parallel.offload_optimizer.device != "none"
    if zero == 0:
        return whole * (2 + FP32) if bf16 else whole * FP32  # bf16: and their fp32 copy in the update
    if zero == 1 and not offloaded:
        # bf16: BF16_Optimizer's fp32 buffer is whole. Else whole until reduced into the rank's share.
        return whole * (2 + FP32) if bf16 else whole * weight_bytes(spec) + share * FP32
    if not offloaded:
        return share * FP32
    return {1: whole, 2: share, 3: 0}[zero] * weight_bytes(spec)


def _buffers(whole: int, bucket: int, spec: Spec) -> int:
    """Buckets are allocated in full; at ZeRO 3 gathered parameters come on top, up to what may live at
    once."""
    zero = spec.parallel.zero_stage
    reduced = 2 if spec.train.reduce_dtype == "bf16" else FP32
    overlapped = zero < 3 and spec.parallel.pipeline_stages == 1
    if zero == 0 or (zero == 1 and spec.train.precision == "bf16"):
        return 0
    gathered = min(whole, LIVE) * weight_bytes(spec) if zero == 3 else 0
    return bucket * reduced * (2 if overlapped else 1) + gathered
