"""The loss scale of fp16 in DeepSpeed's optimizers: takes a started optimizer, puts dsft's scaler into it.

DeepSpeed's own scaler changes its scale inside the step, before the gradient is divided by it: in a step in
which it grows, ZeRO 1 to 3 divide by twice what the loss was multiplied by (version 0.19.8,
stage_1_and_2.py:3047 _update_scale, stage_1_and_2.py:3198 combined_scale, stage3.py:2826 _update_scale,
stage3.py:2981 combined_scale), and at its lowest scale it raises. This one changes
after the step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsft.engine.api import LossScale


class Scaler:
    """What DeepSpeed asks of a scaler; `state` is that of the next step."""

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
        """Called inside the step, which goes on to read the scale: nothing is changed yet."""

    def step(self, applied: bool) -> LossScale:
        """The scale of the step that is done; from here on the next one's."""
        used, self.state = self.state, self.state.after(applied)
        return used


def install_scaler(optimizer: Any) -> Scaler:
    """Into DeepSpeed's ZeRO 1, 2 and 3."""
    scaler = Scaler()
    optimizer.loss_scaler = scaler
    return scaler
