"""Replace how DeepSpeed 0.19.8 adds up gradients on one rank, where it pays for a reduction that has nothing
to reduce: copies into buckets, a division by one, copies to and from float32, a norm of a float64 copy, and
at the end of each backward pass a wait of the host.

Nothing is changed with an offloaded optimizer, whose gradients have to be copied to the host anyway.
"""

from __future__ import annotations

from typing import Any

from deepspeed import comm
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dsft.engine.gradients import norm_of


class OneRankZero2(DeepSpeedZeroOptimizer):
    """ZeRO 2 of one rank: each gradient is added to the group's flat float32 gradient as soon as autograd has
    computed it (stage_1_and_2.py:2284 process_gradients), with which the optimizer steps."""

    def process_gradients(self, param: nn.Parameter, i: int) -> None:
        assert param.grad is not None
        whole = self._get_compact_grad_partition_slice(i, 0, self.get_param_id(param), param.numel())
        whole.add_(param.grad.view(-1))
        param.grad = None

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Have the flat gradient also where the weights are float32 (stage_1_and_2.py:1259
        _use_compact_grad_partition_buffer)."""
        return True

    def independent_gradient_partition_epilogue(self) -> None:
        """End a backward pass (stage_1_and_2.py:1016 independent_gradient_partition_epilogue)."""
        for group in range(len(self.bit16_groups)):
            self._get_compact_grad_partition_buffer(group)  # zeros where no parameter got a gradient
        self._epilogue_ran_this_backward = True

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Do nothing: the norm is not finite where a gradient is not."""

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        return norm_of([gradient for group in self.averaged_gradients.values() for gradient in group])


class OneRankZero3(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO 3 of one rank: each gradient is added to its part of the flat gradient as soon as autograd has
    computed it (stage3.py:1569 reduce_independent_p_g_buckets_and_remove_grads)."""

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter) -> None:
        assert param.grad is not None
        self.partition_grads([param], [param.grad.view(-1)])

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Do nothing: the norm is not finite where a gradient is not."""

    def _get_norm_groups(self) -> list[Tensor]:
        return [norm_of([gradient for group in self.averaged_gradients.values() for gradient in group])]


def install_reduction(engine: Any) -> None:
    """Replace methods of DeepSpeed's engine and optimizer. Called once after `deepspeed.initialize`."""
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        # It waits for every gradient before it computes the norm (utils.py:291 has_overflow_serial).
        optimizer.overflow_checker.check = lambda: False
    if comm.get_world_size() > 1:
        return
    engine.allreduce_no_retain = lambda *_, **__: None  # ZeRO 0 (engine.py:3893 allreduce_no_retain)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.partition_gradients and not optimizer.cpu_offload:
            optimizer.__class__ = OneRankZero2
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and not optimizer.offload_optimizer:
        optimizer.__class__ = OneRankZero3
