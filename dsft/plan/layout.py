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
    """The layout of ranks: rank = stage × shards + shard_rank, as in DeepSpeed's PipeDataParallelTopology,
    and shard_rank = data_rank × sequence_parallel + sequence_rank.

    world_size         number of ranks
    pipeline_stages    number of consecutive parts of the model, 1 without a pipeline
    sequence_parallel  number of ranks that share the tokens of each row, 1 without a split
    """

    world_size: int
    pipeline_stages: int
    sequence_parallel: int = 1

    @property
    def shards(self) -> int:
        """Number of ranks of a stage. ZeRO shards the stage's state over them and DeepSpeed averages its
        gradients over them."""
        return self.world_size // self.pipeline_stages

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel groups, into which the rows of a step are divided."""
        return self.shards // self.sequence_parallel

    def stage(self, rank: int) -> int:
        return rank // self.shards

    def shard_rank(self, rank: int) -> int:
        """Return the number of the share of its stage's state that the rank owns, from 0 to `shards` - 1."""
        return rank % self.shards

    def data_rank(self, rank: int) -> int:
        """Return the rank's data-parallel group, from 0 to `data_parallel` - 1: the part of a step's rows
        that it reads."""
        return self.shard_rank(rank) // self.sequence_parallel

    def sequence_rank(self, rank: int) -> int:
        """Return which part of each row's tokens the rank has, from 0 to `sequence_parallel` - 1."""
        return rank % self.sequence_parallel


def layout_of(parallel: Parallel, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks. Raise SpecError if the number of stages, or of stages × ranks
    of a group, does not divide it."""
    stages, together = parallel.pipeline_stages, parallel.sequence_parallel
    if world_size % stages:
        choices = " or ".join(str(n) for n in nearest_divisors(world_size, stages))
        message = (
            f"{stages} does not divide the {world_size} processes, and all stages need the same number; "
            f"set {choices}, or start a multiple of {stages}"
        )
        problem = Problem("parallel.pipeline_stages", message)
        raise SpecError("The pipeline does not fit the processes.", [problem])
    if world_size // stages % together:
        choices = " or ".join(str(n) for n in nearest_divisors(world_size // stages, together))
        of_stage = " of each stage" if stages > 1 else ""
        message = (
            f"{together} does not divide the {world_size // stages} processes{of_stage}, and all groups need "
            f"the same number; set {choices}, or start a multiple of {stages * together}"
        )
        problem = Problem("parallel.sequence_parallel", message)
        raise SpecError("The groups that split rows do not fit the processes.", [problem])
    return Layout(world_size, stages, together)


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
