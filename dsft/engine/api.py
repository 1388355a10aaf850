"""What the loop and the checkpoint see of an engine; ZeRO and pipeline are siblings behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch
from dsft.engine.partition import Remembered

INITIAL_SCALE, LOWEST_SCALE, GROWTH_STEPS = 2.0**16, 1.0, 1000

Kind = Literal["value", "exp_avg", "exp_avg_sq", "momentum_buffer"]  # fp32 value and the optimizer's moments


@dataclass(frozen=True)
class Fragment:
    """A range of one trained parameter's flattened state that this rank owns, and no other rank does.

    name   the parameter's Hugging Face name, as in `model.state_dict()` of the transformers class
    start  index of the first element in the flattened parameter
    data   (n,) float32, on any device; a view where the engine has one
    """

    name: str
    kind: Kind
    start: int
    data: Tensor


ReadRange = Callable[[str, Kind, int, int], Tensor]
"""(name, kind, start, stop) -> (stop - start,) float32 on the CPU; raises CheckpointError where absent."""


@dataclass(frozen=True)
class LossScale:
    """fp16: what the loss is multiplied by before the backward, so that small gradients do not become 0.

    Halved by a step whose gradient overflowed, doubled after `GROWTH_STEPS` steps without one (Micikevicius
    et al. 2018). good_steps: since it last changed.
    """

    scale: float = INITIAL_SCALE
    good_steps: int = 0

    def after(self, applied: bool) -> LossScale:
        if not applied:
            return LossScale(max(self.scale / 2, LOWEST_SCALE))
        if self.good_steps + 1 == GROWTH_STEPS:
            return LossScale(self.scale * 2)
        return LossScale(self.scale, self.good_steps + 1)

    @property
    def can_fall(self) -> bool:
        return self.scale > LOWEST_SCALE


Kept = Callable[[Tensor, MicroBatch], Tensor]
"""What is kept of a micro-batch that was scored, from the log-probabilities (B, T) of its targets."""


def log_probabilities(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    return logps


@dataclass(frozen=True)
class StepResult:
    """sums (n_terms,) float64 on the device, this rank's share, detached and not divided by any count:
    summed over all ranks of the world they are the step's; grad_norm: the 2-norm of the averaged,
    unscaled gradient before clipping (may be a device scalar); applied: False where it was not finite;
    loss_scale: that of this step, in fp16 alone."""

    sums: Tensor
    grad_norm: float | Tensor
    applied: bool
    loss_scale: LossScale | None = None


class Scorer(Protocol):
    """An engine as far as it scores: of the policy, or of a frozen model."""

    def score(
        self, micro_batches: Sequence[MicroBatch], kept: Kept = log_probabilities, *, training: bool = False
    ) -> tuple[Tensor, ...]:
        """What `kept` makes of each micro-batch, on the device, from its targets' log-probabilities (B, T)
        float32: by default these. Without gradients, and without dropout unless `training`; none where this
        rank has no last stage. A collective: every rank gives as many micro-batches."""
        ...


class Engine(Scorer, Protocol):
    def step(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
    ) -> StepResult:
        """Forward, backward and one optimizer step. Every rank gives the same number of micro-batches."""
        ...

    def rehearse(self, micro_batch: MicroBatch) -> None:
        """One whole step on this micro-batch with rate and gradient 0, which allocates all that a step
        does, optimizer states too, and then leaves the engine as it was. To be called before `load`; a
        collective. On every rank the micro-batch has the same shape."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """(n_terms,) float64: this rank's sums without gradients (zeros where it has no last stage)."""
        ...

    def remember(self, parameters: Iterable[nn.Parameter]) -> Remembered:
        """The values that these parameters of the policy have now, to score with them later."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face name -> full shape of every parameter that this rank's stage trains."""
        ...

    def owned(self) -> Iterator[Fragment]:
        """The state that this rank owns; over all ranks each element stands exactly once."""
        ...

    def replicated(self) -> Mapping[str, Tensor]:
        """The tensors that this rank holds whole, by name, as `dsft.engine.replicas` compares them."""
        ...

    def set_loss_scale(self, loss_scale: LossScale) -> None:
        """fp16: that of the next step."""
        ...

    def load(self, read: ReadRange, applied_steps: int) -> None:
        """Take values and moments for what this rank holds, and the optimizer's step count."""
        ...
