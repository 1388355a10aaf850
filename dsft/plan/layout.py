"""Which rank holds which pipeline stage and which share of the data, and how many ranks some hosts have.
Takes a spec's `parallel` section and a number of processes, or hosts and slots; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsft.errors import Problem, SpecError
from dsft.plan.batch import nearest_divisors
from dsft.spec.schema import Parallel


@dataclass(frozen=True)
class Layout:
    """Ranks as DeepSpeed's PipeDataParallelTopology numbers them: rank = stage × shards + shard_rank.

    world_size       processes
    pipeline_stages  consecutive slices of the model, 1 without a pipeline
    data_parallel    parts into which the rows of a step are divided, world_size ÷ pipeline_stages
    """

    world_size: int
    pipeline_stages: int
    data_parallel: int

    @property
    def shards(self) -> int:
        """How many ranks a stage has: ZeRO divides its state over them, and DeepSpeed averages its gradients
        over them. Each of them reads other rows, so they are as many as `data_parallel`."""
        return self.world_size // self.pipeline_stages

    def stage(self, rank: int) -> int:
        return rank // self.shards

    def shard_rank(self, rank: int) -> int:
        """Which share of its stage's state the rank owns, of `shards`."""
        return rank % self.shards

    def data_rank(self, rank: int) -> int:
        """Which part of a step's rows the rank reads, of `data_parallel`."""
        return self.shard_rank(rank)


def layout(parallel: Parallel, world_size: int) -> Layout:
    """The layout of `world_size` processes; SpecError where the stages do not divide them."""
    stages = parallel.pipeline_stages
    if world_size % stages:
        raise SpecError(
            "The processes cannot be laid out.",
            [Problem("parallel.pipeline_stages", _not_divided(stages, world_size))],
        )
    return Layout(world_size, stages, world_size // stages)


def _not_divided(stages: int, world_size: int) -> str:
    choices = " or ".join(str(n) for n in nearest_divisors(world_size, stages))
    return (
        f"{stages} does not divide the {world_size} processes, and every stage needs the same number; "
        f"set {choices}, or start a multiple of {stages}"
    )


def worlds(hosts: Mapping[str, int], fewest: int) -> dict[int, frozenset[int]]:
    """Number of hosts (`fewest` to all) -> the numbers of processes that so many of them have."""
    sums: list[set[int]] = [{0}, *(set[int]() for _ in hosts)]
    if len(set(hosts.values())) == 1:  # the usual case, at any number of hosts
        slots = next(iter(hosts.values()))
        return {count: frozenset({count * slots}) for count in range(fewest, len(hosts) + 1)}
    for slots in hosts.values():
        for count in range(len(hosts), 0, -1):
            sums[count] |= {total + slots for total in sums[count - 1]}
    return {count: frozenset(sums[count]) for count in range(fewest, len(hosts) + 1)}
