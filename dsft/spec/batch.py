"""Compute the batch sizes of a run: global = micro × accumulation × data-parallel ranks, or groups of ranks
where these split rows.

No other module does this arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsft.errors import Problem, SpecError
from dsft.spec.schema import Data, Spec, Train
from dsft.spec.task import TASKS


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes in examples (conversations, pairs, or rows in pretraining).

    global_batch_size = micro_batch_size × accumulation_steps × data_parallel

    If tokens_per_micro_batch is set, the examples are packed into micro-batches of at most that number of
    tokens, and the number of micro-batches per step follows from the packing.

    data_parallel      number of ranks, or of groups of ranks, that read different examples
    sequence_parallel  ranks of a group, which split each row; 1: each rank reads examples of its own
    """

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    data_parallel: int
    tokens_per_micro_batch: int | None = None
    sequence_parallel: int = 1

    def equation(self) -> str:
        of_step = (self.global_batch_size, self.micro_batch_size, self.accumulation_steps)
        sizes = _equation(*of_step, self.data_parallel, self.sequence_parallel)
        if self.tokens_per_micro_batch is None:
            return sizes
        everywhere = "on every rank" if self.sequence_parallel == 1 else "in every group"
        return (
            f"{sizes}; these {self.global_batch_size} are packed into as few micro-batches "
            f"of at most {self.tokens_per_micro_batch} tokens as possible, equally many {everywhere}"
        )


def batch_sizes(
    train: Train, data_parallel: int, data: Data | None = None, task: str = "sft", sequence_parallel: int = 1
) -> BatchSizes:
    """Compute the missing one of the three batch sizes from the other two. Raise SpecError, with the whole
    equation, if no integer solves it. data, task: give the token budget of packed micro-batches, if any;
    data_parallel, sequence_parallel: as in BatchSizes."""
    ranks = data_parallel, sequence_parallel
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    if total is None and micro is not None and steps is not None:
        total = micro * steps * data_parallel
    elif total is not None and steps is None and micro is not None:
        steps = _whole_quotient(train, total, micro, ranks)
    elif total is not None and micro is None and steps is not None:
        micro = _whole_quotient(train, total, steps, ranks)
    if total is None or micro is None or steps is None:
        raise _refuse(train, ranks, "two of the three sizes must be given")
    if total != micro * steps * data_parallel:
        product = micro * steps * data_parallel
        raise _refuse(train, ranks, f"the product is {product}; leave one of the three sizes out")
    tokens = None
    if data is not None and data.packing:
        tokens = data.max_tokens_per_micro_batch or micro * TASKS[task].rows * data.max_length
    return BatchSizes(total, micro, steps, data_parallel, tokens, sequence_parallel)


def _whole_quotient(train: Train, total: int, given: int, ranks: tuple[int, int]) -> int:
    unit = given * ranks[0]
    if total % unit == 0:
        return total // unit
    raise _refuse(train, ranks, _ways_out(train, total, unit, ranks[0]))


def _ways_out(train: Train, total: int, unit: int, data_parallel: int) -> str:
    below = total // unit * unit
    totals = [str(n) for n in (below, below + unit) if n > 0]
    ways = f"the nearest values of global_batch_size that work are {' and '.join(totals)}"
    if len(totals) == 1:
        ways = f"the nearest value of global_batch_size that works is {totals[0]}"
    if total % data_parallel:
        return ways
    name, given = ("micro_batch_size", train.micro_batch_size)
    if given is None:
        name, given = ("accumulation_steps", train.accumulation_steps)
    assert given is not None
    share = total // data_parallel
    return f"{ways}, or {name} {' or '.join(str(n) for n in nearest_divisors(share, given))} with {total}"


def nearest_divisors(whole: int, wanted: int) -> list[int]:
    """Return the divisors of `whole` closest to `wanted`: the largest one at or below it and the smallest one
    at or above it, if they exist."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n <= wanted]
    above = [n for n in divisors if n >= wanted]
    return sorted({*below[-1:], *above[:1]})


def _refuse(train: Train, ranks: tuple[int, int], reason: str) -> SpecError:
    sizes = _equation(train.global_batch_size, train.micro_batch_size, train.accumulation_steps, *ranks)
    return SpecError("The batch sizes do not fit.", [Problem("train", f"{sizes} does not hold: {reason}")])


def _equation(
    total: int | None, micro: int | None, steps: int | None, data_parallel: int, sequence_parallel: int
) -> str:
    groups = f"groups {data_parallel} (of {sequence_parallel} ranks)"
    shown = ["?" if n is None else str(n) for n in (total, micro, steps)]
    return (
        f"global_batch_size {shown[0]} = micro_batch_size {shown[1]} × accumulation_steps {shown[2]} "
        f"× data-parallel {f'ranks {data_parallel}' if sequence_parallel == 1 else groups}"
    )


def is_one_rank(spec: Spec, batch: BatchSizes | None) -> bool:
    """Return whether one rank trains alone. batch: None if not known."""
    together = spec.parallel.sequence_parallel * spec.parallel.pipeline_stages
    return batch is not None and batch.data_parallel * together == 1


def adds_in_place(spec: Spec, batch: BatchSizes | None) -> bool:
    """Return whether ZeRO adds up gradients without buckets, as on one rank (engine/reduction.py)."""
    return is_one_rank(spec, batch) and spec.parallel.offload_optimizer.device == "none"


def deepspeed_stage(spec: Spec, batch: BatchSizes | None) -> int:
    """Return the ZeRO stage for DeepSpeed. On one rank 1 and 2 shard the same, nothing, and 2 is faster."""
    stage = spec.parallel.zero_stage
    return 2 if stage == 1 and adds_in_place(spec, batch) else stage


def accumulates(spec: Spec, batch: BatchSizes) -> bool:
    """Return whether a step may have several micro-batches, by accumulation_steps or a token budget."""
    budget = spec.data.max_tokens_per_micro_batch if spec.data.packing else None
    return batch.accumulation_steps > 1 or (
        budget is not None and budget < batch.micro_batch_size * spec.longest_example
    )


def has_wide_gradients(spec: Spec, batch: BatchSizes) -> bool:
    """Return whether one rank has fp32 gradients of bf16 weights in its GPU, which ZeRO 3 could spare it."""
    return (
        adds_in_place(spec, batch) and spec.train.precision == "bf16" and not gradients_stay_bf16(spec, batch)
    )


def gradients_stay_bf16(spec: Spec, batch: BatchSizes) -> bool:
    """Return whether ZeRO 3 keeps gradients in bf16 instead of an fp32 copy: if the copy would have the same
    values (one micro-batch per step, and either one rank or a reduction in bf16). Not at ZeRO 2, whose update
    converts all gradients to fp32 at once, and not if the optimizer is offloaded."""
    return (
        not accumulates(spec, batch)
        and spec.train.precision == "bf16"
        and spec.parallel.zero_stage == 3
        and spec.parallel.offload_optimizer.device == "none"
        and (is_one_rank(spec, batch) or spec.train.reduce_dtype == "bf16")
    )
