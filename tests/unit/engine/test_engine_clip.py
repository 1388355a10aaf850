"""Clipping at ZeRO 0 in fp32 on one stage, and the optimizer that is built where nothing is offloaded."""

import pytest
import torch
from torch import nn

from dsft.engine.gradients import StepClip
from dsft.engine.optimizer import build_optimizer
from tests.specs import minimal_spec


def parameter(*gradient: float, copy: bool = False) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient)
    made.ds_pipe_replicated = copy  # type: ignore[attr-defined]
    return made


def clip(parameters: list[nn.Parameter], max_norm: float) -> StepClip:
    made = StepClip(parameters, max_norm, None)
    made(torch.optim.SGD(parameters, lr=1.0), (), {})
    return made


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (10.0, 1.0), (1.0, 0.2)])
def test_the_norm_counts_a_tied_parameter_once_and_clips_each_copy(max_norm: float, factor: float) -> None:
    first, copy = parameter(3.0, 4.0), parameter(3.0, 4.0, copy=True)
    done = clip([first, copy, nn.Parameter(torch.zeros(1))], max_norm)
    assert done.applied and float(done.norm) == pytest.approx(5.0)
    for each in (first, copy):
        torch.testing.assert_close(each.grad, factor * torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_nonfinite_gradient_is_dropped(bad: float, max_norm: float) -> None:
    one, other = parameter(bad, 1.0), parameter(1.0)
    assert not clip([one, other], max_norm).applied
    assert one.grad is None and other.grad is None


def test_adamw_is_torchs_fused_adamw() -> None:
    spec = minimal_spec(optim={"learning_rate": 2e-3, "betas": (0.8, 0.9), "eps": 1e-6})
    made = build_optimizer({"weight": nn.Parameter(torch.zeros(2, 2))}, spec, offloaded=False)
    assert type(made).__bases__[0] is torch.optim.AdamW
    found = {key: made.defaults[key] for key in ("lr", "betas", "eps", "fused")}
    assert found == {"lr": 2e-3, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}
