"""Make values of dsft for tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsft.data.steps.batch import Answers, MicroBatch, Segments, Tokens
from dsft.model.policy import Policy
from dsft.rank.environment import Launched
from dsft.setup.run import Run
from dsft.spec.layout import batch_on, layout_of
from dsft.spec.schema import Spec


def make_micro_batch(  # noqa: PLR0913, PLR0917
    input_ids: Tensor,
    position_ids: Tensor,
    targets: Tensor,
    lengths: tuple[int, ...] | None = None,
    noise_scale: Tensor | None = None,
    starts: tuple[int, ...] | None = None,
    answers: Answers | None = None,
    is_padding: Tensor | None = None,
) -> MicroBatch:
    """Return a micro-batch, packed where `lengths` are given. Each tensor is (B, T)."""
    tokens = Tokens(input_ids, position_ids, targets, noise_scale, is_padding)
    return MicroBatch(tokens, None if lengths is None else Segments(lengths, starts), answers)


def forward(policy: Policy, batch: MicroBatch) -> Any:
    """Return what the policy, or a stage with the first layers, returns for a micro-batch."""
    return policy(batch.tokens.input_ids, batch.tokens, batch.segments, batch.num_targets)


def logps_of(policy: Policy, *fields: Any, **more: Any) -> Tensor:
    """Return the log-probabilities (B, T) that the policy computes for a micro-batch of these fields: see
    `make_micro_batch`."""
    logps: Tensor = forward(policy, make_micro_batch(*fields, **more)).logps
    return logps


def make_run(spec: Spec, world: Any, **fields: Any) -> Run:
    """Return a run of one rank, without a process group and a lock. world: anything with what is used of
    it."""
    layout = layout_of(spec.parallel, 1)
    given = {
        "spec": spec, "batch": batch_on(spec, layout), "layout": layout, "world": world, "lock": None,
        "launched": Launched("dsft", 0, 1, 0, "127.0.0.1", 1), "log": lambda text: None,
    }  # fmt: skip
    return Run(**{**given, **fields})
