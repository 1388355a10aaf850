"""Replace what DeepSpeed 0.19.8 does to gradients: their norms, the clipping at ZeRO 0 in
fp32, and the loss scale of fp16.

Norms. torch 2.13 adds up the squares of a whole float32 tensor in a few running sums, so that its norm of 40
million elements on a CPU is 0.3 % too small and that of 150 million 1.9 %.
`torch.linalg.vector_norm(dtype=float64)` is exact but copies the whole tensor, as DeepSpeed's ZeRO 1 to 3 do.
Norms of short rows need no copy and no more time. `install_norms` replaces the two norms that DeepSpeed
computes in float32: `FP16_UnfusedOptimizer` (ZeRO 0 in bf16, unfused_optimizer.py:214 get_weight_norm) and
`BF16_Optimizer` (ZeRO 1 in bf16, bf16_optimizer.py:390 get_global_norm_of_tensors) look them up in their
modules at every step. CUDA's float32 norm adds up in a tree, so there ZeRO 1 to 3 need no float64
(stage_1_and_2.py:2684 get_norm_dtype, stage3.py:2457 get_norm_dtype).

Clipping. For ZeRO 0 in fp32 DeepSpeed calls a function that sees one stage's gradients only, returns no norm
and applies a gradient that is not finite (runtime/utils.py:394 is_model_parallel_parameter,
engine.py:3511 clip_fp32_gradients). `StepClip` is an optimizer step pre-hook over the reduced gradients of
all pipeline stages.

Loss scale. DeepSpeed's own scaler changes its scale inside the step, before the gradient is divided by it: in
a step in which it grows, ZeRO 1 to 3 divide by twice what the loss was multiplied by (stage_1_and_2.py:3047
_update_scale, stage_1_and_2.py:3198 combined_scale, stage3.py:2826 _update_scale, stage3.py:2981
combined_scale), and at its lowest scale it raises. `Scaler` changes its scale after the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.fp16 import unfused_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from torch import Tensor, nn

from dsft.engine.api import LossScale
from dsft.engine.base_optimizer import StateShard
from dsft.engine.state import is_copy

ROW = 1024
"""Number of elements per call of torch's norm: rounds by less than 1e-9 on average."""


def condensed(tensor: Tensor) -> Tensor:
    """Return a float32 vector of at most `ROW` elements with the same 2-norm as `tensor`. A tensor on a GPU
    is returned as it is: CUDA's norm adds up in a tree."""
    if not tensor.is_cpu:
        return tensor
    values = tensor.detach().float().reshape(-1)
    while len(values) > ROW:
        whole = len(values) // ROW * ROW
        norms = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1)
        values = torch.cat([norms, values[whole:]])
    return values


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, float32, without waiting for the device."""
    norms = torch._foreach_norm([condensed(tensor) for tensor in tensors], 2, torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


_weight_norm = unfused_optimizer.get_weight_norm
_global_norm = bf16_optimizer.get_global_norm_of_tensors


def install_norms() -> None:
    """Make DeepSpeed compute these norms with `condensed`, from now on, and on a GPU no norm in float64."""
    if get_accelerator().device_name() == "cuda":
        stage_1_and_2.get_norm_dtype = stage3.get_norm_dtype = lambda: torch.float32
    unfused_optimizer.get_weight_norm = _exact_weight_norm
    bf16_optimizer.get_global_norm_of_tensors = _exact_global_norm


def _exact_weight_norm(parameters: Tensor | Iterable[Tensor], mpu: Any = None) -> Any:
    tensors = [parameters] if isinstance(parameters, Tensor) else parameters
    return _weight_norm([condensed(tensor) for tensor in tensors], mpu=mpu)


def _exact_global_norm(input_tensors: Iterable[Tensor], mpu: Any = None, norm_type: int = 2) -> Any:
    assert norm_type == 2, "BF16_Optimizer's only one"
    return _global_norm([condensed(tensor) for tensor in input_tensors], mpu=mpu)


class StepClip:
    """An optimizer hook before each step: computes the norm over all stages, then clips to `max_norm` (0: no
    clipping). A gradient whose norm is not finite is dropped, so that the optimizer has nothing to apply.

    `stages`: the process group of the ranks with the other stages of the same model; None where this rank has
    the whole model. Data-parallel ranks have equal gradients by now and so decide alike, without a
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


@contextmanager
def gradient_squares(
    optimizer: torch.optim.Optimizer, owned: Sequence[tuple[str, StateShard]]
) -> Iterator[dict[str, float]]:
    """Yield a dict that an applied step in the block fills: by parameter, the sum of the squares of its
    gradient as the optimizer gets it, clipped, over the elements that this rank owns."""
    found: dict[str, float] = {}

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, shard in owned:  # ZeRO steps one group after the other; the others have no gradient then
            if shard.home.grad is not None:
                parts = shard.of(shard.home.grad).split(2**24)  # in float64 they take twice the memory
                found[name] = math.fsum(float(part.double().square().sum()) for part in parts)

    hook = optimizer.register_step_pre_hook(before_step)
    try:
        yield found
    finally:
        hook.remove()


class Scaler:
    """DeepSpeed's interface of a loss scaler; `state` is the loss scale of the next step."""

    dynamic = True

    def __init__(self) -> None:
        self.state = LossScale()

    @property
    def cur_scale(self) -> float:
        return self.state.scale

    @property
    def loss_scale(self) -> float:
        return self.state.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.state.scale

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: DeepSpeed calls this inside the step, which reads the scale afterwards."""

    def step(self, applied: bool) -> LossScale:
        """Return the loss scale of the finished step, and move on to that of the next one."""
        used, self.state = self.state, self.state.after(applied)
        return used


def install_scaler(optimizer: Any) -> Scaler:
    """Install a `Scaler` in DeepSpeed's optimizer of ZeRO 1, 2 or 3, and return it."""
    scaler = Scaler()
    optimizer.loss_scaler = scaler
    return scaler
