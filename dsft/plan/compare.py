"""Compare all layouts of a run on its hosts: which fit, in which order to try them, and why the others do
not; and find the longest rows that fit.

Each layout is checked with the rules of `dsft validate`, so none is offered that validation would refuse.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

from dsft.errors import SpecError
from dsft.plan.build import Need, Plan, memory_limits, memory_needs
from dsft.plan.checkpointing import ROOMY
from dsft.plan.cost import Cost, cost
from dsft.plan.cut import Cut, cut_of
from dsft.plan.memory.ranks import Memory, memory
from dsft.plan.memory.reference import with_reference
from dsft.plan.traffic import Flow, bubble, traffic
from dsft.spec.batch import BatchSizes
from dsft.spec.findings import Finding
from dsft.spec.layout import Layout, batch_on, layout_of
from dsft.spec.load import refusals
from dsft.spec.rules import value_at, warnings
from dsft.spec.schema import SECTIONS, Parallel, Spec

Device = Literal["none", "cpu", "nvme"]
DEVICES: tuple[Device, ...] = ("none", "cpu", "nvme")
AS_FAST = 1.05  # micro-batch sizes within this factor of the fastest count as equally fast
ROW_STEP, LONGEST = 128, 1 << 27  # tokens: by which lengths of rows are tried, and the largest one


@dataclass(frozen=True)
class LayoutKeys:
    """One combination of the keys that define a layout. reference: how it is computed, None if the loss
    has no reference; sequence_parallel: ranks that split each row; copied: those with a second copy of the
    parameters."""

    zero_stage: int
    pipeline_stages: int
    offload_optimizer: Device
    offload_parameters: Device
    checkpointing: bool | int | float | str
    reference: str | None
    sequence_parallel: int = 1
    copied: int = 1

    @property
    def order(self) -> int:
        """Position in the usual order of trying layouts: plain data parallelism, ZeRO 1, 2 and 3, split rows,
        offload, pipeline, pipeline with offload."""
        offloads = (self.offload_optimizer, self.offload_parameters) != ("none", "none")
        if self.pipeline_stages > 1:
            return 7 if offloads else 6
        if offloads:
            return 5
        return self.zero_stage if self.sequence_parallel == 1 else 4

    def changes(self, spec: Spec) -> dict[str, Any]:
        """Return dotted key -> value of the keys whose values in the spec must change to get this layout. A
        listed pipeline_cut fits one number of stages only."""
        own = spec.parallel
        path = own.offload_optimizer.nvme_path or own.offload_parameters.nvme_path
        is_cut = self.pipeline_stages != own.pipeline_stages
        found: dict[str, Any] = {
            "parallel.zero_stage": self.zero_stage,
            "parallel.pipeline_stages": self.pipeline_stages,
            "parallel.pipeline_cut": "parameters" if is_cut else own.pipeline_cut,
            "parallel.sequence_parallel": self.sequence_parallel,
            "parallel.zero_hpz_partition_size": self.copied,
            "model.gradient_checkpointing": self.checkpointing,
        }
        if self.sequence_parallel == 1:
            found["parallel.sequence_parallel_across_hosts"] = False
        for key, device in (
            ("parallel.offload_optimizer", self.offload_optimizer),
            ("parallel.offload_parameters", self.offload_parameters),
        ):
            found[f"{key}.device"] = device
            found[f"{key}.nvme_path"] = path if device == "nvme" else None
            if device == "none":
                found[f"{key}.pin_memory"] = None
        if spec.reference is not None and self.reference != spec.reference.reference:
            found[spec.own_key("reference")] = self.reference
        default_zero = is_cut and "zero_stage" not in own.model_fields_set  # depends on pipeline_stages
        always = {"parallel.zero_stage"} if default_zero else set()
        return {key: value for key, value in found.items() if key in always or value != value_at(spec, key)}


@dataclass(frozen=True)
class Size:
    """A layout at one micro-batch size. over: the needs that exceed their limit, the worst first; full: the
    highest ratio of need to limit, 0 if no limit is known; fullest: the place that has it."""

    batch: BatchSizes
    memory: Memory
    traffic: tuple[Flow, ...]
    bubble: float
    cost: Cost
    over: tuple[Need, ...]
    full: float
    fullest: str

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

    keys: LayoutKeys
    refused: tuple[Finding, ...] = ()
    sizes: tuple[Size, ...] = ()
    overrides: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> Size | None:
        return fastest_fit(self.sizes)

    @property
    def seconds(self) -> float:
        """Estimated seconds per step; infinite if nothing fits."""
        return self.best.cost.seconds if self.best else math.inf


@dataclass(frozen=True)
class LongestRow:
    """The longest row that fits with this sequence_parallel, in a layout that is otherwise the spec's.

    batch   batch sizes, with the plan's global batch
    tokens  data.max_length, a multiple of ROW_STEP unless the model's positions limit it; 0 if not even
            ROW_STEP tokens fit
    limit   what longer rows would exceed
    """

    sequence_parallel: int
    batch: BatchSizes
    tokens: int
    limit: str


@dataclass(frozen=True)
class Comparison:
    """All layouts by verdict. fitting: in the order to try them; too_large: the one closest to fitting first;
    longest: for each number of ranks that could split a row, none where no limit of memory is known."""

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    longest: tuple[LongestRow, ...]

    @property
    def advice(self) -> Candidate | None:
        """The layout to try first: of those that fit, the first with the fewest warnings."""
        return min(self.fitting, key=lambda one: len(one.warnings), default=None)


def compare(plan: Plan) -> Comparison:
    """Evaluate every layout that keeps the plan's global_batch_size on its hosts."""
    cut = _cuts(plan)
    found = [_candidate(plan, keys, cut) for keys in _layouts(plan)]
    found += _split(plan, found, cut)
    fitting = [c for c in found if c.best is not None]
    too_large = [c for c in found if c.best is None and not c.refused]
    return Comparison(
        tuple(sorted(fitting, key=lambda c: (c.keys.order, c.seconds))),
        tuple(sorted(too_large, key=lambda c: c.sizes[0].full)),
        tuple(c for c in found if c.refused),
        tuple(filter(None, (_longest_row(plan, size) for size in group_sizes(plan)))),
    )


def fitting_in_memory(plan: Plan) -> tuple[Candidate, ...]:
    """Return the layouts that fit without offload, in the order to try them."""
    cut, nowhere = _cuts(plan), ("none", "none")
    layouts = (one for one in _layouts(plan) if (one.offload_optimizer, one.offload_parameters) == nowhere)
    found = (_candidate(plan, keys, cut) for keys in layouts)
    return tuple(sorted((c for c in found if c.best), key=lambda c: (c.keys.order, c.seconds)))


def _cuts(plan: Plan) -> Callable[[int], Cut]:
    @cache  # slow, and a cut depends on nothing but the number of stages
    def cut(stages: int) -> Cut:
        own = plan.spec.parallel
        listed = own.pipeline_cut if stages == own.pipeline_stages else "parameters"
        return cut_of(Parallel(pipeline_stages=stages, pipeline_cut=listed), plan.census)

    return cut


def _layouts(plan: Plan) -> Iterator[LayoutKeys]:
    """Yield all combinations, valid or not, with rows split as in the spec and whole, and at ZeRO 3 with a
    copy of the parameters on each host; for each number of stages that does not divide the ranks only one."""
    spec, ranks = plan.spec, plan.layout.world_size
    own = spec.model.gradient_checkpointing
    recomputes = dict.fromkeys((False, True, own))
    splits = sorted({1, spec.parallel.sequence_parallel})
    of_host = math.gcd(*plan.hosts.values()) if len(plan.hosts) > 1 else 1
    copies = sorted({1, of_host, spec.parallel.zero_hpz_partition_size})
    references: tuple[str | None, ...] = (None,)
    if spec.reference is not None:
        offered = get_args(type(spec.reference).model_fields["reference"].annotation)
        ways = (spec.reference.reference, *(way for way in offered if way != "adapter" or spec.model.lora))
        references = tuple(dict.fromkeys(ways))  # the spec's own first
    for stages in range(1, min(ranks, plan.census.num_layers) + 1):
        if ranks % stages:
            yield LayoutKeys(0, stages, "none", "none", own, references[0])
            continue
        for one in product(range(4), DEVICES, DEVICES, recomputes, references, splits):
            zero, optimizer, parameters, checkpointing, reference, split = one
            for copied in copies if (zero, stages, parameters) == (3, 1, "none") else (1,):
                yield LayoutKeys(zero, stages, optimizer, parameters, checkpointing, reference, split, copied)


def _split(plan: Plan, found: Sequence[Candidate], cut: Callable[[int], Cut]) -> Iterator[Candidate]:
    """Yield the candidates whose rows more ranks split than in the spec, unless a layout fits without that,
    offload or pipeline. Tried are layouts that are too large for reasons other than weights and states, and
    those with more ranks than examples in a step: with the smallest group that fits, or the largest."""
    if any(c.best and c.keys.order < 4 for c in found):
        return
    stages, gpu = plan.spec.parallel.pipeline_stages, memory_limits(plan.spec)[0] or math.inf
    own, sizes = plan.layout.sequence_parallel, group_sizes(plan)
    for one in found:
        is_larger = bool(one.sizes) and max(rank.states for rank in one.sizes[0].memory.stages) > gpu
        is_refused = bool(one.refused) and one.refused[0].path[0] != "train"
        is_other = one.keys.sequence_parallel != own or one.keys.pipeline_stages not in (1, stages)
        if one.best or is_larger or is_refused or is_other:
            continue
        last = one
        for size in sizes:
            if size > own and not last.best:
                last = _candidate(plan, replace(one.keys, sequence_parallel=size), cut)
        if last is not one and not last.refused:
            yield last


def group_sizes(plan: Plan) -> list[int]:
    """Return the numbers of ranks that could split each row: 1, the spec's, and those that divide the ranks
    of every host and the attention heads of the model and of its reference."""
    own, slots = plan.spec.parallel, plan.hosts.values()
    most = sum(slots) if own.sequence_parallel_across_hosts else math.gcd(*slots)
    for model in (plan.census, plan.reference_census):
        most = math.gcd(most, model.heads.queries if model.heads and not model.unsplittable else 1)
    return sorted({n for n in range(1, most + 1) if most % n == 0} | {own.sequence_parallel})


def _candidate(plan: Plan, keys: LayoutKeys, cut: Callable[[int], Cut]) -> Candidate:
    changes = keys.changes(plan.spec)
    spec = changed(plan.spec, changes)
    refused = tuple(refusals(spec))
    if refused:
        return Candidate(keys, refused)
    try:
        layout = layout_of(spec.parallel, plan.layout.world_size)
        counts = cut(keys.pipeline_stages).counts
        batch_on(changed(spec, batch_keys(plan, 1)), layout)
    except SpecError as error:
        return Candidate(keys, tuple(Finding(tuple(p.where.split(".")), p.message) for p in error.problems))
    sizes: list[Size] = []
    micros = _micro_batches(plan, plan.batch.global_batch_size // layout.data_parallel)
    fixed = changed(spec, {"parallel.pipeline_cut": counts}) if len(counts) > 1 else spec  # computed once
    for micro in micros:
        sizes.append(size_of(plan, changed(fixed, batch_keys(plan, micro)), layout))
        if sizes[-1].over:
            if micro != micros[-1] and keys.zero_stage == 3:  # one micro-batch: gradients may stay bf16
                sizes.append(size_of(plan, changed(fixed, batch_keys(plan, micros[-1])), layout))
            break
    chosen = (fastest_fit(sizes) or sizes[0]).batch
    if not _has_batch(plan.spec, layout, chosen):
        batch = batch_keys(plan, chosen.micro_batch_size)
        changes |= {key: value for key, value in batch.items() if value != value_at(plan.spec, key)}
    overrides = tuple(f"{key}={_written(value)}" for key, value in changes.items())
    return Candidate(keys, (), tuple(sizes), overrides, warnings(spec))


def fastest_fit(sizes: Sequence[Size]) -> Size | None:
    """Return the fastest micro-batch size that fits, preferably one that is not tight; among those about as
    fast (AS_FAST) the one with the least memory. None if nothing fits."""
    within = [size for size in sizes if not size.over]
    fitting = [size for size in within if not size.is_tight] or within
    fastest = min((size.cost.seconds for size in fitting), default=math.inf)
    as_fast = [size for size in fitting if size.cost.seconds <= AS_FAST * fastest]
    return min(as_fast, key=lambda size: size.device, default=None)


def changed(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of the spec, or of a section of it, with the values at these dotted keys."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        inner = getattr(section, name)
        if rest and inner is None:  # on the way only a task's section may be null
            inner = SECTIONS[name]()
        section = section.model_copy(update={name: changed(inner, {rest: value}) if rest else value})
    return section


def batch_keys(plan: Plan, micro: int) -> dict[str, int | None]:
    """Return dotted key -> value of the batch sizes with the plan's global batch and this micro-batch."""
    return {
        "train.global_batch_size": plan.batch.global_batch_size,
        "train.micro_batch_size": micro,
        "train.accumulation_steps": None,
    }


def _micro_batches(plan: Plan, share: int) -> list[int]:
    """Return the micro-batch sizes that divide a rank's share of the global batch, the smallest first. If
    packed micro-batches have a token budget, the number of examples has no influence: then only the greatest
    common divisor of the share and the spec's own size."""
    if plan.spec.data.packing and plan.spec.data.max_tokens_per_micro_batch is not None:
        return [math.gcd(share, plan.batch.micro_batch_size)]
    return [n for n in range(1, share + 1) if share % n == 0]


def size_of(plan: Plan, spec: Spec, layout: Layout) -> Size:
    """Evaluate a layout on the plan's hosts, with the batch sizes of `spec`."""
    batch = batch_on(spec, layout)
    alone = memory(plan.census, spec, layout, plan.hosts)
    sizes, reference = with_reference(alone, plan.reference_census, spec, layout, plan.hosts)
    flows = traffic(plan.census, spec, layout, plan.hosts)
    share = bubble(layout.pipeline_stages, batch.accumulation_steps)
    needs = memory_needs(spec, sizes, reference)
    over = tuple(need for need in needs if need.needs > need.limit)
    full, fullest = (needs[0].needs / needs[0].limit, needs[0].where) if needs else (0.0, "")
    seconds = cost(plan.census, spec, batch, flows, plan.hosts)
    return Size(batch, sizes, flows, share, seconds, over, full, fullest)


def _longest_row(plan: Plan, split: int) -> LongestRow | None:
    """Return the longest row that takes at most the share ROOMY of the memory of a GPU and of a host, if
    `split` ranks split each; None if that is refused or no limit is known. The micro-batch size is the
    spec's, or a divisor of it that divides a group's share of the global batch."""
    spec, positions = plan.spec, plan.census.max_positions
    if split != spec.parallel.sequence_parallel:
        share = plan.batch.global_batch_size * split // plan.layout.shards
        changes = batch_keys(plan, math.gcd(plan.batch.micro_batch_size, share))
        if split == 1:
            changes["parallel.sequence_parallel_across_hosts"] = False
        spec = changed(spec, changes | {"parallel.sequence_parallel": split})
    if not any(memory_limits(spec)) or any(refusals(spec)):
        return None
    try:
        layout = layout_of(spec.parallel, plan.layout.world_size)
        batch = batch_on(spec, layout)
    except SpecError:
        return None

    def over(tokens: int) -> str:
        """Return the place whose limit rows of this length exceed; empty if they fit."""
        longer = changed(spec, {"data.max_length": tokens})
        budget = spec.data.max_tokens_per_micro_batch
        if budget is not None:
            longer = changed(longer, {"data.max_tokens_per_micro_batch": max(budget, longer.longest_example)})
        found = size_of(plan, longer, layout)
        return found.fullest if found.full > ROOMY else ""

    if positions is not None and not over(positions):
        return LongestRow(split, batch, positions, "the model's positions")
    steps = range(1, (positions or LONGEST) // ROW_STEP + 1)
    tokens = ROW_STEP * bisect_left(steps, True, key=lambda step: bool(over(ROW_STEP * step)))
    return LongestRow(split, batch, tokens, over(tokens + ROW_STEP))


def _has_batch(spec: Spec, layout: Layout, batch: BatchSizes) -> bool:
    """Return whether the spec's own keys give these batch sizes."""
    try:
        return batch_on(spec, layout) == batch
    except SpecError:
        return False


def _written(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
