"""The ZeRO engine, stages 0 to 3: takes a policy, steps it through DeepSpeed. One rank holds all layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.copies import to_device
from dsft.engine import state
from dsft.engine.api import Fragment, Kept, LossScale, ReadRange, StepResult, log_probabilities
from dsft.engine.partition import full_shape, place_buffers
from dsft.engine.rehearsal import rehearse
from dsft.engine.remembered import Remembered
from dsft.engine.replicas import replicated
from dsft.engine.start import start
from dsft.engine.world import World
from dsft.model.policy import Policy, behind_inputs
from dsft.objective.api import Objective
from dsft.spec.schema import Spec


class ZeroEngine:
    def __init__(
        self, policy: Policy, spec: Spec, config: Mapping[str, Any], world: World, objective: Objective
    ) -> None:
        self._world = world
        self._objective = objective
        self._causal_lm, self._trained = policy.causal_lm, policy.named_trained()
        self._shapes = {name: full_shape(p) for name, p in self._trained.items()}
        place_buffers(policy, world.device)
        self._started = start(policy, self._trained, spec, config)
        self._engine = self._started.engine

    def step(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
    ) -> StepResult:
        """Forward, backward and one optimizer step, in as many micro-batches as there are."""
        self._started.set_learning_rate(learning_rate)
        self._engine.train()
        total = self._zeros()
        # DeepSpeed takes the mean over the ranks; here alone it is undone.
        scales = torch.tensor(self._objective.scales(counts), dtype=torch.float64)
        scales = to_device(scales * self._world.layout.shards, self._world.device)
        for number, micro_batch in enumerate(micro_batches, start=1):
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            sums = self._sums(micro_batch)
            self._engine.backward(sums.dot(scales), scale_wrt_gas=False)
            total += sums.detach()
        self._engine.step()
        return StepResult(total, *self._started.outcome())

    def rehearse(self, micro_batch: MicroBatch) -> None:
        """Twice in one step, where steps have several micro-batches: the second meets the gradient that the
        first has left, as all but the first do."""
        number = min(2, self._engine.gradient_accumulation_steps())
        nothing = {term.count: 0 for term in self._objective.terms}  # so every scale is 0
        rehearse(self._engine, lambda: self.step([micro_batch] * number, nothing, 0.0), self._world.device)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._engine.eval()
        total = self._zeros()
        for micro_batch in micro_batches:
            total += self._sums(micro_batch)
        return total

    @torch.no_grad()
    def score(
        self, micro_batches: Sequence[MicroBatch], kept: Kept = log_probabilities, *, training: bool = False
    ) -> tuple[Tensor, ...]:
        self._engine.train(training)
        batches = (micro_batch.to(self._world.device) for micro_batch in micro_batches)
        return tuple(kept(self._logps(batch), batch) for batch in batches)

    def remember(self, parameters: Iterable[nn.Parameter]) -> Remembered:
        return Remembered(self._engine, parameters)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def owned(self) -> Iterator[Fragment]:
        layout = self._world.layout
        return state.owned(self._engine, self._trained, self._world.data_rank, layout.data_parallel)

    def replicated(self) -> Mapping[str, Tensor]:
        return replicated(self._causal_lm, state.masters(self._engine, self._trained))

    def set_loss_scale(self, loss_scale: LossScale) -> None:
        if self._started.scaler is not None:
            self._started.scaler.state = loss_scale

    def load(self, read: ReadRange, applied_steps: int) -> None:
        state.load(self._engine, self._trained, read, applied_steps)

    def _sums(self, micro_batch: MicroBatch) -> Tensor:
        """(n_terms,) float64, differentiable."""
        batch = micro_batch.to(self._world.device)
        return torch.stack(self._objective.sums(self._logps(batch), batch))

    def _logps(self, batch: MicroBatch) -> Tensor:
        logps: Tensor = self._engine(batch.input_ids, *behind_inputs(batch))
        return logps

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self._objective.terms), dtype=torch.float64, device=self._world.device)
