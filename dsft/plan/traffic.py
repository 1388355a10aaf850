"""What a rank sends and reads in an optimizer step, how often, and over which link. Takes a census, a spec, a
layout and its hosts; pure arithmetic.

Collectives are counted as on a ring of n ranks, each of which sends (n-1)/n of the bytes in an all-gather or
a reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms"). What DeepSpeed 0.19.8 calls, and when, was counted on two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dsft.plan.batch import batch_sizes
from dsft.plan.census import Census
from dsft.plan.cut import Cut, cut_of
from dsft.plan.ds_config import LIVE, PERSIST_BELOW
from dsft.plan.layout import Layout
from dsft.plan.memory.ranks import most_tokens
from dsft.plan.memory.sizes import FP32, moment_bytes, runs_on_cpu, weight_bytes
from dsft.plan.reference import dpo_of, needs_reference, reference_stage
from dsft.spec.schema import Spec

Link = Literal["within a host", "between hosts", "host memory", "disk"]
"""Between GPUs of a host, through the network, between a GPU and its host's memory, to a host's disk."""


@dataclass(frozen=True)
class Flow:
    """What the busiest rank sends, or reads and writes, over one link: `bytes_each` bytes, `times` a step."""

    what: str
    link: Link
    times: int
    bytes_each: int

    @property
    def bytes(self) -> int:
        return self.times * self.bytes_each


def bubble(stages: int, micro_batches: int) -> float:
    """Share of a step in which a stage has nothing to do: (stages-1) ÷ (micro_batches + stages-1), where all
    stages take equally long (1F1B; Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (micro_batches + stages - 1)


def traffic(
    census: Census, spec: Spec, layout: Layout, hosts: Mapping[str, int], tokens: int | None = None
) -> tuple[Flow, ...]:
    """Of each kind and link the busiest rank's, where there is anything. hosts: host -> ranks,
    in their order; tokens: of a micro-batch, by default the most that the spec allows."""
    cut = cut_of(spec.parallel, census)
    most = tokens or most_tokens(spec, layout)
    on = [host for host, slots in hosts.items() for _ in range(slots)]
    busiest: dict[tuple[str, Link], Flow] = {}
    for stage in range(layout.pipeline_stages):
        for flow in _flows(_step(census, spec, layout, on, (cut, stage), most)):
            place = flow.what, flow.link
            if flow.bytes > (busiest[place].bytes if place in busiest else 0):
                busiest[place] = flow
    return tuple(busiest.values())


@dataclass(frozen=True)
class _Step:
    """A stage's part in a step.

    trained    elements of the stage that are trained
    sharded    those that ZeRO 3 gathers for each use; what is small is whole on every rank
    tied       of a trained embedding that is the head too, on the first stage and the last
    layers     in the stage; hidden: the width between them
    on         the host of each rank
    """

    spec: Spec
    layout: Layout
    stage: int
    trained: int
    sharded: int
    tied: int
    layers: int
    hidden: int
    micro_batches: int
    tokens: int
    on: Sequence[str]

    @property
    def share(self) -> int:
        """Trained elements that one rank updates."""
        return -(-self.trained // self.layout.data_parallel)

    @property
    def hidden_bytes(self) -> int:
        """Of a micro-batch between two layers."""
        return self.tokens * self.hidden * weight_bytes(self.spec)

    def ranks(self, stage: int) -> range:
        """Of one stage."""
        return range(stage * self.layout.data_parallel, (stage + 1) * self.layout.data_parallel)

    def ring(
        self, what: str, times: int, elements: int, width: int, others: Sequence[int] = ()
    ) -> Iterator[Flow]:
        """While the stage's ranks, and others, all gather, or reduce and scatter, elements of `width` bytes:
        of the ranks on a host, each of which sends to the next one, one sends to another host, and they take
        turns where a host has a network card for each."""
        together = (*self.ranks(self.stage), *others)
        on_hosts = Counter(self.on[rank] for rank in together).values()
        sent = elements * width * (len(together) - 1) // len(together)
        if len(on_hosts) > 1:
            yield Flow(what, "between hosts", times, sent // min(on_hosts))
            sent -= sent // max(on_hosts)
        yield Flow(what, "within a host", times, sent)


def _flows(step: _Step) -> Iterator[Flow]:
    yield from _gradients(step)
    yield from _parameters(step)
    yield from _reference(step)
    yield from _pipeline(step)
    if not runs_on_cpu(step.spec):  # whose memory the host's is
        yield from _to_host(step)
    yield from _to_disk(step)


def _step(
    census: Census, spec: Spec, layout: Layout, on: Sequence[str], part: tuple[Cut, int], tokens: int
) -> _Step:
    cut, stage = part
    parameters = census.stage(stage, cut)
    return _Step(
        spec,
        layout,
        stage,
        trained=sum(p.numel for p in parameters if p.trained),
        sharded=sum(p.numel for p in parameters if p.numel > PERSIST_BELOW),
        tied=sum(p.numel for p in parameters if p.embedding and p.aliases and p.trained),
        layers=len(cut.layers(stage)),
        hidden=hidden_size(census),
        micro_batches=batch_sizes(spec.train, layout.data_parallel).accumulation_steps,
        tokens=tokens,
        on=on,
    )


def _gradients(step: _Step) -> Iterator[Flow]:
    """All-reduced whole below ZeRO 3 (stage_1_and_2.py:1695 use_multi_rank_bucket_allreduce), at ZeRO 2
    after each micro-batch (engine.py:3085 zero_optimization_partition_gradients), below once a step; reduced
    and scattered at ZeRO 3 (stage3.py:1931 reduce_scatter_coalesced) after each micro-batch."""
    zero = step.spec.parallel.zero_stage
    elements = step.trained * (1 if zero == 3 else 2)
    width = 2 if step.spec.train.reduce_dtype == "bf16" else FP32
    yield from step.ring("gradients", step.micro_batches if zero >= 2 else 1, elements, width)


def _parameters(step: _Step) -> Iterator[Flow]:
    """ZeRO 1 and 2 gather what was updated, once; ZeRO 3 gathers for each forward and backward."""
    zero = step.spec.parallel.zero_stage
    width = weight_bytes(step.spec)
    if zero in (1, 2):
        yield from step.ring("updated parameters", 1, step.trained, width)
    elif zero == 3:
        yield from step.ring("parameters for use", step.micro_batches, _gathered(step), width)


def _gathered(step: _Step) -> int:
    """Elements, per micro-batch: twice, but for the last, which stay between forward and backward where fewer
    than `stage3_max_reuse_distance` are used between (partitioned_param_coordinator.py:634
    __params_to_release), recomputed ones
    counted again."""
    uses_between = 3 if step.spec.model.gradient_checkpointing else 2
    return 2 * step.sharded - min(step.sharded, LIVE // uses_between)


def _reference(step: _Step) -> Iterator[Flow]:
    """A live one that is sharded is gathered for each micro-batch; it has the policy's size, as far as is
    known here."""
    spec = step.spec
    if not needs_reference(spec) or dpo_of(spec).reference == "precomputed":
        return
    adapter = dpo_of(spec).reference == "adapter"
    if (spec.parallel.zero_stage if adapter else reference_stage(spec)) == 3:
        width = weight_bytes(spec)
        yield from step.ring("reference's parameters", step.micro_batches, step.sharded, width)


def _pipeline(step: _Step) -> Iterator[Flow]:
    """Hidden states to the next stage, their gradient to the one before; and the gradient of an embedding
    that is the head too, all-reduced over all ranks of the first stage and the last (engine/pipeline.py)."""
    last, times = step.layout.pipeline_stages - 1, step.micro_batches
    if step.stage < last:
        yield Flow("hidden states", _neighbours(step, step.stage + 1), times, step.hidden_bytes)
    if step.stage > 0:
        yield Flow("their gradients", _neighbours(step, step.stage - 1), times, step.hidden_bytes)
    if last > 0 and step.stage in (0, last):
        yield from step.ring("tied gradients", 1, 2 * step.tied, FP32, step.ranks(last - step.stage))


def _neighbours(step: _Step, other: int) -> Link:
    """The slowest link to the ranks of another stage that hold the same data."""
    pairs = zip(step.ranks(step.stage), step.ranks(other), strict=True)
    apart = any(step.on[one] != step.on[another] for one, another in pairs)
    return "between hosts" if apart else "within a host"


def hidden_size(census: Census) -> int:
    return next((p.shape[1] for p in census.parameters if p.embedding), 0)


def _to_host(step: _Step) -> Iterator[Flow]:
    """To and from what is kept in the host's memory, and what passes through it on its way to a disk."""
    parallel, model = step.spec.parallel, step.spec.model
    width = weight_bytes(step.spec)
    if parallel.offload_optimizer.device != "none":
        yield Flow("gradients", "host memory", 1, step.share * FP32)
        yield from _added_gradients(step)
        if parallel.offload_parameters.device == "none":
            yield Flow("updated parameters", "host memory", 1, step.share * width)
    if parallel.offload_parameters.device != "none":
        yield Flow("parameters for use", "host memory", step.micro_batches, _read(step))
    if model.activation_offload and model.gradient_checkpointing:
        inputs = step.layers * step.hidden_bytes
        yield Flow("inputs of layers", "host memory", step.micro_batches, 2 * inputs)


def _to_disk(step: _Step) -> Iterator[Flow]:
    parallel = step.spec.parallel
    if parallel.offload_optimizer.device == "nvme":
        # fp32 weights, moments and gradients, written and read (stage3.py,
        # _optimizer_states_and_gradient_swap_in)
        states = step.share * (2 * FP32 + moment_bytes(step.spec))
        yield Flow("optimizer states", "disk", 1, 2 * states)
    if parallel.offload_parameters.device == "nvme":
        yield Flow("parameters for use", "disk", step.micro_batches, _read(step))
        yield Flow("updated parameters", "disk", 1, step.share * weight_bytes(step.spec))


def _read(step: _Step) -> int:
    """Bytes of its own share that a rank reads for a micro-batch."""
    return -(-_gathered(step) // step.layout.data_parallel) * weight_bytes(step.spec)


def _added_gradients(step: _Step) -> Iterator[Flow]:
    """At ZeRO 2 and 3 each micro-batch's are added to the earlier ones on the GPU, which come back for it
    (stage_1_and_2.py:1809 async_accumulate_grad_in_cpu_via_gpu, stage3.py:2023 grad_buffer)."""
    zero, times = step.spec.parallel.zero_stage, step.micro_batches
    if zero == 3 or (zero == 2 and times > 1):
        width = weight_bytes(step.spec) if zero == 2 else FP32
        yield Flow("gradients that add up", "host memory", times, 2 * step.share * width)
