"""Assign pipeline stages and shares of the data to ranks, and compute the possible world sizes of some
hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsft.errors import Problem, SpecError
from dsft.plan.batch import nearest_divisors
from dsft.spec.schema import Parallel


@dataclass(frozen=True)
class Layout:
    """The layout of ranks, numbered as by DeepSpeed's PipeDataParallelTopology: rank = stage × shards +
    shard_rank.

    world_size       number of ranks
    pipeline_stages  number of consecutive parts of the model, 1 without a pipeline
    data_parallel    number of parts into which the rows of a step are divided, world_size ÷ pipeline_stages;
                     equal to `shards`, the number of ranks of a stage
    """

    world_size: int
    pipeline_stages: int
    data_parallel: int

    @property
    def shards(self) -> int:
        """Number of ranks of a stage. ZeRO shards the stage's state over them and DeepSpeed averages its
        gradients over them. Each reads different rows, so the number equals `data_parallel`."""
        return self.world_size // self.pipeline_stages

    def stage(self, rank: int) -> int:
        return rank // self.shards

    def shard_rank(self, rank: int) -> int:
        """Return the number of the share of its stage's state that the rank owns, from 0 to `shards` - 1."""
        return rank % self.shards

    def data_rank(self, rank: int) -> int:
        """Return the number of the part of a step's rows that the rank reads, from 0 to `data_parallel` -
        1."""
        return self.shard_rank(rank)


def layout_of(parallel: Parallel, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks. Raise SpecError if the number of stages does not divide it."""
    stages = parallel.pipeline_stages
    if world_size % stages:
        choices = " or ".join(str(n) for n in nearest_divisors(world_size, stages))
        message = (
            f"{stages} does not divide the {world_size} processes, and all stages need the same number; "
            f"set {choices}, or start a multiple of {stages}"
        )
        problem = Problem("parallel.pipeline_stages", message)
        raise SpecError("The pipeline does not fit the processes.", [problem])
    return Layout(world_size, stages, world_size // stages)


def worlds(hosts: Mapping[str, int], fewest: int) -> dict[int, frozenset[int]]:
    """Return, for each number of hosts from `fewest` to all, the world sizes that this many of them can
    have."""
    sums: list[set[int]] = [{0}, *(set[int]() for _ in hosts)]
    if len(set(hosts.values())) == 1:  # the usual case, fast for any number of hosts
        slots = next(iter(hosts.values()))
        return {count: frozenset({count * slots}) for count in range(fewest, len(hosts) + 1)}
    for slots in hosts.values():
        for count in range(len(hosts), 0, -1):
            sums[count] |= {total + slots for total in sums[count - 1]}
    return {count: frozenset(sums[count]) for count in range(fewest, len(hosts) + 1)}
