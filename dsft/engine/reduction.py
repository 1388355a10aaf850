"""Replace how DeepSpeed 0.19.8 adds up gradients.

On one rank it pays for a reduction that has nothing to reduce: copies into buckets, a division by one, copies
to and from float32, a norm of a float64 copy, and at the end of each backward pass a wait of the host. On one
rank nothing is changed if the optimizer is offloaded: its gradients have to be copied to the host anyway.

On several GPUs its host and its backward pass wait for reductions at ZeRO 1 and 2 (`OverlappedZero`). At ZeRO
3 only the host waits: for the reduction three buckets before (stage3.py:1667 synchronize), which limits the
memory, and at the end of a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
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

    def unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: Tensor) -> None:
        """Multiply all gradients by one factor (stage_1_and_2.py:3193 unscale_and_clip_grads), in the kernel
        that reads and writes 16 bytes at once: that of `mul_` by a tensor does not."""
        if self.clip_grad > 0 or self.loss_scale != 1:
            factor = torch.ones((), device=self.device)
            super().unscale_and_clip_grads([factor], total_norm)
            torch._foreach_mul_(grad_groups_flat, factor)

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        return norm_of([gradient for group in self.averaged_gradients.values() for gradient in group])


class OneRankZero3(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO 3 of one rank: each gradient is added to its part of the flat gradient as soon as autograd has
    computed it (stage3.py:1569 reduce_independent_p_g_buckets_and_remove_grads)."""

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter) -> None:
        assert param.grad is not None
        part = self._parts[param.ds_id].narrow(0, 0, param.grad.numel())  # type: ignore[attr-defined]
        add = part.add_ if self.micro_step_id else part.copy_
        add(param.grad.view(-1))
        param.grad = None

    def independent_gradient_partition_epilogue(self) -> None:
        """End a backward pass, without a wait (stage3.py:1407 independent_gradient_partition_epilogue)."""
        for group, parameters in enumerate(self.fp16_groups):
            self.averaged_gradients[group] = [
                self._parts[p.ds_id] if p.requires_grad else torch.zeros_like(p.ds_tensor) for p in parameters
            ]
        self._epilogue_ran_this_backward = True

    @property
    def _parts(self) -> dict[int, Tensor]:
        """The gradient of each parameter, by its number: a part of the flat one."""
        parts: dict[int, Tensor] = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return parts

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Do nothing: the norm is not finite where a gradient is not."""

    def _get_norm_groups(self) -> list[Tensor]:
        return [norm_of([gradient for group in self.averaged_gradients.values() for gradient in group])]


BUFFERS = 3
"""Buckets of ZeRO 1 and 2 on several GPUs: one is filled while two others may be in reduction."""


class OverlappedZero(DeepSpeedZeroOptimizer):
    """ZeRO 1 and 2 of several GPUs: buckets of gradients are reduced on a stream beside the backward pass.

    DeepSpeed's host waits for the whole device before each reduction to one rank and after each backward pass
    (stage_1_and_2.py:2413 synchronize, stage_1_and_2.py:1028 synchronize), and its backward pass waits, when
    a bucket is full, for the one before (stage_1_and_2.py:1612 wait_stream). Here the host does not wait, and
    the backward pass waits for the reduction of the bucket whose buffer it fills next, of `BUFFERS`. A
    gradient larger than a bucket is reduced where it is; it is kept as long as a buffer would be, since its
    memory would else be used again while it is read.
    """

    def setup_buckets(self) -> None:
        is_first = not self.ready_for_gradients
        super().setup_buckets()
        if is_first:
            self._in_reduction: dict[int, tuple[Any, list[Tensor]]] = {}
            [bucket] = self.ipg_buckets.values()
            bucket.buffer += [torch.empty_like(bucket.buffer[0]) for _ in range(BUFFERS - len(bucket.buffer))]

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter, i: int) -> None:
        [bucket] = self.ipg_buckets.values()
        stream = get_accelerator().current_stream()
        if bucket.elements + param.numel() > self.reduce_bucket_size:
            self.reduce_ipg_grads()
        if not bucket.params and bucket.index in self._in_reduction:
            reduced, _ = self._in_reduction.pop(bucket.index)
            stream.wait_event(reduced)
        with self._without_waiting():
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        bucket.copy_streams.add(stream)

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        [bucket] = self.ipg_buckets.values()
        if not bucket.params:
            return
        gradients = [gradient.detach() for gradient in bucket.grads]  # DeepSpeed replaces their .data
        for stream in bucket.copy_streams:
            self.reduction_stream.wait_stream(stream)
        with get_accelerator().stream(self.reduction_stream), self._without_waiting():
            super().reduce_ipg_grads(comm_dtype)
        self._in_reduction[bucket.index] = self.reduction_stream.record_event(), gradients
        bucket.index = (bucket.index + 1) % BUFFERS

    def independent_gradient_partition_epilogue(self) -> None:
        self.reduce_ipg_grads()
        get_accelerator().current_stream().wait_stream(self.reduction_stream)
        self._in_reduction = {}
        if self.cpu_offload:  # the copies to the host have to be there
            super().independent_gradient_partition_epilogue()
            return
        with self._without_waiting():
            super().independent_gradient_partition_epilogue()

    @contextmanager
    def _without_waiting(self) -> Iterator[None]:
        self.overlap_comm = False
        try:
            yield
        finally:
            self.overlap_comm = True


def install_reduction(engine: Any) -> None:
    """Replace methods of DeepSpeed's engine and optimizer. Called once after `deepspeed.initialize`."""
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        # It waits for every gradient before it computes the norm (utils.py:291 has_overflow_serial).
        optimizer.overflow_checker.check = lambda: False
    if comm.get_world_size() > 1:
        if isinstance(optimizer, DeepSpeedZeroOptimizer) and not get_accelerator().is_synchronized_device():
            if optimizer.overlap_comm and optimizer.contiguous_gradients:  # else there are no buffers
                optimizer.__class__ = OverlappedZero
        return
    engine.allreduce_no_retain = lambda *_, **__: None  # ZeRO 0 (engine.py:3893 allreduce_no_retain)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.partition_gradients and not optimizer.cpu_offload:
            optimizer.__class__ = OneRankZero2
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and not optimizer.offload_optimizer:
        optimizer.__class__ = OneRankZero3
