"""The pipeline engine: takes one stage of a policy, steps it through DeepSpeed's schedule. ZeRO 0 or 1."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.copies import to_device
from dsft.engine import state
from dsft.engine.api import Fragment, Kept, LossScale, ReadRange, StepResult, log_probabilities
from dsft.engine.partition import full_shape
from dsft.engine.rehearsal import rehearse
from dsft.engine.remembered import Remembered
from dsft.engine.replicas import replicated
from dsft.engine.start import start
from dsft.engine.ties import find_ties, tie
from dsft.engine.world import World
from dsft.model.policy import Policy, behind_inputs
from dsft.objective.api import Objective
from dsft.spec.schema import Spec


class PipelineEngine:
    def __init__(
        self, policy: Policy, spec: Spec, config: Mapping[str, Any], world: World, objective: Objective
    ) -> None:
        self._world = world
        self._objective = objective
        self._causal_lm, self._trained = policy.causal_lm, policy.named_trained()
        self._shapes = {name: full_shape(p) for name, p in self._trained.items()}
        self._scales, self._total = self._zeros(), self._zeros()
        self._keep: Callable[[Tensor, MicroBatch], None] | None = None  # while scoring alone
        self._stage = _Stage(policy)
        module = _pipeline(self._stage, world, self._loss)
        ties = find_ties(self._trained, world)  # after it: a PipelineModule takes every mark off
        self._started = start(module, self._trained, spec, config)
        self._engine = self._started.engine
        tie(self._engine, ties, world.shard_rank)

    def step(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
    ) -> StepResult:
        """Forward, backward and one optimizer step, in as many micro-batches as there are."""
        self._started.set_learning_rate(learning_rate)
        number, shards = len(micro_batches), self._world.layout.shards
        self._engine.set_train_batch_size(number * self._engine.train_micro_batch_size_per_gpu() * shards)
        self._total = self._zeros()
        # DeepSpeed takes the mean over micro-batches and the ranks of a stage; here alone it is undone.
        scales = torch.tensor(self._objective.scales(counts), dtype=torch.float64)
        self._scales = to_device(scales * (number * shards), self._world.device)
        self._engine.train_batch(self._feed(micro_batches))
        return StepResult(self._total, *self._started.outcome())

    def rehearse(self, micro_batch: MicroBatch) -> None:
        """As many micro-batches as the first stage holds at once, where steps have so many."""
        size = self._engine.train_batch_size()
        number = min(self._world.layout.pipeline_stages, self._engine.gradient_accumulation_steps())
        nothing = {term.count: 0 for term in self._objective.terms}  # so every scale is 0
        rehearse(self._engine, lambda: self.step([micro_batch] * number, nothing, 0.0), self._world.device)
        self._engine.set_train_batch_size(size)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._total = self._zeros()
        self._evaluate(micro_batches)
        return self._total

    @torch.no_grad()
    def _evaluate(self, micro_batches: Sequence[MicroBatch], training: bool = False) -> None:
        if not micro_batches:
            return
        self._stage.as_in_training = training
        try:
            self._engine.eval_batch(
                self._feed(micro_batches),
                num_micro_batches=len(micro_batches),
                reduce_output=None,
                bcast_loss=False,
            )
        finally:
            self._stage.as_in_training = False

    def score(
        self, micro_batches: Sequence[MicroBatch], kept: Kept = log_probabilities, *, training: bool = False
    ) -> tuple[Tensor, ...]:
        scored: list[Tensor] = []
        self._keep = lambda logps, micro_batch: scored.append(kept(logps, micro_batch))
        try:
            self._evaluate(micro_batches, training)
        finally:
            self._keep = None
        return tuple(scored)

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

    def _loss(self, logps: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Called on the last stage, per micro-batch; keeps the sums, which DeepSpeed would round to
        float32."""
        if self._keep is not None:
            self._keep(logps.detach(), micro_batch)
            return logps.new_zeros(())
        sums = torch.stack(self._objective.sums(logps, micro_batch))
        self._total += sums.detach()
        return sums.dot(self._scales)

    def _feed(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, MicroBatch]]:
        """What DeepSpeed draws from on the first stage and on the last: tokens, and a label of its own class,
        which it passes through. The stage itself draws from its own, so nothing but hidden states travels."""
        here = [micro_batch.to(self._world.device) for micro_batch in micro_batches]
        self._stage.micro_batches = iter(here)
        return ((micro_batch.input_ids, micro_batch) for micro_batch in here)

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self._objective.terms), dtype=torch.float64, device=self._world.device)


class _Stage(nn.Module):
    """A policy behind the one argument that DeepSpeed gives a layer. Every schedule takes the micro-batches
    of a step through a stage in their order, so each forward is of the next one."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.as_in_training = False  # with dropout, though DeepSpeed evaluates
        self.micro_batches: Iterator[MicroBatch] = iter(())

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: (B, T) tokens on the first stage, else (B, T, hidden), which all but the last give too."""
        if self.as_in_training:
            self.policy.train()
        batch = next(self.micro_batches)
        output: Tensor = self.policy(inputs, *behind_inputs(batch))
        return output


def _pipeline(own: _Stage, world: World, loss: Any) -> nn.Module:
    """One layer per stage, of which this rank has its own and nothing in the others' places."""
    stages = world.layout.pipeline_stages
    layers = [own if stage == world.stage else nn.Identity() for stage in range(stages)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the topology and the seed, past any log level
        module: nn.Module = PipelineModule(
            layers, num_stages=stages, loss_fn=loss, partition_method="uniform", dynamic_shape=True
        )
    return module
