"""Assign pipeline stages and shares of the data to ranks, and compute the possible world sizes of some
hosts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsft.errors import Problem, SpecError
from dsft.spec.batch import BatchSizes, batch_sizes, nearest_divisors
from dsft.spec.schema import Parallel, Spec


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

    def part(self, tokens: int) -> int:
        """Return the most tokens of a micro-batch of `tokens` that one rank has."""
        return -(-tokens // self.sequence_parallel)

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
    of a group, does not divide it, or if it is not several groups with a copy of the parameters each."""
    stages, together = parallel.pipeline_stages, parallel.sequence_parallel
    copied = parallel.zero_hpz_partition_size
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
        here = world_size // stages
        processes = f"process{'' if here == 1 else 'es'}{' of each stage' if stages > 1 else ''}"
        message = (
            f"{together} does not divide the {here} {processes}, and all groups need "
            f"the same number; set {choices}, or start a multiple of {stages * together}"
        )
        problem = Problem("parallel.sequence_parallel", message)
        raise SpecError("The groups that split rows do not fit the processes.", [problem])
    if copied > 1 and (world_size % copied or world_size == copied):
        message = (
            f"{copied} does not divide the {world_size} processes into several groups, each with a copy of "
            f"the parameters; set 1, or start a multiple of {copied}, at least {2 * copied}"
        )
        problems = [Problem("parallel.zero_hpz_partition_size", message)]
        raise SpecError("The groups with a copy of the parameters do not fit the processes.", problems)
    return Layout(world_size, stages, together)


def fewest_ranks(parallel: Parallel) -> int:
    """Return the smallest number of ranks of which there is a layout."""
    copied = parallel.zero_hpz_partition_size
    found = math.lcm(parallel.pipeline_stages * parallel.sequence_parallel, copied)
    return 2 * found if 1 < found == copied else found


def batch_on(spec: Spec, layout: Layout) -> BatchSizes:
    """Return the batch sizes of a run with this layout. Raise SpecError if they do not fit."""
    train, groups = spec.train, layout.data_parallel
    sizes = batch_sizes(train, groups, spec.data, spec.task, layout.sequence_parallel)
    if sizes.global_batch_size == 1 and spec.reference is not None and spec.reference.has_baseline:
        message = (
            "on one data-parallel rank a step has one row, but loss_type kto needs the answer of a second "
            "one; raise micro_batch_size or accumulation_steps, or use apo_zero_unpaired"
        )
        raise SpecError("The batch sizes do not fit.", [Problem("train", message)])
    return sizes


def hosts_of_ranks(hosts: Mapping[str, int]) -> list[str]:
    """Return the host of each rank. hosts: host -> number of ranks, in rank order."""
    return [host for host, slots in hosts.items() for _ in range(slots)]


def divided_group(parallel: Parallel, on: Sequence[str]) -> tuple[str, str] | None:
    """Return a key of `parallel` and what is wrong with its value if a group of ranks is on several hosts:
    one that splits rows, where the spec does not allow that, or one that has a copy of the parameters. on:
    host of each rank, or what is equal for ranks of one host alone."""
    split = 1 if parallel.sequence_parallel_across_hosts else parallel.sequence_parallel
    for key, size, share, sent, or_set in (
        ("sequence_parallel", split, "split the same rows", "the all-to-alls",
         ", or set sequence_parallel_across_hosts: true"),
        ("zero_hpz_partition_size", parallel.zero_hpz_partition_size, "share a copy of the parameters",
         "its gathers", ""),
    ):  # fmt: skip
        groups = (range(first, min(first + size, len(on))) for first in range(0, len(on), size))
        divided = next((group for group in groups if len({on[rank] for rank in group}) > 1), None)
        if divided is not None:
            within = nearest_divisors(math.gcd(*Counter(on).values()), size)[0]
            return f"parallel.{key}", (
                f"{size} would put ranks {divided[0]}-{divided[-1]}, which {share}, on "
                f"{len({on[rank] for rank in divided})} hosts, and {sent} of each layer on the network "
                f"between them; give each host a multiple of {size} ranks, numbered one after the other, "
                f"{'set' if or_set else 'or set'} {within}{or_set}"
            )
    return None


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
