"""Build the plan of a spec: layout, batch sizes, memory and traffic of the run, in one value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsft.errors import Problem, SpecError
from dsft.plan.census import Census, census
from dsft.plan.checkpointing import Choice, Limits, choices, decided
from dsft.plan.memory import other_version
from dsft.plan.memory.ranks import Memory, RankMemory, memory
from dsft.plan.memory.reference import ReferenceMemory, with_reference
from dsft.plan.memory.sizes import GIB, gpu_bytes, needed
from dsft.plan.reference import has_engine, other_model, reference_model
from dsft.plan.traffic import Flow, traffic
from dsft.spec.architecture import heads_not_divided
from dsft.spec.batch import BatchSizes
from dsft.spec.layout import Layout, batch_on, fewest_ranks, layout_of
from dsft.spec.patterns import group_problems
from dsft.spec.rules import warnings
from dsft.spec.schema import Spec

THIS_HOST = "localhost"
GPU_MEMORY, HOST_MEMORY = "cluster.accelerator.memory_gib", "cluster.host_memory_gib"


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    hosts      host -> number of ranks, in rank order
    assumed    True if the spec has no cluster and no world size was given; the world size is then the
               smallest that works
    memory     memory of the policy, including a reference that runs beside it
    reference  memory of the reference alone
    recomputation  what the choices of model.gradient_checkpointing cost; empty where it is false
    """

    spec: Spec
    hosts: Mapping[str, int]
    assumed: bool
    layout: Layout
    batch: BatchSizes
    census: Census
    memory: Memory
    warnings: tuple[str, ...]
    reference: ReferenceMemory | None
    reference_census: Census
    traffic: tuple[Flow, ...]
    recomputation: tuple[Choice, ...]


@dataclass(frozen=True)
class RankRange:
    """Consecutive ranks of one pipeline stage on one host. All ranges are inclusive; if the ranks split rows,
    each data rank has several ranks, whose numbers are in sequence_ranks."""

    host: str
    stage: int
    ranks: tuple[int, int]
    local_ranks: tuple[int, int]
    data_ranks: tuple[int, int]
    sequence_ranks: tuple[int, int]


def build_plan(spec: Spec, world_size: int | None = None, cache: Path | None = None) -> Plan:
    """Build the plan of a spec. Raise SpecError if the sizes do not fit together, or if `world_size` differs
    from the cluster's number of processes. cache: folder of cached censuses."""
    hosts = _hosts(spec, world_size)
    layout = layout_of(spec.parallel, sum(hosts.values()))
    batch = batch_on(spec, layout)
    counted = census(spec.model, cache)
    is_other = has_engine(spec) and other_model(spec) is not None
    of_reference = census(reference_model(spec), cache) if is_other else counted
    asked, limits = spec.model.gradient_checkpointing, Limits(*memory_limits(spec))
    spec = decided(spec, counted, of_reference, layout, hosts, limits)
    problems = group_problems(spec.optim, [p.name for p in counted.parameters if p.trained])
    if counted.max_positions is not None and spec.data.max_length > counted.max_positions:
        message = f"{spec.data.max_length} is over the model's {counted.max_positions} positions; lower it"
        problems = [*problems, Problem("data.max_length", message)]
    problems = [*problems, *_split_problems(spec, counted)]
    problems += (
        _split_problems(spec, of_reference, f" (of {spec.own_key('reference_model')})") if is_other else ()
    )
    if problems:
        raise SpecError("The run cannot be planned.", problems)
    sizes, reference = with_reference(memory(counted, spec, layout, hosts), of_reference, spec, layout, hosts)
    assumed = spec.cluster is None and world_size is None
    found = (*warnings(spec), *other_version(), *_memory_warnings(spec, sizes, reference))
    flows = traffic(counted, spec, layout, hosts)
    recomputation = choices(spec, counted, of_reference, layout, hosts) if asked else []
    return Plan(
        spec,
        hosts,
        assumed,
        layout,
        batch,
        counted,
        sizes,
        found,
        reference,
        of_reference,
        flows,
        tuple(recomputation),
    )


def _split_problems(spec: Spec, counted: Census, of: str = "") -> Iterator[Problem]:
    """Yield why the rows of a model cannot be split as the spec says. of: which model it is."""
    heads, size = counted.heads, spec.parallel.sequence_parallel
    if size > 1 and counted.unsplittable is not None:
        yield Problem("parallel.sequence_parallel", f"{counted.unsplittable}; set it to 1{of}")
    elif heads is not None and heads.queries % size:
        yield Problem("parallel.sequence_parallel", f"{size} {heads_not_divided(heads.queries, size)}{of}")


def rank_ranges(layout: Layout, hosts: Mapping[str, int]) -> list[RankRange]:
    """Divide all ranks into ranges, one for each stage on each host."""
    found = []
    first = 0
    for host, slots in hosts.items():
        start = first
        while start < first + slots:
            stage = layout.stage(start)
            end = min(first + slots, (stage + 1) * layout.shards) - 1
            local = (start - first, end - first)
            data = layout.data_rank(start), layout.data_rank(end)
            parts = layout.sequence_rank(start), layout.sequence_rank(end)
            sequence = parts if data[0] == data[1] else (0, layout.sequence_parallel - 1)
            found.append(RankRange(host, stage, (start, end), local, data, sequence))
            start = end + 1
        first += slots
    return found


def _hosts(spec: Spec, world_size: int | None) -> Mapping[str, int]:
    if spec.cluster is None:
        return {THIS_HOST: world_size or fewest_ranks(spec.parallel)}
    slots = sum(spec.cluster.hosts.values())
    if world_size not in (None, slots):
        message = f"the hosts have {slots} slots, not {world_size}; leave --processes out or change the hosts"
        raise SpecError("The run cannot be planned.", [Problem("cluster.hosts", message)])
    return spec.cluster.hosts


@dataclass(frozen=True)
class Need:
    """Memory in bytes that a run needs in one place, and the limit there. where: a GPU of a stage, or a
    host; key: that of the limit."""

    where: str
    needs: int
    limit: int
    key: str


def memory_limits(spec: Spec) -> tuple[int | None, int | None]:
    """Return the bytes of a GPU (as in `gpu_bytes`) and of a host; None for what is unknown."""
    host = spec.cluster.host_memory_gib if spec.cluster else None
    return gpu_bytes(spec), int(host * GIB) if host else None


def memory_needs(spec: Spec, sizes: Memory, reference: ReferenceMemory | None) -> list[Need]:
    """Return the memory that training, and a reference's pass before it, need where a limit is known; sorted
    by the ratio of need to limit, the highest first."""
    gpu, host = memory_limits(spec)
    found: list[Need] = []

    def add(stages: Sequence[RankMemory], hosts: Mapping[str, int], when: str) -> None:
        if gpu is not None:
            found.extend(
                Need(f"a GPU of stage {one.stage}{when}", one.gpu, gpu, GPU_MEMORY) for one in stages
            )
        if host is not None:
            found.extend(
                Need(f"host {h}{when}", needed(size), host, HOST_MEMORY) for h, size in hosts.items()
            )

    add(sizes.stages, sizes.hosts, "")
    if reference is not None and reference.hosts is not None:
        add(reference.stages, reference.hosts, " in the reference's pass")
    return sorted(found, key=lambda need: -need.needs / need.limit)


def _memory_warnings(spec: Spec, sizes: Memory, reference: ReferenceMemory | None) -> Iterator[str]:
    for need in memory_needs(spec, sizes, reference):
        if need.needs > need.limit:
            spare = ", with a tenth to spare" if need.key == HOST_MEMORY else ""
            yield (
                f"{need.key}: {need.limit / GIB:.4g} is less than the {need.needs / GIB:.1f} GiB that "
                f"{need.where} needs{spare}; take more hosts, or a layout that fits (dsft plan SPEC "
                "--compare lists them)"
            )
