"""Compare all layouts of a run on its hosts: which fit, in which order to try them, and why the others do
not.

Each layout is checked with the rules of `dsft validate`, so none is offered that validation would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

from dsft.errors import SpecError
from dsft.plan.batch import BatchSizes, batch_sizes
from dsft.plan.build import Plan
from dsft.plan.cost import Cost, cost
from dsft.plan.cut import Cut, cut_of
from dsft.plan.layout import Layout, layout
from dsft.plan.memory.ranks import Memory, memory, needed
from dsft.plan.memory.reference import ReferenceMemory, with_reference
from dsft.plan.memory.sizes import GIB
from dsft.plan.promised import cluster_findings
from dsft.plan.reference import dpo_of, needs_reference
from dsft.plan.traffic import Flow, bubble, traffic
from dsft.spec.document import Finding
from dsft.spec.load import refusals
from dsft.spec.rules import value_at, warnings
from dsft.spec.schema import Offload, Parallel, Spec

Device = Literal["none", "cpu", "nvme"]
DEVICES: tuple[Device, ...] = ("none", "cpu", "nvme")
AS_FAST = 1.05  # micro-batch sizes within this factor of the fastest count as equally fast

ROOMY = 0.95  # usable share of a memory limit; the rest is for the driver, fragmentation and the plan's error

KEYS = (
    "parallel.zero_stage",
    "parallel.pipeline_stages",
    "parallel.pipeline_cut",
    "parallel.offload_optimizer.device",
    "parallel.offload_optimizer.nvme_path",
    "parallel.offload_parameters.device",
    "parallel.offload_parameters.nvme_path",
    "model.gradient_checkpointing",
    "dpo.reference",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.accumulation_steps",
)
"""Keys of the spec that a layout may override."""


@dataclass(frozen=True)
class LayoutKeys:
    """One combination of the keys that define a layout. reference: value of dpo.reference, None if the loss
    has no reference."""

    zero_stage: int
    pipeline_stages: int
    offload_optimizer: Device
    offload_parameters: Device
    checkpointing: bool
    reference: str | None

    @property
    def offloads(self) -> bool:
        return (self.offload_optimizer, self.offload_parameters) != ("none", "none")

    @property
    def order(self) -> int:
        """Position in the usual order of trying layouts: plain data parallelism, ZeRO 1, 2 and 3, offload,
        pipeline, pipeline with offload."""
        if self.pipeline_stages == 1:
            return 4 if self.offloads else self.zero_stage
        return 6 if self.offloads else 5


@dataclass(frozen=True)
class Need:
    """Memory in bytes that a layout needs in one place, and the limit there. where: a GPU of a stage, or a
    host."""

    where: str
    needs: int
    limit: int


@dataclass(frozen=True)
class Size:
    """A layout at one micro-batch size. over: the needs that exceed their limit, the worst first; full: the
    highest ratio of need to limit, 0 if no limit is known."""

    batch: BatchSizes
    memory: Memory
    traffic: tuple[Flow, ...]
    cost: Cost
    over: tuple[Need, ...]
    full: float

    @property
    def is_tight(self) -> bool:
        """Whether it is closer to a limit than the plan's figures are accurate."""
        return self.full > ROOMY

    @property
    def device(self) -> int:
        return max(rank.gpu for rank in self.memory.stages)


@dataclass(frozen=True)
class Candidate:
    """A layout and its evaluation.

    refused    reasons why the layout is invalid; if there are none, sizes is not empty
    sizes      every micro-batch size that fits and the first that does not; at ZeRO 3 also the size with one
               micro-batch per step
    overrides  what to type behind the spec to get the layout with its best size
    warnings   those of `dsft validate`
    """

    choice: LayoutKeys
    refused: tuple[Finding, ...]
    sizes: tuple[Size, ...]
    overrides: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def best(self) -> Size | None:
        """The fastest micro-batch size that fits, preferably one that is not tight; among those about as fast
        (AS_FAST) the one with the least memory."""
        within = [size for size in self.sizes if not size.over]
        fitting = [size for size in within if not size.is_tight] or within
        if not fitting:
            return None
        fastest = min(size.cost.seconds for size in fitting)
        return min((s for s in fitting if s.cost.seconds <= AS_FAST * fastest), key=lambda s: s.device)

    @property
    def seconds(self) -> float:
        """Estimated seconds per step; infinite if nothing fits."""
        return self.best.cost.seconds if self.best else math.inf

    @property
    def bubble(self) -> float:
        return bubble(self.choice.pipeline_stages, self.best.batch.accumulation_steps) if self.best else 0.0


@dataclass(frozen=True)
class Limits:
    """Memory in bytes of a GPU and of a host; None if unknown, which skips the check."""

    device: int | None
    host: int | None


@dataclass(frozen=True)
class Comparison:
    """All layouts by verdict. fitting: in the order to try them, the advice first; too_large: the one closest
    to fitting first."""

    limits: Limits
    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]


def compare(plan: Plan) -> Comparison:
    """Evaluate every layout that keeps the plan's global_batch_size on its hosts."""
    limits = _limits(plan.spec)

    @cache  # slow, and a cut depends on nothing but the number of stages
    def cut(stages: int) -> Cut:
        return cut_of(_parallel(plan.spec, {"pipeline_stages": stages}), plan.census)

    found = [_candidate(plan, choice, limits, cut) for choice in _choices(plan)]
    fitting = [c for c in found if c.best is not None]
    fitting.sort(key=lambda c: (c.choice.order, c.seconds))
    too_large = [c for c in found if c.best is None and not c.refused]
    too_large.sort(key=lambda c: c.sizes[0].over[0].needs / c.sizes[0].over[0].limit)
    refused = [c for c in found if c.refused]
    return Comparison(limits, tuple(fitting), tuple(too_large), tuple(refused))


def _limits(spec: Spec) -> Limits:
    cluster = spec.cluster
    accelerator = cluster.accelerator if cluster else None
    device = accelerator.memory_gib if accelerator else None
    host = cluster.host_memory_gib if cluster else None
    return Limits(_bytes(device), _bytes(host))


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _choices(plan: Plan) -> Iterator[LayoutKeys]:
    """Yield all combinations, valid or not; for each number of stages that does not divide the ranks only
    one."""
    spec, ranks = plan.spec, plan.layout.world_size
    references = _references(spec)
    for stages in range(1, min(ranks, plan.census.num_layers) + 1):
        if ranks % stages:
            yield LayoutKeys(0, stages, "none", "none", spec.model.gradient_checkpointing, references[0])
            continue
        for one in product(range(4), DEVICES, DEVICES, (False, True), references):
            zero, optimizer, parameters, checkpointing, reference = one
            yield LayoutKeys(zero, stages, optimizer, parameters, checkpointing, reference)


def _references(spec: Spec) -> tuple[str | None, ...]:
    """Return the values of dpo.reference to try, the spec's own first."""
    if not needs_reference(spec):
        return (None,)
    ways = (dpo_of(spec).reference, "precomputed", "live", *(("adapter",) if spec.model.lora else ()))
    return tuple(dict.fromkeys(ways))


def _candidate(plan: Plan, choice: LayoutKeys, limits: Limits, cut: Callable[[int], Cut]) -> Candidate:
    spec = _with_choice(plan.spec, choice)
    refused = tuple(refusals(spec, cluster_findings))
    if refused:
        return Candidate(choice, refused, (), (), ())
    whole = plan.batch.global_batch_size
    try:
        places = layout(spec.parallel, plan.layout.world_size)
        counts = cut(choice.pipeline_stages).counts
        batch_sizes(_with_batch(spec, whole, 1).train, places.data_parallel)
    except SpecError as error:
        found = tuple(Finding(tuple(p.where.split(".")), p.message) for p in error.problems)
        return Candidate(choice, found, (), (), ())
    sizes: list[Size] = []
    micros = _micro_batches(plan, whole // places.data_parallel)
    for micro in micros:
        sizes.append(_size(plan, _with_batch(_with_cut(spec, counts), whole, micro), places, limits))
        if sizes[-1].over:
            if micro != micros[-1] and choice.zero_stage == 3:  # one micro-batch: gradients may stay bf16
                sizes.append(_size(plan, _with_batch(spec, whole, micros[-1]), places, limits))
            break
    found_one = Candidate(choice, (), tuple(sizes), (), warnings(spec))
    return replace(found_one, overrides=_overrides(plan, spec, (found_one.best or sizes[0]).batch))


def _with_choice(spec: Spec, choice: LayoutKeys) -> Spec:
    own = spec.parallel
    path = own.offload_optimizer.nvme_path or own.offload_parameters.nvme_path

    def offload(device: Device) -> Offload:
        return Offload(device=device, nvme_path=path if device == "nvme" else None)

    parallel = {
        "zero_stage": choice.zero_stage,
        "pipeline_stages": choice.pipeline_stages,
        "offload_optimizer": offload(choice.offload_optimizer),
        "offload_parameters": offload(choice.offload_parameters),
    }
    model = {"gradient_checkpointing": choice.checkpointing}
    changed: dict[str, Any] = {
        "parallel": _parallel(spec, parallel),
        "model": spec.model.model_copy(update=model),
    }
    if choice.reference not in (None, dpo_of(spec).reference):
        changed["dpo"] = dpo_of(spec).model_copy(update={"reference": choice.reference})
    return spec.model_copy(update=changed)


def _parallel(spec: Spec, changes: Mapping[str, Any]) -> Parallel:
    """Return the spec's `parallel` section with these changes. A listed pipeline_cut is reset if the number
    of stages changes, since the list fits one number of stages only."""
    if changes["pipeline_stages"] != spec.parallel.pipeline_stages:
        changes = {**changes, "pipeline_cut": Parallel.model_fields["pipeline_cut"].default}
    return spec.parallel.model_copy(update=changes)


def _with_cut(spec: Spec, counts: tuple[int, ...]) -> Spec:
    """Fix the cut in the spec, so that it is not computed again for each micro-batch size."""
    if len(counts) == 1:
        return spec
    parallel = spec.parallel.model_copy(update={"pipeline_cut": counts})
    return spec.model_copy(update={"parallel": parallel})


def _with_batch(spec: Spec, whole: int, micro: int) -> Spec:
    sizes = {"global_batch_size": whole, "micro_batch_size": micro, "accumulation_steps": None}
    return spec.model_copy(update={"train": spec.train.model_copy(update=sizes)})


def _micro_batches(plan: Plan, share: int) -> list[int]:
    """Return the micro-batch sizes that divide a rank's share of the global batch, the smallest first. If
    packed micro-batches have a token budget, the number of examples has no influence: then only the greatest
    common divisor of the share and the spec's own size."""
    if plan.spec.data.packing and plan.spec.data.max_tokens_per_micro_batch is not None:
        return [math.gcd(share, plan.batch.micro_batch_size)]
    return [n for n in range(1, share + 1) if share % n == 0]


def _size(plan: Plan, spec: Spec, places: Layout, limits: Limits) -> Size:
    batch = batch_sizes(spec.train, places.data_parallel, spec.data, spec.task)
    alone = memory(plan.census, spec, places, plan.hosts)
    taken, reference = with_reference(alone, plan.reference_census, spec, places, plan.hosts)
    flows = traffic(plan.census, spec, places, plan.hosts)
    spent = cost(plan.census, spec, batch, flows, plan.hosts)
    needs = _needs(taken, reference, limits)
    full = needs[0].needs / needs[0].limit if needs else 0.0
    return Size(batch, taken, flows, spent, tuple(one for one in needs if one.needs > one.limit), full)


def _needs(taken: Memory, reference: ReferenceMemory | None, limits: Limits) -> list[Need]:
    """Return the memory needs of training, and of a reference pass before it, for which a limit is known;
    sorted by the ratio of need to limit, the highest first."""
    found = [Need(f"a GPU of stage {rank.stage}", rank.gpu, limits.device or 0) for rank in taken.stages]
    found += _hosts(taken.hosts, "", limits)
    if reference is not None and reference.hosts is not None:
        found += [
            Need(f"a GPU of stage {rank.stage} in the reference's pass", rank.gpu, limits.device or 0)
            for rank in reference.stages
        ]
        found += _hosts(reference.hosts, " in the reference's pass", limits)
    return sorted((one for one in found if one.limit), key=lambda one: -one.needs / one.limit)


def _hosts(sizes: Mapping[str, int], when: str, limits: Limits) -> list[Need]:
    return [Need(f"host {host}{when}", needed(size), limits.host or 0) for host, size in sizes.items()]


def _overrides(plan: Plan, spec: Spec, batch: BatchSizes) -> tuple[str, ...]:
    """Return key=value for each key that differs from the plan's spec. The batch keys are included only if
    the spec gives other batch sizes."""
    if _same_batch(plan.spec, batch):
        spec = spec.model_copy(update={"train": plan.spec.train})
    else:
        spec = _with_batch(spec, batch.global_batch_size, batch.micro_batch_size)
    pairs = [(key, value_at(plan.spec, key), value_at(spec, key)) for key in KEYS]
    changed = {key for key, own, value in pairs if value != own}
    if "parallel.pipeline_stages" in changed and "zero_stage" not in plan.spec.parallel.model_fields_set:
        changed.add("parallel.zero_stage")  # its default depends on pipeline_stages
    return tuple(f"{key}={_written(value)}" for key, _, value in pairs if key in changed)


def _same_batch(spec: Spec, batch: BatchSizes) -> bool:
    try:
        own = batch_sizes(spec.train, batch.data_parallel)
    except SpecError:
        return False
    return (own.global_batch_size, own.micro_batch_size) == (batch.global_batch_size, batch.micro_batch_size)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
