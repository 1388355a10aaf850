"""Step a policy through DeepSpeed with ZeRO stages 0 to 3. Every rank has all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsft.data.steps.batch import MicroBatch
from dsft.dist.world import World
from dsft.engine.api import ScoreOutput, StepResult, log_probabilities
from dsft.engine.initialize import TrainingEngine
from dsft.engine.partition import place_buffers
from dsft.model.policy import Policy, PolicyOutput
from dsft.objective.api import Objective
from dsft.spec.schema import Spec


class ZeroEngine(TrainingEngine):
    def __init__(
        self, policy: Policy, spec: Spec, config: Mapping[str, Any], world: World, objective: Objective
    ) -> None:
        super().__init__(policy, world, objective)
        place_buffers(policy, world.device)
        self._initialize(policy, spec, config)

    def step(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
    ) -> StepResult:
        """Run forward and backward on each of the micro-batches, then one optimizer step."""
        scales, total = self._begin(counts, learning_rate)
        with self._routed(micro_batches, counts):
            self._engine.train()
            for number, micro_batch in enumerate(micro_batches, start=1):
                self._engine.set_gradient_accumulation_boundary(number == len(micro_batches))
                sums = self._sums(micro_batch)
                self._engine.backward(sums.dot(scales), scale_wrt_gas=False)
                total += sums.detach()
        self._engine.step()
        return self._result(total)

    def probe(self, micro_batch: MicroBatch) -> None:
        """Probe with two copies in one step, where steps have several micro-batches: the second has the
        gradient of the first in memory, as all micro-batches but the first have."""
        self._probe(micro_batch, min(2, self._engine.gradient_accumulation_steps()))

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._engine.eval()
        total = self._zeros()
        for micro_batch in micro_batches:
            total += self._sums(micro_batch)
        return self._split.reported(total)

    @torch.no_grad()
    def score(
        self,
        micro_batches: Sequence[MicroBatch],
        output: ScoreOutput = log_probabilities,
        *,
        training: bool = False,
    ) -> tuple[Tensor, ...]:
        self._engine.train(training)
        batches = (micro_batch.to(self._world.device) for micro_batch in micro_batches)
        return tuple(output(self._scored(batch), batch) for batch in batches)

    def _sums(self, micro_batch: MicroBatch) -> Tensor:
        """Return (n_terms,) float64, differentiable."""
        batch = micro_batch.to(self._world.device)
        return torch.stack(self._objective.sums(self._scored(batch), batch))

    def _scored(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities (B, T) of the targets."""
        part = self._split.part(batch)
        scored: PolicyOutput = self._engine(
            part.tokens.input_ids, part.tokens, part.segments, part.num_targets
        )
        return self._split.whole(scored.logps, batch)
