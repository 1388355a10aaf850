"""Find the longest rows of a run that fit into the memory of its GPUs and hosts, by the plan's own figures,
with each number of ranks that could split them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd

from dsft.errors import Problem, SpecError
from dsft.plan.build import GPU_MEMORY, HOST_MEMORY, Plan, memory_limits
from dsft.plan.compare import ROOMY, batch_keys, changed, group_sizes, size_of
from dsft.plan.memory.sizes import runs_on_cpu
from dsft.spec.batch import BatchSizes
from dsft.spec.layout import batch_on, layout_of
from dsft.spec.load import refusals
from dsft.spec.schema import Spec

STEP = 128  # tokens by which lengths are tried
MOST = 1 << 27  # the largest length that is tried, in tokens
POSITIONS = "the model's positions"


@dataclass(frozen=True)
class LongestRow:
    """The longest row with one number of ranks that split it.

    batch    batch sizes, with the plan's global batch; None if refused
    tokens   data.max_length, a multiple of STEP unless the model's positions limit it; 0 if not even STEP
             tokens fit
    limit    what longer rows would exceed
    refused  why rows cannot be split so; empty if they can
    """

    sequence_parallel: int
    batch: BatchSizes | None = None
    tokens: int = 0
    limit: str = ""
    refused: str = ""


def longest_rows(plan: Plan) -> list[LongestRow]:
    """Return the longest rows that take at most the share ROOMY of the memory of a GPU and of a host, for
    each number of ranks that could split them. Raise SpecError if neither limit is known."""
    if not any(memory_limits(plan.spec)):
        key = HOST_MEMORY if runs_on_cpu(plan.spec) else GPU_MEMORY
        raise SpecError("The longest row is unknown.", [Problem(key, "is not set; set it, in GiB")])
    return [_longest(plan, size) for size in group_sizes(plan)]


def _longest(plan: Plan, size: int) -> LongestRow:
    own, spec = plan.spec.parallel.sequence_parallel, plan.spec
    if size != own:
        spec = changed(spec, {"parallel.sequence_parallel": size, **_batch(plan, size)})
        if size == 1:
            spec = changed(spec, {"parallel.sequence_parallel_across_hosts": False})
    for refused in refusals(spec):
        return LongestRow(size, refused=refused.message)
    try:
        layout = layout_of(spec.parallel, plan.layout.world_size)
        batch = batch_on(spec, layout)
    except SpecError as error:
        return LongestRow(size, refused=error.problems[0].message)

    def over(tokens: int) -> str:
        """Return the limits that rows of this length exceed; empty if they fit."""
        found = size_of(plan, _with_rows(spec, tokens), layout)
        return found.fullest if found.full > ROOMY else ""

    positions = plan.census.max_positions
    if positions is not None and not over(positions):
        return LongestRow(size, batch, positions, POSITIONS)
    tokens = STEP * _last(lambda steps: not over(STEP * steps), (positions or MOST) // STEP)
    return LongestRow(size, batch, tokens, over(tokens + STEP))


def _batch(plan: Plan, size: int) -> dict[str, int | None]:
    """Return the keys of the plan's global batch over groups of `size` ranks: with its own micro-batch size,
    or a divisor where this does not divide a group's share."""
    groups = plan.layout.shards // size
    return batch_keys(plan, gcd(plan.batch.micro_batch_size, plan.batch.global_batch_size // groups))


def _with_rows(spec: Spec, tokens: int) -> Spec:
    """Return the spec with rows of this length, and a token budget into which one fits."""
    spec = changed(spec, {"data.max_length": tokens})
    budget = spec.data.max_tokens_per_micro_batch
    if budget is None:
        return spec
    found: Spec = changed(spec, {"data.max_tokens_per_micro_batch": max(budget, spec.longest_example)})
    return found


def _last(fits: Callable[[int], bool], most: int) -> int:
    """Return a number up to `most` that fits and whose successor does not, or `most`; 0 if 1 does not fit."""
    below, above = 0, 1
    while above <= most and fits(above):
        below, above = above, 2 * above
    above = min(above, most + 1)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


def hints(plan: Plan, rows: list[LongestRow]) -> Iterator[str]:
    """Yield what else would allow longer rows, as far as the spec decides it: nothing where only the model's
    positions limit them."""
    spec = plan.spec
    if all(row.limit == POSITIONS for row in rows if row.batch):
        return
    if max(row.batch.micro_batch_size for row in rows if row.batch) > 1:
        yield "train.micro_batch_size=1"
    if spec.model.gradient_checkpointing is not True:
        yield "model.gradient_checkpointing=true"
    elif not spec.model.activation_offload and not runs_on_cpu(spec):
        yield "model.activation_offload=true"
    if spec.parallel.zero_stage < 3 and spec.parallel.pipeline_stages == 1 and plan.layout.shards > 1:
        yield "parallel.zero_stage=3"
