"""Compute the peak memory of each GPU and each host: parameters, gradients, optimizer states, activations.

The numbers are those of the phase with the peak (`dsft.plan.memory.phases`), without padding of flat buffers.
tests/integration/test_memory.py compares them with what DeepSpeed allocates, and each run with what it
measures (memory.json).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

from dsft.plan.census import Census, Parameter
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import bucket_size
from dsft.plan.memory.attention import BACKWARD, moved_by_split_rows, scores_of
from dsft.plan.memory.gathered import LEAF_BLOCKS, Gathered, gathered
from dsft.plan.memory.layer import (
    activations,
    chunk_sums,
    dequantized,
    forward_only,
    mlp_chunks,
    of_norms,
    recomputed_experts,
    without_mlp,
)
from dsft.plan.memory.logits import embedding, logits_of, normed
from dsft.plan.memory.offload import swapped, updated_at_once
from dsft.plan.memory.phases import phases
from dsft.plan.memory.setup import RankSetup
from dsft.plan.memory.sizes import compute_bytes, fewer_moment_bytes, moment_bytes, orthogonal_bytes
from dsft.plan.memory.tensors import NONE, Phase, Row, Tensors, each, one, total
from dsft.plan.storage import FP32
from dsft.spec.batch import BatchSizes, accumulates, batch_sizes, deepspeed_stage, gradients_stay_bf16
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec

PROCESS = 420 << 20
"""Bytes of a process without the model: Python, torch, transformers and DeepSpeed, measured on a CPU at the
end of a run with 150,000 parameters (docs/internals/memory.md). With CUDA it is more."""
WITH_ZERO = 90 << 20
"""Additional bytes at ZeRO 1 to 3, which import torch's compiler for Muon (zero/utils.py:72
MuonWithAuxAdam)."""

DRIVER = 1536 << 20
"""Bytes that CUDA's context, its libraries and NCCL's buffers take on a GPU outside torch's allocator. An
estimate, not measured: transformers' documentation ("Anatomy of Model's Memory") gives 1,343 MB for CUDA's
kernels alone; the size depends on the GPU, the driver and the number of ranks."""
FRAGMENTS = 1 / 40
"""Approximate share of torch's peak allocation that its allocator reserves in addition
(docs/internals/memory.md)."""

PASSED = 3
"""Hidden states, with their gradients, that a stage of DeepSpeed's pipeline keeps in its buffers between
steps: measured on the stand-in GPU in two and four stages."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage in the phase with its peak memory; on the GPU, except offloaded.
    one_layer, logits, loading, between and forward belong to other phases.

    parameters   weights in the type of forward and backward
    copies       this rank's part of its group's second copy of the parameters (hpZ)
    gradients    accumulated gradients, and those being reduced or read by the update
    master       fp32 master weights, if they are not the parameters themselves
    moments      optimizer states
    buffers      reduction buckets and copies for communication; at ZeRO 3 the gathered parameters
    activations  activations of the micro-batches in flight that the backward needs, from the matrices' shapes
    one_layer    what the largest layer has at once in a forward without a backward
    head         on the last stage: the most logits in memory at once, and the fp32 sum of the chunks'
                 gradients of the output layer's weight
    logits       logits that evaluation has in memory at once
    offloaded    fp32 weights, moments and gradients in host memory, and offloaded activations
    reference    weights of a reference beside the policy (`with_reference`); offloaded ones are in offloaded
    loading      peak while model and engine are created
    between      tensors that stay from one step to the next
    forward      what evaluation adds to between, at ZeRO 3 including the gathered parameters
    kept         what evaluation leaves gathered at ZeRO 3, beside which a checkpoint is saved
    retained     on a CPU: freed blocks of other phases that the C library does not return
    beside       on a GPU: estimate of its memory outside torch's tensors (DRIVER, FRAGMENTS)
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
    copies: int = 0
    reference: int = 0
    loading: int = 0
    between: int = 0
    forward: int = 0
    kept: int = 0
    retained: int = 0
    beside: int = 0

    @property
    def states(self) -> int:
        """Bytes on the GPU without activations and head."""
        stored = self.parameters + self.copies + self.master + self.moments + self.reference
        return stored + self.gradients + self.buffers

    @property
    def device(self) -> int:
        """Bytes that torch allocates on the device."""
        return self.states + self.activations + self.head

    @property
    def gpu(self) -> int:
        """Bytes that the device must have."""
        return self.device + self.beside

    def phase(self, phase: str) -> int:
        """Return the bytes on the GPU in one of the phases in which a run measures its memory; 0 for
        others."""
        return {
            "load": self.loading + self.reference,
            "first_step": self.device,
            "steady": self.device,
            "evaluation": self.between + self.forward + self.reference,
            "save": self.between + self.kept + self.reference,
        }.get(phase, 0)


@dataclass(frozen=True)
class Memory:
    """Memory of a run. stages: one rank of each stage; hosts: host -> bytes of all its processes, including
    the devices' memory if the accelerator is the CPU."""

    stages: tuple[RankMemory, ...]
    hosts: Mapping[str, int]


def memory(
    census: Census, spec: Spec, layout: Layout, hosts: Mapping[str, int], tokens: int | None = None
) -> Memory:
    """Compute the memory of a run. hosts: host -> number of ranks, in rank order; tokens: number in the
    largest micro-batch, by default the most that the spec allows."""
    batch = batch_sizes(spec.train, layout.data_parallel)
    most = tokens or most_tokens(spec, layout)
    stages = tuple(
        stage_memory(stage, census, spec, layout, most, batch) for stage in range(layout.pipeline_stages)
    )
    return Memory(stages, of_host(stages, spec, layout, hosts))


def most_tokens(spec: Spec, layout: Layout) -> int:
    """Return the largest number of tokens in a micro-batch that the spec allows."""
    size = batch_sizes(spec.train, layout.data_parallel).micro_batch_size
    return spec.data.max_tokens_per_micro_batch or size * spec.longest_example


def stage_memory(
    stage: int, census: Census, spec: Spec, layout: Layout, tokens: int, batch: BatchSizes | None = None
) -> RankMemory:
    """Compute the memory of one rank of a stage. tokens: maximum per micro-batch, before its rows are split
    over ranks; batch: sizes of a step, None for a model that is not trained, which has one micro-batch at a
    time."""
    micro_batches = batch.accumulation_steps if batch else 1
    in_flight = min(layout.pipeline_stages - stage, micro_batches)  # 1F1B: one per stage from here on
    own_tokens = layout.part(tokens)
    chunks = mlp_chunks(spec, census, own_tokens)
    work = _work(stage, census, spec, in_flight, own_tokens, chunks)
    setup = _setup(stage, census, spec, layout, batch, work, chunks)
    named = phases(setup)
    found = list(named.values())
    fullest = max(found, key=total if setup.on_cpu else on_device)
    small, large = max(_sum(phase).small for phase in found), max(_sum(phase).large for phase in found)
    rows = {row: fullest.get(row, NONE).total for row in get_args(Row)}
    if not setup.on_cpu:
        rows["offloaded"] = max(map(_offloaded, found))
    return RankMemory(
        stage=stage,
        elements=sum(p.numel for p in census.stage(stage, cut_of(spec.parallel, census))),
        one_layer=work.one_layer,
        logits=work.logits,
        loading=max(on_device(named[name]) for name in ("load", "flattening") if name in named),
        between=on_device(named["between"]) + work.passed,
        forward=_evaluation(work, setup.gathered),
        kept=setup.gathered.kept.total,
        retained=small + large - total(fullest) if setup.on_cpu else 0,
        beside=0 if setup.on_cpu else DRIVER + int(on_device(fullest) * FRAGMENTS),
        **rows,
    )


def _evaluation(work: _Work, whole: Gathered) -> int:
    """Return what evaluation adds."""
    layers = max(whole.mlps.total + work.one_layer, whole.others.total + work.attention)
    return max(whole.in_forward.total, layers, whole.head.total + work.logits)


def _offloaded(phase: Phase) -> int:
    return phase.get("offloaded", NONE).total


def on_device(phase: Phase) -> int:
    return total(phase) - _offloaded(phase)


def _sum(phase: Phase) -> Tensors:
    return sum(phase.values(), NONE)


def of_host(
    stages: Sequence[RankMemory], spec: Spec, layout: Layout, hosts: Mapping[str, int]
) -> dict[str, int]:
    """Return host -> bytes of all its processes, including the devices' memory if the accelerator is the CPU.
    hosts: host -> number of ranks, in rank order."""
    totals: dict[str, int] = {}
    first, process = 0, PROCESS + (WITH_ZERO if spec.parallel.zero_stage else 0)
    for host, slots in hosts.items():
        ranks = [stages[layout.stage(rank)] for rank in range(first, first + slots)]
        computed = sum(rank.device + rank.retained for rank in ranks) if spec.is_on_cpu else 0
        totals[host] = slots * process + sum(rank.offloaded for rank in ranks) + computed
        first += slots
    return totals


@dataclass(frozen=True)
class _Work:
    """Activations and head in forward, backward and the reduction of a layer's gradients; one_layer, logits:
    as in RankMemory, for a forward without backward; attention: of a layer without its MLP, likewise; passed:
    the hidden states that a pipeline's stage keeps between steps."""

    forward: Phase
    backward: Phase
    reducing: Phase
    one_layer: int
    attention: int
    logits: int
    passed: int


def _setup(
    stage: int, census: Census, spec: Spec, layout: Layout, batch: BatchSizes | None, work: _Work, chunks: int
) -> RankSetup:
    parameters = census.stage(stage, cut_of(spec.parallel, census))
    parallel, on_cpu = spec.parallel, spec.is_on_cpu
    devices = (parallel.offload_optimizer.device, parallel.offload_parameters.device)
    stays = batch is not None and gradients_stay_bf16(spec, batch)
    together: Counter[str] = Counter()
    stored = [(p, tensor) for p in parameters for tensor in p.stored(spec.train.precision)]
    for parameter in parameters:
        if parameter.layer is not None and parameter.trained:
            together[(parameter.mlp if chunks > 1 else None) or parameter.module] += parameter.numel
    zero, whole = deepspeed_stage(spec, batch), Gathered()
    if zero == 3 and layout.shards > 1:  # one rank has all of it (_no_gather_coalesced)
        leaves = {p.mlp for p in parameters if p.mlp and chunks > 1}
        if census.architecture in LEAF_BLOCKS:
            leaves |= {p.module.removesuffix(".experts") for p in parameters if p.experts > 1}
        held = None if batch is None else work.forward["activations"].total
        whole = gathered(parameters, spec, bucket_size(census.numel), frozenset(leaves), held)
    inside = [p for p in parameters if p.trained and p.layer is not None]
    return RankSetup(
        trained=tuple(p.numel for p in parameters if p.trained),
        frozen=tuple(tensor for p, tensor in stored if not p.trained),
        zero=zero,
        ranks=layout.shards,
        weight=compute_bytes(spec),
        reduced=2 if spec.train.reduce_dtype == "bf16" else FP32,
        moment=moment_bytes(spec),
        in_8_bits=spec.optim.facts.in_8_bits,
        fewer=fewer_moment_bytes(parameters, spec),
        sub_group=updated_at_once(parameters, spec, layout.shards),
        orthogonal=orthogonal_bytes(parameters, spec, layout.shards if parallel.zero_stage else 1),
        bucket=bucket_size(census.trained),
        gathered=whole,
        inside=max((p.numel for p in inside), default=0),
        outside=max((p.numel for p in parameters if p.trained and p.layer is None), default=0),
        beside=max((p.numel for p in inside if chunks == 1 or not p.mlp), default=0),
        together=max(together.values(), default=0),
        reads_whole=bool(spec.model.lora and (spec.model.lora.use_dora or spec.model.lora.path)),
        optimizer=devices[0],
        parameters=devices[1],
        groups=2 if spec.optim.weight_decay or spec.optim.groups else 1,
        accumulates=batch is not None and accumulates(spec, batch),
        pipeline=parallel.pipeline_stages > 1,
        on_cpu=on_cpu,
        is_bf16=spec.train.precision == "bf16",
        pinned=not on_cpu and parallel.offload_optimizer.pin_memory is not False,
        locked=swapped(census, spec, layout.shards).locked if "nvme" in devices else 0,
        forward=work.forward,
        backward=work.backward,
        reducing=work.reducing,
        gradient=compute_bytes(spec) if stays else FP32,
        copied=parallel.zero_hpz_partition_size,
    )


def _work(stage: int, census: Census, spec: Spec, in_flight: int, tokens: int, chunks: int) -> _Work:
    """Return the activations of the micro-batches in flight, and the head. The logits and the sum of the
    gradients of the head's weight are freed before the backward of the layers. tokens: that the rank has of a
    micro-batch; chunks: in which MLPs are computed.

    A checkpointed layer stores only its input, and one layer at a time is recomputed. In the layer that the
    backward is in, the share BACKWARD of the activations has gradients at once.
    """
    found = _layers(stage, census, spec)
    token, hidden = tokens * compute_bytes(spec), embedding(census)[1]
    scores, flowing_scores, of_forward = scores_of(census, spec, tokens)
    moved, sent = moved_by_split_rows(census, spec)
    recomputed = [spec.model.checkpoints(number) for number in found]
    cuts = [(own, chunks if again else 1) for own, again in zip(found.values(), recomputed, strict=True)]
    layers = [
        activations(own, hidden, spec, tokens, cut) + each(moved, token) + one(scores) for own, cut in cuts
    ]
    largest = max((layer.total for layer in layers), default=0)
    sums = max((chunk_sums(own, spec, chunks) for own in found.values()), key=lambda s: s.total, default=NONE)
    added = sum(moved) * token + of_forward
    one_layer, attention = (
        added + max((forward_only(part(own), hidden, spec, tokens, cut) for own, cut in cuts), default=0)
        for part in (list, without_mlp)
    )
    inputs = each([hidden] * sum(recomputed) * in_flight, token)
    logits, gradient, scored = _head(stage, census, spec, tokens)
    narrowed = gradient * compute_bytes(spec) // FP32  # head.py, GradientInForward.backward
    flowing = one(int((largest - scores) * BACKWARD) + flowing_scores) + one(sent * token)
    stored = [layer for layer, again in zip(layers, recomputed, strict=True) if not again]
    ahead, on_host = sum(stored * in_flight, inputs), NONE
    if spec.model.activation_offload:
        # The device has the inputs of the layer that is computed, and those of the next one, on their way.
        arrived = each([hidden] * min(2, sum(recomputed)), token)
        ahead, on_host = sum(stored * in_flight, arrived), inputs
    ends = (
        recomputed_experts(own, hidden, spec, tokens)
        for own, again in zip(found.values(), recomputed, strict=True)
        if again
    )
    flowing = one(max(flowing.total, max(ends, default=0) - largest))
    back = ahead + _recomputed_at_once(layers, recomputed) + (sums if any(recomputed) else NONE)
    own = [*chain.from_iterable(found.values())]
    whole = max(dequantized(own, spec), of_norms(own, spec, trains=True))
    forward: Phase = {
        "activations": ahead + (normed(hidden, tokens, spec) if logits else NONE),
        "head": one(max(logits, narrowed)) + one(gradient),
        "offloaded": on_host,
        "buffers": one(max(0, whole - logits)),  # the logits come after the last layer
    }
    backward: Phase = {
        "activations": back + flowing,
        "offloaded": on_host,
        "buffers": one(max(0, whole - flowing.total)),  # one product's while few gradients flow
    }
    # of the layer whose gradients are reduced, an MLP's activations are freed
    half, again = largest // 2, any(recomputed)
    left = ahead + one(half) if again else one(max(ahead.total - half, 0))
    reducing: Phase = {"activations": left, "offloaded": on_host, "buffers": one(whole)}
    passed = PASSED * token * hidden if spec.parallel.pipeline_stages > 1 else 0
    return _Work(forward, backward, reducing, one_layer, attention, scored, passed)


def _layers(stage: int, census: Census, spec: Spec) -> dict[int, list[Parameter]]:
    """Return the parameters of each layer of the stage."""
    found: dict[int, list[Parameter]] = {}
    for parameter in census.stage(stage, cut_of(spec.parallel, census)):
        if parameter.layer is not None:
            found.setdefault(parameter.layer, []).append(parameter)
    return found


def _head(stage: int, census: Census, spec: Spec, tokens: int) -> tuple[int, int, int]:
    """Return what `logits_of` does on the stage that has the head, if it is the vocabulary's; else zeros."""
    has_logits = spec.model.head == "vocabulary" and stage == spec.parallel.pipeline_stages - 1
    return logits_of(census, spec, tokens) if has_logits else (0, 0, 0)


def _recomputed_at_once(layers: Sequence[Tensors], recomputed: Sequence[bool]) -> Tensors:
    """Return what recomputation adds to the stored activations where the backward has the most of both: the
    backward frees the stored layers from the last one on, before it recomputes the layers before them."""
    most, freed = NONE, 0
    for layer, again in zip(reversed(layers), reversed(recomputed), strict=True):
        if not again:
            freed += layer.total
        elif layer.total - freed > most.total:
            most = layer if not freed else one(layer.total - freed)
    return most
