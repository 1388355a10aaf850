"""Clipping at ZeRO 0 in fp32: an optimizer step pre-hook, over the reduced gradients of all pipeline stages.

DeepSpeed leaves this case to a function that sees one stage's gradients only, keeps its norm to itself and
applies a gradient that is not finite (reference: deepspeed/runtime/utils.py:394 is_model_parallel_parameter,
engine.py:3511 clip_fp32_gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsft.engine.norm import condensed
from dsft.engine.ties import is_copy


class StepClip:
    """Before each step: the norm over all stages, then clipping to `max_norm` (0: none). A gradient whose
    norm is not finite is dropped, so that the optimizer's step finds nothing to apply.

    `stages`: the process group of the ranks that hold the other stages of the same model; None where this
    rank holds it whole. Data-parallel ranks hold equal gradients by now and so decide alike, without a
    collective.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], max_norm: float, stages: dist.ProcessGroup | None
    ) -> None:
        self._parameters = parameters
        self._max_norm = max_norm
        self._stages = stages
        self.norm: float | Tensor = 0.0
        self.applied = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with_gradient = [p for p in self._parameters if p.grad is not None]
        counted = (p for p in with_gradient if not is_copy(p))
        self.norm = self._global_norm([p.grad for p in counted if p.grad is not None])
        self.applied = bool(torch.isfinite(self.norm))
        if not self.applied:
            for parameter in with_gradient:
                parameter.grad = None
        elif self._max_norm > 0:
            nn.utils.clip_grads_with_norm_(with_gradient, self._max_norm, self.norm)

    def _global_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norm = nn.utils.get_total_norm([condensed(gradient) for gradient in gradients])
        if self._stages is None:
            return norm
        squared = norm.square()
        dist.all_reduce(squared, group=self._stages)
        return squared.sqrt()
