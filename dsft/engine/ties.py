"""Parameters that several pipeline stages hold, such as an embedding that the head shares: takes what each
stage trains by name, makes DeepSpeed's pipeline step all copies of one alike.

Each copy has its own moments and takes the same step, since all get the sum of their gradients, before that
is averaged over data-parallel ranks and clipped. The norm, the checkpoint and the export count the first
stage's copy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from dsft.engine.world import World

Ties = list[tuple[nn.Parameter, dist.ProcessGroup]]
"""This stage's tied parameters, each with the ranks that hold the copies of one model."""


def find_ties(trained: Mapping[str, nn.Parameter], world: World) -> Ties:
    """A collective. Whatever name two stages train is tied; copies but the first stage's are marked."""
    layout, found = world.layout, []
    told = world.gather(list(trained))
    by_stage = [told[stage * layout.data_parallel] for stage in range(layout.pipeline_stages)]
    for name in dict.fromkeys(name for names in by_stage for name in names):
        stages = [stage for stage, names in enumerate(by_stage) if name in names]
        for data_rank in range(layout.data_parallel) if len(stages) > 1 else ():
            ranks = [stage * layout.data_parallel + data_rank for stage in stages]
            group = dist.new_group(ranks)  # of all ranks: a collective
            if world.rank in ranks:
                found.append((trained[name], group))
                trained[name].ds_pipe_replicated = world.rank != ranks[0]  # type: ignore[attr-defined]
    return found


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether an earlier stage holds it too; the word is DeepSpeed's, whose norms leave such out."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def tie(engine: Any, ties: Ties) -> None:
    """Have DeepSpeed's PipelineEngine add up the gradients of all copies, where it does it for tied layers of
    its own (pipe/engine.py:269): after the last backward, before any reduction over data-parallel ranks."""
    engine.module.get_tied_weights_and_groups = lambda: [
        (_summed(engine.optimizer, parameter), group) for parameter, group in ties
    ]


def _summed(optimizer: Any, parameter: nn.Parameter) -> Any:
    """Where DeepSpeed finds this parameter's gradient to add up. It looks at `.grad` alone, and so at nothing
    where ZeRO 1 adds micro-batches up in another type (stage_1_and_2.py:1247): copies would drift apart."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return SimpleNamespace(grad=optimizer.get_gradient_for_reduction(parameter))
    if not isinstance(optimizer, BF16_Optimizer) and parameter.grad is not None:
        # ZeRO 0 in bf16 takes its norm of gradients, and looks for the mark at them (utils.py:570).
        parameter.grad.ds_pipe_replicated = is_copy(parameter)  # type: ignore[attr-defined]
    return parameter
