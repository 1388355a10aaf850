"""The pipeline engine: takes one stage of a policy, steps it through DeepSpeed's schedule. ZeRO 0 or 1."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.copies import to_device
from dsft.engine.api import Kept, StepResult, log_probabilities
from dsft.engine.start import TrainingEngine
from dsft.engine.world import World
from dsft.model.policy import Policy, Scored, behind_inputs
from dsft.objective.api import Objective
from dsft.spec.schema import Spec


class PipelineEngine(TrainingEngine):
    def __init__(
        self, policy: Policy, spec: Spec, config: Mapping[str, Any], world: World, objective: Objective
    ) -> None:
        super().__init__(policy, world, objective)
        self._scales, self._total = self._zeros(), self._zeros()
        self._keep: Callable[[Tensor, MicroBatch], None] | None = None  # while scoring alone
        self._stage = _Stage(policy)
        module = _pipeline(self._stage, world, self._loss)
        ties = find_ties(self._trained, world)  # after it: a PipelineModule takes every mark off
        self._start(module, spec, config)
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
        self._rehearse(micro_batch, number)
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

    def _loss(self, scored: Scored, micro_batch: MicroBatch) -> Tensor:
        """Called on the last stage, per micro-batch; keeps the sums, which DeepSpeed would round to
        float32."""
        if self._keep is not None:
            self._keep(scored.logps.detach(), micro_batch)
            return scored.logps.new_zeros(())
        sums = self._objective.term_sums(*scored, micro_batch)
        self._total += sums.detach()
        return sums.dot(self._scales)

    def _feed(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, MicroBatch]]:
        """What DeepSpeed draws from on the first stage and on the last: tokens, and a label of its own class,
        which it passes through. The stage itself draws from its own, so nothing but hidden states travels."""
        here = [micro_batch.to(self._world.device) for micro_batch in micro_batches]
        self._stage.micro_batches = iter(here)
        return ((micro_batch.input_ids, micro_batch) for micro_batch in here)


class _Stage(nn.Module):
    """A policy behind the one argument that DeepSpeed gives a layer. Every schedule takes the micro-batches
    of a step through a stage in their order, so each forward is of the next one."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.as_in_training = False  # with dropout, though DeepSpeed evaluates
        self.micro_batches: Iterator[MicroBatch] = iter(())

    def forward(self, inputs: Tensor) -> Tensor | Scored:
        """inputs: (B, T) tokens on the first stage, else (B, T, hidden), which all but the last give too."""
        if self.as_in_training:
            self.policy.train()
        batch = next(self.micro_batches)
        output: Tensor | Scored = self.policy(inputs, *behind_inputs(batch))
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


# --- tied parameters --------------------------------------------------------------------------------------
#
# An embedding that the head shares is on the first stage and on the last. Each copy has its own moments and
# takes the same step, since each gets the same gradient to the last bit. The norm, the checkpoint and the
# export count the first stage's copy alone (`state.is_copy`).

Ties = list[tuple[nn.Parameter, dist.ProcessGroup]]
"""This stage's tied parameters, each with all ranks that hold it: of some stages, all ranks."""


def find_ties(trained: Mapping[str, nn.Parameter], world: World) -> Ties:
    """A collective. Whatever name two stages train is tied; copies but the first stage's are marked."""
    shards, found = world.layout.shards, []
    told = world.gather(list(trained))
    for name in dict.fromkeys(name for names in told for name in names):
        ranks = [rank for rank, names in enumerate(told) if name in names]
        if len(ranks) > shards:
            group = dist.new_group(ranks)  # of all ranks: a collective
            if world.rank in ranks:
                found.append((trained[name], group))
                trained[name].ds_pipe_replicated = world.rank >= ranks[shards]  # type: ignore[attr-defined]
    return found


def tie(engine: Any, ties: Ties, shard_rank: int) -> None:
    """Have a PipelineEngine add up the gradients of all copies where it asks for tied layers of its own
    (pipe/engine.py:281 get_tied_weights_and_groups): after the last backward, before any reduction over the
    ranks of a stage."""

    def add_up() -> list[Any]:
        for parameter, group in ties:
            _add_up(_gradient(engine.optimizer, parameter), group, shard_rank)
        return []  # which leaves nothing for DeepSpeed to do

    engine.module.get_tied_weights_and_groups = add_up


def _gradient(optimizer: Any, parameter: Any) -> Tensor:
    """Where micro-batches have been added up. DeepSpeed looks at `.grad` alone, and so at nothing where ZeRO
    1 adds them up in another type (stage_1_and_2.py:1247 get_gradient_for_reduction): copies would drift
    apart in silence."""
    if isinstance(optimizer, BF16_Optimizer):
        return parameter._hp_grad
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return optimizer.get_gradient_for_reduction(parameter)
    return parameter.grad


def _add_up(gradient: Tensor, group: dist.ProcessGroup, shard_rank: int) -> None:
    """Over stages and their ranks at once, in float32. The sum then stands on the first rank
    of each stage, and zeros on the others: so the stage's own reduction, which adds each element in an
    order that depends on its place, changes no bit of it."""
    total = gradient.float()
    dist.all_reduce(total, group=group)
    gradient.copy_(total if shard_rank == 0 else total.zero_())
