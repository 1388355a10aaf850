"""The engine as the loop and the checkpoint see it; the ZeRO and the pipeline engine implement it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch

if TYPE_CHECKING:
    from dsft.engine.partition import Snapshot  # imports deepspeed, which an export does not need

INITIAL_SCALE, LOWEST_SCALE, GROWTH_STEPS = 2.0**16, 1.0, 1000

StateKind = Literal["value", "exp_avg", "exp_avg_sq", "momentum_buffer"]
"""The fp32 value of a parameter, and the moments that optimizers have of it."""


@dataclass(frozen=True)
class Fragment:
    """A range of one trained parameter's flattened state that this rank owns, and no other rank does.

    name   the parameter's Hugging Face name, as in `model.state_dict()` of the transformers class
    start  index of the first element in the flattened parameter
    size   number of elements
    read   returns them, (size,) float32, on any device; a view where the engine has one
    """

    name: str
    kind: StateKind
    start: int
    size: int
    read: Callable[[], Tensor]

    @property
    def data(self) -> Tensor:
        return self.read()


ReadRange = Callable[[str, StateKind, int, int], Tensor]
"""(name, kind, start, stop) -> (stop - start,) float32 on the CPU; raises CheckpointError where absent."""


@dataclass(frozen=True)
class LossScale:
    """The fp16 loss scale: the factor of the loss before the backward pass, so that small gradients do not
    become 0.

    Halved by a step whose gradient overflowed, doubled after `GROWTH_STEPS` steps without one (Micikevicius
    et al. 2018). good_steps: steps without overflow since it last changed.
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


ScoreOutput = Callable[[Tensor, MicroBatch], Tensor]
"""What `Scorer.score` returns for a micro-batch, computed from the log-probabilities (B, T) of its
targets."""


def log_probabilities(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
    return logps


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step on this rank.

    sums        (n_terms,) float64 on the device, this rank's share, detached and not divided by any count;
                summed over all ranks of the world they are the step's
    grad_norm   2-norm of the averaged, unscaled gradient before clipping; may be a device scalar
    applied     False where that norm was not finite
    loss_scale  the step's loss scale, in fp16 alone
    figures     by name, further sums over ranks and steps for metrics, float64 on the device; the same names
                and shapes on all ranks, also where a stage has nothing to add. `Recorder.figures` makes
                metrics of each. "experts": `Routing.pop` of a mixture of experts
    """

    sums: Tensor
    grad_norm: float | Tensor
    applied: bool
    loss_scale: LossScale | None = None
    figures: Mapping[str, Tensor] = field(default_factory=dict)


class Scorer(Protocol):
    """The scoring half of an engine, for the policy or for a frozen model."""

    def score(
        self,
        micro_batches: Sequence[MicroBatch],
        output: ScoreOutput = log_probabilities,
        *,
        training: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return `output` of each micro-batch, on the device: by default its targets' log-probabilities (B,
        T) float32.

        Computes no gradients, and no dropout unless `training`. Empty where this rank does not have the last
        stage. A collective: every rank passes the same number of micro-batches.
        """
        ...


class Engine(Scorer, Protocol):
    def step(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
    ) -> StepResult:
        """Run forward, backward and one optimizer step. Every rank passes the same number of
        micro-batches."""
        ...

    def first_step(
        self,
        micro_batches: Sequence[MicroBatch],
        counts: Mapping[str, int],
        learning_rate: float,
        applied_steps: int = 0,
    ) -> StepResult:
        """Run `step` after `applied_steps` others; if it is applied, check that gradients have reached the
        optimizer and that it has changed the weights, as in `dsft.engine.first_step`. Raises WorldError on
        all ranks where they have not."""
        ...

    def probe(self, micro_batch: MicroBatch) -> None:
        """Run one whole step on this micro-batch with learning rate and gradient 0, which allocates all that
        a step allocates, optimizer states included, then leave the engine as it was. Must be called before
        `load`. A collective: the micro-batch has the same shape on every rank."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return this rank's sums (n_terms,) float64, without gradients; zeros where it has no last stage."""
        ...

    def snapshot(self, parameters: Iterable[nn.Parameter]) -> Snapshot:
        """Return a snapshot of these parameters of the policy, to score with it later."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the full shape of every parameter that this rank's stage trains, by Hugging Face name."""
        ...

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yield the state that this rank owns; over all ranks each element occurs exactly once."""
        ...

    def gradient_squares(self) -> AbstractContextManager[Mapping[str, float]]:
        """Return a context that gives, after an applied step in it, the sum of the squares of each
        parameter's clipped gradient, over the elements that this rank owns; empty if none was applied."""
        ...

    def replicated(self) -> Mapping[str, Tensor]:
        """Return the tensors that this rank has whole, by name, for the comparison in
        `dsft.engine.replicas`."""
        ...

    def set_loss_scale(self, loss_scale: LossScale) -> None:
        """Set the loss scale of the next step (fp16)."""
        ...

    def load(self, read: ReadRange, applied_steps: int) -> None:
        """Read values and moments of what this rank stores, and set the optimizer's step count."""
        ...
