"""Step one pipeline stage of a policy through DeepSpeed's schedule, with ZeRO 0 or 1."""

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
from dsft.dist.world import World
from dsft.engine.api import ScoreOutput, StepResult, log_probabilities
from dsft.engine.initialize import TrainingEngine
from dsft.model.policy import Policy, PolicyOutput
from dsft.objective.api import Objective
from dsft.spec.schema import Spec


class PipelineEngine(TrainingEngine):
    def __init__(
        self, policy: Policy, spec: Spec, config: Mapping[str, Any], world: World, objective: Objective
    ) -> None:
        super().__init__(policy, world, objective)
        self._scales, self._total = self._zeros(), self._zeros()
        self._record: Callable[[Tensor, MicroBatch], None] | None = None  # set only while scoring
        self._stage = _Stage(policy)
        module = _pipeline(self._stage, world, self._loss)
        ties = find_ties(self._trained, world)  # after it, since a PipelineModule removes the marks
        self._initialize(module, spec, config)
        tie(self._engine, ties, world.shard_rank)

    def step(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
    ) -> StepResult:
        """Run forward and backward on each of the micro-batches, then one optimizer step."""
        number, shards = len(micro_batches), self._shards
        self._engine.set_train_batch_size(number * self._engine.train_micro_batch_size_per_gpu() * shards)
        self._scales, self._total = self._begin(counts, learning_rate, number)
        with self._routed(micro_batches, counts):
            self._engine.train_batch(self._feed(micro_batches))
        return self._result(self._total)

    def probe(self, micro_batch: MicroBatch) -> None:
        """Probe with as many micro-batches as the first stage has in flight at once, or with those of a
        step if these are fewer."""
        size = self._engine.train_batch_size()
        number = min(self._world.layout.pipeline_stages, self._engine.gradient_accumulation_steps())
        self._probe(micro_batch, number)
        self._engine.set_train_batch_size(size)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._total = self._zeros()
        self._evaluate(micro_batches)
        return self._split.reported(self._total)

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
        self,
        micro_batches: Sequence[MicroBatch],
        output: ScoreOutput = log_probabilities,
        *,
        training: bool = False,
    ) -> tuple[Tensor, ...]:
        scored: list[Tensor] = []
        self._record = lambda logps, micro_batch: scored.append(output(logps, micro_batch))
        try:
            self._evaluate(micro_batches, training)
        finally:
            self._record = None
        return tuple(scored)

    def _loss(self, scored: PolicyOutput, micro_batch: MicroBatch) -> Tensor:
        """Return a micro-batch's loss; DeepSpeed calls this on the last stage. Add up its sums here, since
        DeepSpeed would round them to float32."""
        logps = self._split.whole(scored.logps, micro_batch)
        if self._record is not None:
            self._record(logps.detach(), micro_batch)
            return logps.new_zeros(())
        sums = torch.stack(self._objective.sums(logps, micro_batch))
        self._total += sums.detach()
        return sums.dot(self._scales)

    def _feed(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, MicroBatch]]:
        """Return what DeepSpeed reads on the first and on the last stage: tokens, and as label the
        micro-batch, which it passes through. Each stage reads micro-batches from its own iterator, so only
        hidden states are sent."""
        here = [micro_batch.to(self._world.device) for micro_batch in micro_batches]
        parts = [self._split.part(micro_batch) for micro_batch in here]
        self._stage.micro_batches = iter(parts)
        return ((part.tokens.input_ids, whole) for part, whole in zip(parts, here, strict=True))


class _Stage(nn.Module):
    """A policy behind the one argument that DeepSpeed passes to a layer. Every schedule sends the
    micro-batches of a step through a stage in order, so each forward pass takes the next one."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.as_in_training = False  # with dropout, though DeepSpeed evaluates
        self.micro_batches: Iterator[MicroBatch] = iter(())

    def forward(self, inputs: Tensor) -> Tensor | PolicyOutput:
        """Return (B, T, hidden), or what the policy returns on the last stage. inputs: (B, T) tokens on the
        first stage, else (B, T, hidden)."""
        if self.as_in_training:
            self.policy.train()
        batch = next(self.micro_batches)
        output: Tensor | PolicyOutput = self.policy(inputs, batch.tokens, batch.segments, batch.num_targets)
        return output


def _pipeline(own: _Stage, world: World, loss: Any) -> nn.Module:
    """Build DeepSpeed's module with one layer per stage: this rank's own, and `nn.Identity` for the
    others."""
    stages = world.layout.pipeline_stages
    layers = [own if stage == world.stage else nn.Identity() for stage in range(stages)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the topology and the seed at any log level
        module: nn.Module = PipelineModule(
            layers, num_stages=stages, loss_fn=loss, partition_method="uniform", dynamic_shape=True
        )
    return module


# --- tied parameters --------------------------------------------------------------------------------------
#
# An embedding tied to the head is on the first stage and on the last. Each copy has its own moments and
# takes the same step, since each gets the same gradient to the last bit. The norm, the checkpoint and the
# export count the first stage's copy alone (`state.is_copy`).

Ties = list[tuple[nn.Parameter, dist.ProcessGroup]]
"""This stage's tied parameters, each with the process group of all ranks that have it: all ranks of those
stages."""


def find_ties(trained: Mapping[str, nn.Parameter], world: World) -> Ties:
    """Find the parameters that several stages train, by name, and mark all copies but the first stage's. A
    collective."""
    shards, found = world.layout.shards, []
    gathered = world.gather(list(trained))
    for name in dict.fromkeys(name for names in gathered for name in names):
        ranks = [rank for rank, names in enumerate(gathered) if name in names]
        if len(ranks) > shards:
            group = dist.new_group(ranks)  # a collective of all ranks
            if world.rank in ranks:
                found.append((trained[name], group))
                trained[name].ds_pipe_replicated = world.rank >= ranks[shards]  # type: ignore[attr-defined]
    return found


def tie(engine: Any, ties: Ties, shard_rank: int) -> None:
    """Make DeepSpeed's PipelineEngine add up the gradients of all copies where it asks for its own tied
    layers (pipe/engine.py:281 get_tied_weights_and_groups): after the last backward, before any reduction
    over the ranks of a stage."""

    def add_up() -> list[Any]:
        for parameter, group in ties:
            _add_up(_gradient(engine.optimizer, parameter), group, shard_rank)
        return []  # nothing is left for DeepSpeed to do

    engine.module.get_tied_weights_and_groups = add_up


def _gradient(optimizer: Any, parameter: Any) -> Tensor:
    """Return the tensor in which the gradients of the micro-batches are accumulated. DeepSpeed uses `.grad`
    alone, which is empty where ZeRO 1 accumulates in another type (stage_1_and_2.py:1247
    get_gradient_for_reduction): copies would drift apart without notice."""
    if isinstance(optimizer, BF16_Optimizer):
        return parameter._hp_grad
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return optimizer.get_gradient_for_reduction(parameter)
    return parameter.grad


def _add_up(gradient: Tensor, group: dist.ProcessGroup, shard_rank: int) -> None:
    """Add up over stages and their ranks at once, in float32. The first rank of each stage gets the sum, the
    others zeros, so that the stage's own reduction, which adds each element in an order that depends on its
    place, changes no bit of it."""
    total = gradient.float()
    dist.all_reduce(total, group=group)
    gradient.copy_(total if shard_rank == 0 else total.zero_())
