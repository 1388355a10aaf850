"""Proofs on real rows, before the first step: takes an engine with the run's weights, stops a run that would
learn something else than it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.batch import NO_TARGET
from dsft.data.steps.lay import collate, lay
from dsft.engine.api import Scorer
from dsft.engine.world import World
from dsft.errors import Problem, SpecError
from dsft.model.attention import own_attention
from dsft.model.policy import Policy

Precision = Literal["fp32", "bf16", "fp16"]

# The same kernels run on the same shapes, so a neighbour's tokens change nothing but by a border crossed.
NEIGHBOUR = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}  # nats, of any one token
# Alone a row is computed by other kernels: what their rounding of one token's loss may come to. The mean of n
# tokens is nearer, by the root of n, down to a tenth.
ALONE = {"fp32": 1e-3, "bf16": 0.3, "fp16": 0.1}  # nats
# The head and the model round the same product; where the model scales it in its own type, some ulps more.
HEAD = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the log-probabilities' spread
ROUNDING = 1e-5  # nats
SHORT, LONG = 16, 1024  # tokens: the rows are the shortest of at least SHORT and one of at most LONG
WIDE = 256  # tokens of a row whose logits are made whole
LOOKED_AT = 1000  # examples


def prove_packing(
    engine: Scorer, policy: Policy, dataset: Dataset, world: World, precision: Precision, pad_id: int
) -> str:
    """A collective. Packs a few of the dataset's rows, then changes every second one: the others' losses must
    stay; and each must have the loss that it has alone, padded, under transformers' own attention.

    Gives a line that says so; raises SpecError on every rank where that does not hold.
    """
    rows = real_rows(dataset)
    together = engine.score([lay(rows, pad_id), lay(every_second_changed(rows), pad_id)])
    with own_attention(policy.causal_lm):
        alone = engine.score([collate([row], pad_id) for row in rows])
    world.each(lambda: _compare(together, alone, rows, precision))
    return "packing: tried on real rows, none sees another, and each has the loss that it has alone"


def prove_head(engine: Scorer, policy: Policy, dataset: Dataset, world: World, pad_id: int) -> str:
    """A collective. Scores two of the dataset's rows by the head and by the model's own logits. Where they
    differ, every rank takes the model's logits from then on. Gives a line that says which it is."""
    if any(world.gather(policy.full_logits)):
        policy.full_logits = policy.is_last
        return "head: the model's output layer is not a plain linear one; its logits are computed whole"
    rows = [Example(e.input_ids[:WIDE], e.trained[:WIDE], e.source) for e in real_rows(dataset)[:2]]
    batch = collate(rows, pad_id)
    is_target = (batch.targets != NO_TARGET).to(world.device)
    with own_attention(policy.causal_lm):
        found = engine.score([batch])
        policy.full_logits = policy.is_last
        own = engine.score([batch])
        policy.full_logits = False
    dtype = next(policy.parameters()).dtype
    compared = [_apart(a[is_target], b[is_target], dtype) for a, b in zip(found, own, strict=True)]
    apart, allowed = max((pair for rank in world.gather(compared) for pair in rank), key=_excess)
    if apart <= allowed:
        return f"head: tried on real rows, at most {apart:.1g} nats from the model's own logits"
    policy.full_logits = policy.is_last
    return (
        f"head: its log-probabilities are up to {apart:.2g} nats from those of the model's own logits "
        f"({allowed:.2g} is rounding), so the logits are computed whole from here on"
    )


def _apart(found: Tensor, own: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The largest difference, and what rounding explains. A wrong scale or soft-cap shows in how far the
    log-probabilities spread, however small the logits of a fresh model are."""
    spread = float(own.max() - own.min())
    return float((found - own).abs().max()), ROUNDING + HEAD[dtype] * spread


def _excess(pair: tuple[float, float]) -> float:
    apart, allowed = pair
    return apart - allowed if math.isfinite(apart) else math.inf


def real_rows(dataset: Dataset) -> list[Example]:
    """Three short rows and a long one between them, every token of them but the first a target."""
    pieces = [
        piece
        for example in islice(dataset, LOOKED_AT)
        for piece in np.split(example.input_ids, np.cumsum(example.segment_lengths)[:-1])
    ]
    pieces = [piece for piece in pieces if len(piece) > 1]
    by_length = sorted(pieces, key=len)
    short = [piece for piece in by_length if len(piece) >= SHORT][:3] or by_length[-3:]
    chosen = [*short[:1], by_length[-1][:LONG], *short[1:]]
    return [Example(ids, np.arange(len(ids)) > 0, "proof") for ids in chosen]


def every_second_changed(rows: Sequence[Example]) -> list[Example]:
    """The first, third, … row with every token replaced by another one of these rows."""
    known = np.unique(np.concatenate([row.input_ids for row in rows]))
    return [
        Example(known[(np.searchsorted(known, row.input_ids) + 1) % len(known)], row.trained, row.source)
        if number % 2 == 0
        else row
        for number, row in enumerate(rows)
    ]


def _compare(
    together: Sequence[Tensor], alone: Sequence[Tensor], rows: Sequence[Example], precision: Precision
) -> None:
    """Local; nothing to compare on a rank without the last stage."""
    if not together:
        return
    lengths = [len(row.input_ids) for row in rows]
    before, after = (logps[0].split(lengths) for logps in together)
    for kept, again in list(zip(before, after, strict=True))[1::2]:
        changed = float((kept - again).abs().max())
        if not changed <= NEIGHBOUR[precision]:
            raise _error(f"a packed row's neighbour changes its loss (a token's by {changed:.2g} nats)")
    for packed, own in zip(before, alone, strict=True):
        tokens = len(packed) - 1
        apart = float((packed - own[0]).double().sum().abs()) / tokens
        if not apart <= ALONE[precision] * max(tokens**-0.5, 0.1):
            raise _error(f"a row's loss is {apart:.2g} nats per token from what it is when alone")


def _error(found: str) -> SpecError:
    message = f"{found}: this model's packed rows would learn from each other; set it to false"
    return SpecError(
        "Packing was tried on rows of data.train and is not exact.", [Problem("data.packing", message)]
    )
