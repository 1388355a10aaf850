"""Fill `answers.reference` of micro-batches, in one of three ways: look the values up in a store, score with
the reference's own engine, or score with the policy's engine while its adapter is off or reset to its
start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsft.data.steps.batch import Annotate, Answers, LazyMicroBatches, MicroBatch
from dsft.engine.api import Engine
from dsft.engine.frozen import FrozenEngine
from dsft.model.names import is_adapter
from dsft.model.policy import Policy
from dsft.model.stacked import StackedExperts
from dsft.objective.answers import answer_logps
from dsft.reference.store import Values
from dsft.reference.target_rows import TargetRows
from dsft.reference.teacher import look_up_rows
from dsft.spec.schema import Spec


def with_reference(
    micro_batches: Sequence[MicroBatch], logps: Callable[[int, Answers], Tensor]
) -> LazyMicroBatches:
    """Return micro-batches of answers, each filled on access. logps: number and answers of a micro-batch ->
    (n, k) float64."""

    def build(number: int) -> MicroBatch:
        batch = micro_batches[number]
        assert batch.answers is not None, "only answers have a reference"
        return replace(batch, answers=replace(batch.answers, reference=logps(number, batch.answers)))

    return LazyMicroBatches(len(micro_batches), build)


def with_scores(micro_batches: Sequence[MicroBatch], scored: Sequence[Tensor]) -> Sequence[MicroBatch]:
    """Fill in scores. scored: (n, k) float64 per micro-batch; empty where this rank does not have the last
    stage, and the micro-batches stay as they are."""
    return with_reference(micro_batches, lambda which, _: scored[which]) if scored else micro_batches


def look_up(logps: Values) -> Annotate:
    """Return a function that reads `logps`, (n, k) of all examples of one dataset, or a teacher's: on the
    host, in any thread, when a micro-batch is accessed."""
    if isinstance(logps, TargetRows):
        return look_up_rows(logps)
    table = torch.from_numpy(logps)
    return lambda micro_batches: with_reference(micro_batches, lambda _, answers: table[answers.ids])


def refer_to_engine(engine: FrozenEngine) -> Annotate:
    """Use a second engine beside the policy's as reference. All micro-batches of a call are scored right
    away, without gradients and dropout. A collective."""

    def refer(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return with_scores(micro_batches, engine.score(micro_batches, answer_logps))

    return refer


def refer_to_start(policy: Policy, engine: Engine, spec: Spec) -> Annotate:
    """Use the policy's engine as reference. A new adapter is switched off. An adapter that training continues
    (model.lora.path) is scored with a frozen copy of its values, and so is what is trained beside an adapter
    (model.lora.modules_to_save).

    Under ZeRO 3 a new adapter is copied too: its product is 0, and DeepSpeed, which prefetches the modules
    that the last pass used next, then sees the same modules in every pass. Raises as `Snapshot` does.
    """
    lora = spec.model.lora
    assert lora is not None, "validated"
    by_copy = lora.path is not None or spec.parallel.zero_stage == 3
    trained = policy.named_trained().items()
    at_start = engine.snapshot([p for name, p in trained if by_copy or not is_adapter(name)])

    def refer(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        with nullcontext() if by_copy else adapter_off(policy), at_start.in_place():
            sums = engine.score(micro_batches, answer_logps)
        return with_scores(micro_batches, sums)

    return refer


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Disable every adapter under `module` in the block. peft's own switch is not used, since it would also
    change which parameters require a gradient."""
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [m for m in module.modules() if isinstance(m, (LoraLayer, StackedExperts))]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
