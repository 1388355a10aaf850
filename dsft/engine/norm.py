"""Makes the 2-norms of gradients exact to float32's rounding on a CPU: dsft's own, and DeepSpeed's of ZeRO 0
and 1 in bf16.

torch 2.13 adds up the squares of a whole float32 tensor in a few running sums, so that its norm of 40 million
elements on a CPU is 0.3 % too small and that of 150 million 1.9 %. `torch.linalg.vector_norm(dtype=float64)`
is exact but copies the whole tensor, as DeepSpeed's ZeRO 1 to 3 do. Norms of short rows need no copy and no
more time.

`install` replaces the two norms that DeepSpeed 0.19.8 computes in float32:
`FP16_UnfusedOptimizer` (ZeRO 0 in bf16, unfused_optimizer.py:214 get_weight_norm) and `BF16_Optimizer` (ZeRO
1 in bf16, bf16_optimizer.py:390 get_global_norm_of_tensors) look them up in their modules at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.fp16 import unfused_optimizer
from torch import Tensor

ROW = 1024
"""Elements of which torch takes one norm: rounds by less than 1e-9 on average."""


def condensed(tensor: Tensor) -> Tensor:
    """A float32 vector of at most `ROW` elements that has the same 2-norm as `tensor`. A tensor on a GPU is
    returned as it is: CUDA's norm adds up in a tree."""
    if not tensor.is_cpu:
        return tensor
    values = tensor.detach().float().reshape(-1)
    while len(values) > ROW:
        whole = len(values) // ROW * ROW
        norms = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1)
        values = torch.cat([norms, values[whole:]])
    return values


_weight_norm = unfused_optimizer.get_weight_norm
_global_norm = bf16_optimizer.get_global_norm_of_tensors


def install() -> None:
    """Make DeepSpeed compute these norms as `condensed` does, from now on."""
    unfused_optimizer.get_weight_norm = _exact_weight_norm
    bf16_optimizer.get_global_norm_of_tensors = _exact_global_norm


def _exact_weight_norm(parameters: Tensor | Iterable[Tensor], mpu: Any = None) -> Any:
    tensors = [parameters] if isinstance(parameters, Tensor) else parameters
    return _weight_norm([condensed(tensor) for tensor in tensors], mpu=mpu)


def _exact_global_norm(input_tensors: Iterable[Tensor], mpu: Any = None, norm_type: int = 2) -> Any:
    assert norm_type == 2, "BF16_Optimizer's only one"
    return _global_norm([condensed(tensor) for tensor in input_tensors], mpu=mpu)
