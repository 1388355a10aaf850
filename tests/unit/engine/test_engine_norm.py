"""Gradient norms of large tensors on a CPU: dsft's clipping, and the two that DeepSpeed takes in float32."""

import math

import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.fp16 import unfused_optimizer
from torch import Tensor, nn

from dsft.engine.gradients import ROW, StepClip, condensed, install_norms

install_norms()
LARGE = 4_000_000  # elements of which torch's own float32 norm is off by 7e-5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def exact(*tensors: Tensor) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@pytest.mark.parametrize("size", [0, 1, ROW, ROW + 1, 2 * ROW - 1, ROW**2 + ROW - 1, LARGE])
def test_condensed_tensor_has_the_same_norm(size: int) -> None:
    tensor = drawn(size)
    short = condensed(tensor)
    assert len(short) <= ROW
    assert float(short.double().norm()) == pytest.approx(exact(tensor), rel=1e-7)


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_nonfinite_norm_stays_nonfinite(fault: float) -> None:
    tensor = drawn(LARGE // 1000, 1000).t()  # not contiguous
    tensor[-1, -1] = fault
    assert not math.isfinite(condensed(tensor).norm())


def test_clipping_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(LARGE)), nn.Parameter(torch.zeros(7))]
    gradients = [drawn(LARGE), drawn(7)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    clip = StepClip(parameters, 0.5, None)
    clip(torch.optim.SGD(parameters, 1.0), (), {})
    assert clip.applied
    assert float(clip.norm) == pytest.approx(exact(*gradients), rel=1e-6)
    clipped = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert exact(*clipped) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_deepspeed_bf16_optimizers(dtype: torch.dtype) -> None:
    gradients = [drawn(LARGE).to(dtype), drawn(7).to(dtype)]
    zero0 = unfused_optimizer.get_weight_norm(gradients, mpu=None)
    zero1 = bf16_optimizer.get_global_norm_of_tensors(input_tensors=gradients, mpu=None, norm_type=2)
    assert [float(zero0), float(zero1)] == pytest.approx([exact(*gradients)] * 2, rel=1e-6)


def test_deepspeed_bf16_optimizers_mark_a_nonfinite_norm() -> None:
    gradients = [torch.tensor([1.0, math.inf])]
    assert unfused_optimizer.get_weight_norm(gradients, mpu=None) == -1
    assert bf16_optimizer.get_global_norm_of_tensors(input_tensors=gradients) == -1
