"""Parameters that several pipeline stages hold, such as an embedding that the head shares: takes what each
stage trains by name, makes DeepSpeed's pipeline step all copies of one alike.

Each copy has its own moments and takes the same step, since each gets the same gradient to the last bit. The
norm, the checkpoint and the export count the first stage's copy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dsft.engine.world import World

Ties = list[tuple[nn.Parameter, dist.ProcessGroup]]
"""This stage's tied parameters, each with all ranks that hold it: of some stages, all ranks."""


def find_ties(trained: Mapping[str, nn.Parameter], world: World) -> Ties:
    """A collective. Whatever name two stages train is tied; copies but the first stage's are marked."""
    shards, found = world.layout.shards, []
    told = world.gather(list(trained))
    for name in dict.fromkeys(name for names in told for name in names):
        ranks = [rank for rank, names in enumerate(told) if name in names]
        if len(ranks) > shards:
            group = dist.new_group(ranks)  # of all ranks: a collective
            if world.rank in ranks:
                found.append((trained[name], group))
                trained[name].ds_pipe_replicated = world.rank >= ranks[shards]  # type: ignore[attr-defined]
    return found


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether an earlier stage holds it too; the word is DeepSpeed's, whose norms leave such out."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def tie(engine: Any, ties: Ties, shard_rank: int) -> None:
    """Have a PipelineEngine add up the gradients of all copies where it asks for tied layers of its own
    (pipe/engine.py:281 get_tied_weights_and_groups): after the last backward, before any reduction over the
    ranks of a stage."""

    def add_up() -> list[Any]:
        for parameter, group in ties:
            _add_up(_gradient(engine.optimizer, parameter), group, shard_rank)
        return []  # which leaves nothing for DeepSpeed to do

    engine.module.get_tied_weights_and_groups = add_up


def _gradient(optimizer: Any, parameter: Any) -> Tensor:
    """Where micro-batches have been added up. DeepSpeed looks at `.grad` alone, and so at nothing where ZeRO
    1 adds them up in another type (stage_1_and_2.py:1247 get_gradient_for_reduction): copies would drift
    apart in silence."""
    if isinstance(optimizer, BF16_Optimizer):
        return parameter._hp_grad
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return optimizer.get_gradient_for_reduction(parameter)
    return parameter.grad


def _add_up(gradient: Tensor, group: dist.ProcessGroup, shard_rank: int) -> None:
    """Over stages and their ranks at once, in float32. The sum then stands on the first rank
    of each stage, and zeros on the others: so the stage's own reduction, which adds each element in an
    order that depends on its place, changes no bit of it."""
    total = gradient.float()
    dist.all_reduce(total, group=group)
    gradient.copy_(total if shard_rank == 0 else total.zero_())
