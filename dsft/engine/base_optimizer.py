"""Define what dsft asks of an optimizer beside its step: which moments it has, how a checkpoint reads and
sets them, and what the check of a start's first step may expect of it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dsft.engine.api import StateKind
from dsft.engine.first_step import NOISE

RATE = "rate"
"""Key that dsft adds to an optimizer's groups: the learning rate as a multiple of the step's."""

Ranks = dist.ProcessGroup | None
"""The group over which parameters are sharded; None: each rank has whole ones."""
Samples = Mapping[StateKind, Tensor]
"""Sampled values and moments, each (n, SAMPLES) float64, as `first_step.sampled_state` returns them."""


@dataclass(frozen=True)
class StateShard:
    """The part of one parameter whose fp32 value and moments are on this rank.

    start   index of its first element in the flattened parameter
    size    its number of elements
    home    the fp32 tensor that has the value and is the key of `optimizer.state`; may have others too
    offset  index of its first element in the flattened `home`
    shape   of the whole parameter
    """

    start: int
    size: int
    home: Tensor
    offset: int
    shape: tuple[int, ...]

    def part(self, start: int, stop: int) -> StateShard:
        """Return the elements [start, stop), counted in the flattened parameter and limited to this part."""
        start, stop = max(start, self.start), min(stop, self.start + self.size)
        offset = self.offset + start - self.start
        return replace(self, start=start, size=max(stop - start, 0), offset=offset)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view (size,) of this part in `tensor`, which is shaped like `home`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)


class BaseOptimizer(torch.optim.Optimizer, ABC):
    """The base of each optimizer. These methods are for one that has, for each of its tensors and each kind
    of moment, a tensor of the same shape: `state[home][kind]`."""

    noise = NOISE
    """Largest relative error of `first_moments`, as `first_step.NOISE`."""

    @abstractmethod
    def kinds_of(self, home: Tensor) -> tuple[StateKind, ...]:
        """Return the kinds of the moments of a tensor."""

    @abstractmethod
    def expected_change(self, gradients: Tensor, after: Samples, step: int) -> Tensor | float:
        """Return a lower bound of the change of each value by a step with learning rate 1 and without weight
        decay: (n, SAMPLES), or one number for all. gradients: (n, SAMPLES), as the optimizer gets them;
        after: the state after the step, NaN where a parameter has no such moment; step: number of steps with
        this one."""

    def first_moments(self, after: Samples) -> Tensor | None:
        """Return the moment, (n, SAMPLES), which after a run's first step is the gradient times one factor
        for all parameters; None if there is none."""
        return None

    def set_parts(self, parts: Mapping[str, StateShard], homes: Sequence[Tensor], ranks: Ranks) -> None:
        """Take the parts of parameters, by name, that the tensors `homes` of this rank have. Called once,
        before the first step. A collective of `ranks`."""

    def allocate(self, home: Tensor, steps: int) -> None:
        """Set the state of a tensor as after `steps` steps, with moments of zeros."""
        self.state[home] = {kind: torch.zeros_like(home, requires_grad=False) for kind in self.kinds_of(home)}

    def set_steps(self, steps: int) -> None:
        """Set what is counted beside the state of the tensors as after `steps` steps."""

    def reader(self, shard: StateShard, kind: StateKind) -> Callable[[], Tensor] | None:
        """Return what reads a moment of a part, (size,) float32; None where there is no such moment yet."""
        moment = self.state.get(shard.home, {}).get(kind)
        return None if moment is None else functools.partial(shard.of, moment)

    def write(self, shard: StateShard, kind: StateKind, values: Tensor) -> None:
        """Set a moment of a part, which is allocated, to values (size,) float32."""
        shard.of(self.state[shard.home][kind]).copy_(values)


class BaseAdam(BaseOptimizer):
    """The base of each AdamW. torch's fused one counts its steps in a float32 of each tensor."""

    def kinds_of(self, home: Tensor) -> tuple[StateKind, ...]:
        return ("exp_avg", "exp_avg_sq")

    def expected_change(self, gradients: Tensor, after: Samples, step: int) -> Tensor:
        beta1, beta2 = self.defaults["betas"]
        root = (after["exp_avg_sq"] / (1 - beta2**step)).sqrt()
        change = (after["exp_avg"] / (1 - beta1**step)).abs() / (root + self.defaults["eps"])
        return change.clamp(max=1.0)  # a second moment in 8 bits may be 0 beside a first one that is not

    def first_moments(self, after: Samples) -> Tensor | None:
        return after["exp_avg"]

    def allocate(self, home: Tensor, steps: int) -> None:
        super().allocate(home, steps)
        if "exp_avg" in self.state[home]:
            self.state[home]["step"] = torch.tensor(float(steps), device=home.device)
