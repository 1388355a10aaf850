"""Compute the traffic of an optimizer step: what the busiest rank sends and reads, how often, over which
link.

Collectives are counted as on a ring of n ranks, each of which sends (n-1)/n of the bytes in an all-gather or
a reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms"). Which collectives DeepSpeed 0.19.8 calls, and when, was counted on two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dsft.plan.census import Census, Heads
from dsft.plan.cut import Cut, cut_of
from dsft.plan.ds_config import LIVE, PERSIST_BELOW
from dsft.plan.memory.ranks import most_tokens
from dsft.plan.memory.sizes import compute_bytes, moment_bytes
from dsft.plan.reference import (
    has_engine,
    policy_passes,
    reference_parallel,
    reference_passes,
    scores_in_training,
)
from dsft.plan.storage import FP32, Stored
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout, hosts_of_ranks
from dsft.spec.schema import Parallel, Spec

Link = Literal["within a host", "between hosts", "host memory", "disk"]
"""In order: between GPUs of a host, through the network, between a GPU and its host's memory, to a host's
disk."""


@dataclass(frozen=True)
class Flow:
    """Traffic of the busiest rank over one link: `bytes_each` bytes, `times` per step, sent, or read and
    written."""

    what: str
    link: Link
    times: int
    bytes_each: int

    @property
    def bytes(self) -> int:
        return self.times * self.bytes_each


def bubble(stages: int, micro_batches: float) -> float:
    """Return the share of a step in which a pipeline stage is idle: (stages-1) ÷ (micro_batches + stages-1),
    if all stages take equally long (1F1B; Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (micro_batches + stages - 1)


def traffic(
    census: Census, spec: Spec, layout: Layout, hosts: Mapping[str, int], tokens: int | None = None
) -> tuple[Flow, ...]:
    """Return the non-empty flows of the busiest rank, one per kind and link. hosts: host -> number of ranks,
    in rank order; tokens: number in a micro-batch, by default the most that the spec allows."""
    cut = cut_of(spec.parallel, census)
    most = tokens or most_tokens(spec, layout)
    on = hosts_of_ranks(hosts)
    busiest: dict[tuple[str, Link], Flow] = {}
    for stage in range(layout.pipeline_stages):
        for flow in _flows(_step(census, spec, layout, on, (cut, stage), most)):
            place = flow.what, flow.link
            if flow.bytes > (busiest[place].bytes if place in busiest else 0):
                busiest[place] = flow
    return tuple(busiest.values())


@dataclass(frozen=True)
class _Step:
    """One pipeline stage in a step.

    trained        trained elements of the stage
    sharded        the tensors that ZeRO 3 gathers for each use; small ones are whole on every rank
    changed        bytes of those of them that are trained
    tied           elements of a trained embedding that is tied to the head, on the first and the last stage
    layers         number of layers in the stage
    recomputed     number of these that are checkpointed
    hidden         hidden size
    heads          attention heads of a layer
    micro_batches  micro-batches per step
    tokens         tokens that a rank has of a micro-batch
    on             host of each rank
    """

    spec: Spec
    layout: Layout
    stage: int
    trained: int
    sharded: Sequence[Stored]
    changed: int
    tied: int
    layers: int
    recomputed: int
    hidden: int
    heads: Heads | None
    micro_batches: int
    tokens: int
    on: Sequence[str]

    @property
    def share(self) -> int:
        """Number of trained elements that one rank updates."""
        return -(-self.trained // self.layout.shards)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the rank's hidden states of a micro-batch between two layers."""
        return self.tokens * self.hidden * compute_bytes(self.spec)

    @property
    def sharded_elements(self) -> int:
        return sum(tensor.numel for tensor in self.sharded)

    def size(self, elements: int) -> int:
        """Return the bytes of some elements of what ZeRO 3 gathers."""
        return elements * sum(tensor.bytes for tensor in self.sharded) // max(self.sharded_elements, 1)

    def ranks(self, stage: int) -> range:
        """Return the ranks of one stage."""
        return range(stage * self.layout.shards, (stage + 1) * self.layout.shards)

    @property
    def group(self) -> range:
        """The ranks of a group that splits rows: the one that is on the most hosts."""
        size, ranks = self.layout.sequence_parallel, self.ranks(self.stage)
        groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        return max(groups, key=lambda group: len({self.on[rank] for rank in group}))

    def ring(self, what: str, times: int, size: int, ranks: Sequence[int] = ()) -> Iterator[Flow]:
        """Yield the flows of a ring all-gather or reduce-scatter among `ranks`, by default the stage's.

        size: bytes in total. Each rank sends to the next one, so one rank per host
        sends to another host; the traffic between hosts is divided by the ranks of a host, which take turns,
        since each GPU has its network card.
        """
        together = ranks or self.ranks(self.stage)
        on_hosts = Counter(self.on[rank] for rank in together).values()
        sent = size * (len(together) - 1) // len(together)
        if len(on_hosts) > 1:
            yield Flow(what, "between hosts", times, sent // min(on_hosts))
            sent -= sent // max(on_hosts)
        yield Flow(what, "within a host", times, sent)


def _flows(step: _Step) -> Iterator[Flow]:
    yield from _gradients(step)
    yield from _parameters(step)
    yield from _reference(step)
    yield from _pipeline(step)
    yield from _split_rows(step)
    if not step.spec.is_on_cpu:  # on a CPU, host memory is the device's memory
        yield from _to_host(step)
    yield from _to_disk(step)


def _step(
    census: Census, spec: Spec, layout: Layout, on: Sequence[str], part: tuple[Cut, int], tokens: int
) -> _Step:
    cut, stage = part
    layers = cut.layers(stage)
    parameters = census.stage(stage, cut)
    stored = ((p, tensor) for p in parameters for tensor in p.stored(spec.train.precision))
    sharded = [(p, tensor) for p, tensor in stored if tensor.numel > PERSIST_BELOW]
    return _Step(
        spec,
        layout,
        stage,
        trained=sum(p.numel for p in parameters if p.trained),
        sharded=[tensor for _, tensor in sharded],
        changed=sum(tensor.bytes for p, tensor in sharded if p.trained),
        tied=sum(p.numel for p in parameters if p.embedding and p.aliases and p.trained),
        layers=len(layers),
        recomputed=sum(map(spec.model.checkpoints, layers)),
        hidden=hidden_size(census),
        heads=census.heads,
        micro_batches=batch_sizes(spec.train, layout.data_parallel).accumulation_steps,
        tokens=layout.part(tokens),
        on=on,
    )


def _gradients(step: _Step) -> Iterator[Flow]:
    """Yield the reduction of gradients.

    ZeRO 0, and 1 by BF16_Optimizer: one all-reduce per step. ZeRO 1 otherwise: each rank's part is reduced to
    it, once per step (stage_1_and_2.py:1695 use_multi_rank_bucket_allreduce). ZeRO 2: the same after each
    micro-batch (engine.py:3085 zero_optimization_partition_gradients). ZeRO 3: a reduce-scatter after each
    micro-batch (stage3.py:1931 reduce_scatter_coalesced).
    """
    zero, spec = step.spec.parallel.zero_stage, step.spec
    offloads = spec.parallel.offload_optimizer.device != "none"
    all_reduces = zero == 0 or zero == 1 and spec.train.precision == "bf16" and not offloads
    elements = step.trained * (2 if all_reduces else 1)
    width = 2 if step.spec.train.reduce_dtype == "bf16" else FP32
    yield from step.ring("gradients", step.micro_batches if zero >= 2 else 1, elements * width)


def _parameters(step: _Step) -> Iterator[Flow]:
    """Yield the gathering of parameters: of the updated ones once per step at ZeRO 1 and 2, for each forward
    and backward at ZeRO 3, and there for the passes before a step. With second copies only the first gather
    after an update is over all ranks (partition_parameters.py:1572 use_secondary_tensor)."""
    zero = step.spec.parallel.zero_stage
    if zero in (1, 2):
        yield from step.ring("updated parameters", 1, step.trained * compute_bytes(step.spec))
    elif zero == 3:
        used, whole = step.size(_gathered(step)), step.size(step.sharded_elements)
        group = _with_copy(step.spec.parallel)
        if group:  # over all ranks only after their values have changed: by a step, or for a reference
            changes = 1 + (scores_in_training(step.spec) and not has_engine(step.spec))
            yield from step.ring("updated parameters", changes, step.changed)
            used -= step.changed // step.micro_batches
        yield from step.ring("parameters for use", step.micro_batches, used, group)
        if step.spec.model.experts.balance == "global_batch":
            yield from step.ring("parameters to count tokens", step.micro_batches, whole, group)
        if policy_passes(step.spec):
            what = "parameters to estimate the divergence"
            yield from step.ring(what, step.micro_batches, whole, group)


def _with_copy(parallel: Parallel) -> range:
    """Return the ranks of a group that has a second copy of the parameters; none without copies."""
    size = parallel.zero_hpz_partition_size
    return range(size if size > 1 else 0)


def _gathered(step: _Step) -> int:
    """Return the elements that ZeRO 3 gathers per micro-batch: each parameter twice, except for the last
    ones, which stay between forward and backward if fewer than `stage3_max_reuse_distance` elements are used
    in between (partitioned_param_coordinator.py:634 __params_to_release). With gradient checkpointing,
    recomputation is one more use."""
    uses_between = 2 + step.recomputed / step.layers
    sharded = step.sharded_elements
    return 2 * sharded - min(sharded, int(LIVE / uses_between))


def _reference(step: _Step) -> Iterator[Flow]:
    """Yield the gathering of a sharded live reference, for each micro-batch. The reference's
    size is unknown here; it is taken to be the policy's."""
    spec = step.spec
    if not scores_in_training(spec):
        return
    parallel = reference_parallel(spec) if has_engine(spec) else spec.parallel
    if parallel.zero_stage == 3:
        times, size = reference_passes(spec) * step.micro_batches, step.size(step.sharded_elements)
        yield from step.ring("reference's parameters", times, size, _with_copy(parallel))


def _pipeline(step: _Step) -> Iterator[Flow]:
    """Yield the traffic between stages: hidden states to the next stage, once more where a first pass counts
    the tokens of experts or estimates the divergence of KTO; their gradient to the previous one; and the
    gradient of a tied embedding, all-reduced over all ranks of the first and the last stage
    (engine/pipeline.py)."""
    last, times = step.layout.pipeline_stages - 1, step.micro_batches
    if step.stage < last:
        passes = 1 + (step.spec.model.experts.balance == "global_batch") + policy_passes(step.spec)
        link = _link_between(step, step.stage + 1)
        yield Flow("hidden states", link, passes * times, step.hidden_bytes)
    if step.stage > 0:
        back = _link_between(step, step.stage - 1)
        yield Flow("gradients of hidden states", back, times, step.hidden_bytes)
    if last > 0 and step.stage in (0, last):
        yield from step.ring("tied gradients", 1, 2 * step.tied * FP32, (*step.ranks(0), *step.ranks(last)))


def _split_rows(step: _Step) -> Iterator[Flow]:
    """Yield the traffic of a group whose ranks split rows: the all-to-alls of queries, keys, values and
    output in each layer's forward, its recomputation, its backward and a forward of the reference, in which a
    rank sends each of the others an equal part; and on the last stage the gathering of the targets'
    log-probabilities."""
    spec, group, size = step.spec, step.group, step.layout.sequence_parallel
    if size == 1:
        return
    again = policy_passes(spec) + reference_passes(spec)
    counts = spec.model.experts.balance == "global_batch"
    if step.heads is not None:
        times = ((2 + counts + again) * step.layers + step.recomputed) * step.micro_batches
        to_each = step.tokens * step.heads.exchanged(size) * compute_bytes(spec) // size
        on_hosts = Counter(step.on[rank] for rank in group).values()
        away = size - min(on_hosts)
        yield Flow("all-to-alls of attention", "between hosts", times, away * to_each)
        yield Flow("all-to-alls of attention", "within a host", times, (max(on_hosts) - 1) * to_each)
    if step.stage == step.layout.pipeline_stages - 1:
        times = (1 + again) * step.micro_batches
        yield from step.ring("log-probabilities", times, size * step.tokens * FP32, group)


def _link_between(step: _Step, other: int) -> Link:
    """Return the slowest link to the ranks of another stage that process the same rows."""
    pairs = zip(step.ranks(step.stage), step.ranks(other), strict=True)
    apart = any(step.on[one] != step.on[another] for one, another in pairs)
    return "between hosts" if apart else "within a host"


def hidden_size(census: Census) -> int:
    return next((p.shape[1] for p in census.parameters if p.embedding), 0)


def _to_host(step: _Step) -> Iterator[Flow]:
    """Yield the traffic to and from host memory, including what passes through it to a disk."""
    parallel, model = step.spec.parallel, step.spec.model
    width = compute_bytes(step.spec)
    if parallel.offload_optimizer.device != "none":
        yield Flow("gradients", "host memory", 1, step.share * FP32)
        zero, times = parallel.zero_stage, step.micro_batches
        if zero == 3 or (zero == 2 and times > 1):
            # The earlier gradients are copied back to the GPU and added there (stage_1_and_2.py:1809
            # async_accumulate_grad_in_cpu_via_gpu, stage3.py:2023 grad_buffer).
            added = step.share * (width if zero == 2 else FP32)
            yield Flow("gradients that add up", "host memory", times, 2 * added)
        if parallel.offload_parameters.device == "none":
            yield Flow("updated parameters", "host memory", 1, step.share * width)
    if parallel.offload_parameters.device != "none":
        yield Flow("parameters for use", "host memory", step.micro_batches, _read(step))
    if model.activation_offload and step.recomputed:
        inputs = step.recomputed * step.hidden_bytes
        yield Flow("inputs of layers", "host memory", step.micro_batches, 2 * inputs)


def _to_disk(step: _Step) -> Iterator[Flow]:
    parallel = step.spec.parallel
    if parallel.offload_optimizer.device == "nvme":
        # fp32 weights, moments and gradients, read and written (stage3.py,
        # _optimizer_states_and_gradient_swap_in)
        states = step.share * (2 * FP32 + moment_bytes(step.spec))
        yield Flow("optimizer states", "disk", 1, 2 * states)
    if parallel.offload_parameters.device == "nvme":
        yield Flow("parameters for use", "disk", step.micro_batches, _read(step))
        yield Flow("updated parameters", "disk", 1, step.share * compute_bytes(step.spec))


def _read(step: _Step) -> int:
    """Return the bytes of its own share that a rank reads for a micro-batch."""
    return step.size(-(-_gathered(step) // step.layout.shards))
