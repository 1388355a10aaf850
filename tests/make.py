"""Make values of dsft for tests."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch, Segments, Tokens
from dsft.dist.world import World
from dsft.engine.api import Fragment, StateKind
from dsft.model.policy import Policy
from dsft.rank.environment import Launched
from dsft.setup.run import Run
from dsft.spec.layout import Layout, batch_on, layout_of
from dsft.spec.schema import Spec

Row = tuple[list[int], list[bool]]
"""Token ids, and which of them are trained on."""
ALONE = World(0, 1, 0, Layout(1, 1), torch.device("cpu"))
"""A world of one rank, without a process group."""


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


def padded(rows: Sequence[Row]) -> MicroBatch:
    """Return the rows padded with token 7, to show that padding does not matter. No row at all gives one of
    two tokens without a target."""
    length = max((len(ids) for ids, _ in rows), default=2)
    shape = (max(len(rows), 1), length)
    ids, targets = torch.full(shape, 7), torch.full(shape, NO_TARGET)
    is_padding = torch.ones(shape, dtype=torch.bool)
    for number, (row, trained) in enumerate(rows):
        is_padding[number, : len(row)] = False
        ids[number, : len(row)] = torch.tensor(row)
        wanted = [i if is_target else NO_TARGET for i, is_target in zip(row, trained, strict=True)]
        targets[number, : len(row) - 1] = torch.tensor(wanted[1:])
    return make_micro_batch(ids, torch.arange(length).repeat(shape[0], 1), targets, is_padding=is_padding)


def packed(rows: Sequence[Row]) -> MicroBatch:
    """Return the same rows, one after the other; no row at all gives the two tokens without a target."""
    each = [padded([row]).tokens for row in rows] or [padded([]).tokens]
    ids, positions, targets = (
        torch.cat([getattr(tokens, name) for tokens in each], 1)
        for name in ("input_ids", "position_ids", "targets")
    )
    lengths = tuple(tokens.input_ids.shape[1] for tokens in each)
    return make_micro_batch(ids, positions, targets, lengths, is_padding=None if rows else each[0].is_padding)


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


def fragment_of(name: str, kind: StateKind, start: int, data: Tensor) -> Fragment:
    """A fragment of a tensor (n,) that is in memory."""
    return Fragment(name, kind, start, len(data), lambda: data)
