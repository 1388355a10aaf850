"""Prove on real rows, before the first step, that packing, the head and the kernels are exact, and stop a run
that would train something else than its spec says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.batch import NO_TARGET
from dsft.data.steps.collate import collate_packed, collate_padded
from dsft.engine.api import Scorer
from dsft.engine.world import World
from dsft.errors import Problem, SpecError
from dsft.model.attention import own_attention
from dsft.model.attention_choice import PACKAGE, VARLEN
from dsft.model.kernels import fused_modules, plain_kernels
from dsft.model.policy import Policy
from dsft.spec.schema import Spec

Precision = Literal["fp32", "bf16", "fp16"]

# The same kernels run on the same shapes, so a neighbor's tokens change nothing unless a border is crossed.
NEIGHBOR = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}  # nats, of any one token
# Alone a row is computed by other kernels: this is how far their rounding may move one token's loss. The
# mean of n tokens differs less, by the square root of n, down to a tenth.
ALONE = {"fp32": 1e-3, "bf16": 0.3, "fp16": 0.1}  # nats
# The head and the model round the same product; where the model scales it in its own type, some ulps more.
HEAD = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the log-probabilities' spread
# Other kernels in each layer round differently; a wrong norm or rotation moves a token by half of the spread.
KERNELS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
ROUNDING = 1e-5  # nats
SHORT, LONG = 16, 1024  # tokens: the rows are the shortest of at least SHORT and one of at most LONG
WIDE = 256  # tokens of a row whose logits are computed whole
EXAMPLES_SEARCHED = 1000  # examples from which the rows are chosen


def check_rows(
    engine: Scorer, policy: Policy, spec: Spec, dataset: Dataset, world: World, pad_id: int
) -> Iterator[str]:
    """Run the checks below that the spec needs, and yield a line for each. A collective."""
    yield check_head(engine, policy, dataset, world, pad_id)
    if spec.model.kernels != "torch":
        yield check_kernels(engine, policy, dataset, world, pad_id)
    if spec.data.packing:
        yield check_packing(engine, policy, dataset, world, spec.train.precision, pad_id)


def check_packing(
    engine: Scorer, policy: Policy, dataset: Dataset, world: World, precision: Precision, pad_id: int
) -> str:
    """Check that packing is exact, on a few of the dataset's rows. A collective.

    The packed rows are scored, then again with every second row changed: the losses of the others must stay.
    Each must also have the loss that it has alone, padded, under transformers' own attention. The same is
    checked for the answers of preference pairs that share their prompt, where the dataset has such.

    Returns a line for the log; raises SpecError on every rank where a check fails.
    """
    rows, pairs = real_rows(dataset), shared_pairs(dataset)
    together = engine.score(
        [collate_packed(rows, pad_id), collate_packed(every_second_changed(rows), pad_id)]
    )
    laid = [pairs, *(answers_changed(pairs, answer) for answer in range(2))] if pairs else []
    shared = engine.score([collate_packed(examples, pad_id) for examples in laid])
    answers = [row for pair in pairs for row in whole_rows(pair)]
    with own_attention(policy.causal_lm):
        alone = engine.score([collate_padded([row], pad_id) for row in (*rows, *answers)])
    one_call = policy.causal_lm.config._attn_implementation in (VARLEN, PACKAGE)
    way_out = "set it to false, or model.attention to sdpa" if one_call else "set it to false"
    world.each(lambda: _compare(together, alone[: len(rows)], rows, precision, way_out))
    world.each(lambda: _compare_answers(shared, alone[len(rows) :], pairs, precision, way_out))
    said = "packing: tried on real rows, none sees another, and each has the loss that it has alone"
    return f"{said}; so have the answers of real pairs that share their prompt" if pairs else said


def check_head(engine: Scorer, policy: Policy, dataset: Dataset, world: World, pad_id: int) -> str:
    """Score two of the dataset's rows by the head and by the model's own logits. A collective. Where they
    differ, every rank computes the model's logits from then on. Returns a line that says which it is, and on
    a GPU what computes the head's softmax, whose gradients were compared when it was chosen."""
    if any(world.gather(policy.full_logits)):
        policy.full_logits = policy.is_last
        return "head: the model's output layer is not a plain linear one; its logits are computed whole"
    rows = [Example(e.input_ids[:WIDE], e.trained[:WIDE], e.source) for e in real_rows(dataset)[:2]]
    batch = collate_padded(rows, pad_id)
    is_target = (batch.targets != NO_TARGET).to(world.device)
    with own_attention(policy.causal_lm):
        found = engine.score([batch])
        policy.full_logits = policy.is_last
        own = engine.score([batch])
        policy.full_logits = False
    dtype = next(policy.parameters()).dtype
    compared = [_apart(a[is_target], b[is_target], HEAD[dtype]) for a, b in zip(found, own, strict=True)]
    apart, allowed = max((pair for rank in world.gather(compared) for pair in rank), key=_excess)
    if apart <= allowed:
        said = sorted(set(world.gather(policy.softmax_description(world.device))) - {""})
        tried = f"head: tried on real rows, at most {apart:.1g} nats from the model's own logits"
        return "; ".join([tried, *said])
    policy.full_logits = policy.is_last
    return (
        f"head: its log-probabilities are up to {apart:.2g} nats from those of the model's own logits "
        f"({allowed:.2g} is rounding), so the logits are computed whole from here on"
    )


def check_kernels(engine: Scorer, policy: Policy, dataset: Dataset, world: World, pad_id: int) -> str:
    """Score a few of the dataset's rows with the fused kernels and with the model's own modules. A
    collective. Returns a line for the log; raises SpecError on every rank where a token's loss differs by
    more than rounding."""
    batches = [collate_padded([row], pad_id) for row in real_rows(dataset)]
    are_targets = [(batch.targets != NO_TARGET).to(world.device) for batch in batches]
    with own_attention(policy.causal_lm):
        found = engine.score(batches)
        with plain_kernels(policy.causal_lm):
            own = engine.score(batches)
    dtype = next(policy.parameters()).dtype
    compared = [
        _apart(one[is_target], other[is_target], KERNELS[dtype])
        for one, other, is_target in zip(found, own, are_targets, strict=bool(found))
    ]
    apart, allowed = max((pair for rank in world.gather(compared) for pair in rank), key=_excess)
    if _excess((apart, allowed)) > 0:
        message = (
            f"a token's loss is {apart:.2g} nats from that of the model's own modules ({allowed:.2g} is "
            "rounding); set it to torch"
        )
        raise SpecError(
            "The kernels were tried on rows of data.train and are not exact.",
            [Problem("model.kernels", message)],
        )
    return (
        f"kernels: liger ({fused_modules(policy.causal_lm)}): tried on real rows, at most {apart:.1g} nats "
        "from the model's own modules"
    )


def _apart(found: Tensor, own: Tensor, rounding: float) -> tuple[float, float]:
    """Return the largest difference, and what rounding explains: that is relative to the spread of the
    log-probabilities, so that a wrong scale or soft-cap shows however small the logits of a fresh model
    are."""
    spread = float(own.max() - own.min())
    return float((found - own).abs().max()), ROUNDING + rounding * spread


def _excess(pair: tuple[float, float]) -> float:
    apart, allowed = pair
    return apart - allowed if math.isfinite(apart) else math.inf


def real_rows(dataset: Dataset) -> list[Example]:
    """Return three short rows and a long one between them; every token but a row's first is a target."""
    pieces = [
        piece
        for example in islice(dataset, EXAMPLES_SEARCHED)
        for piece in np.split(example.input_ids, np.cumsum(example.segment_lengths)[:-1])
    ]
    pieces = [piece for piece in pieces if len(piece) > 1]
    by_length = sorted(pieces, key=len)
    short = [piece for piece in by_length if len(piece) >= SHORT][:3] or by_length[-3:]
    chosen = [*short[:1], by_length[-1][:LONG], *short[1:]]
    return [Example(ids, np.arange(len(ids)) > 0, "proof") for ids in chosen]


def every_second_changed(rows: Sequence[Example]) -> list[Example]:
    """Return the rows, with every token of the first, third, … row replaced by another token of these
    rows."""
    known = np.unique(np.concatenate([row.input_ids for row in rows]))
    return [
        Example(known[(np.searchsorted(known, row.input_ids) + 1) % len(known)], row.trained, row.source)
        if number % 2 == 0
        else row
        for number, row in enumerate(rows)
    ]


def shared_pairs(dataset: Dataset) -> list[Example]:
    """Return preference pairs that share their prompt: one of at most LONG tokens between the two shortest;
    empty where the dataset has none."""
    looked_at = [example for example in islice(dataset, EXAMPLES_SEARCHED) if any(example.starts or ())]
    by_length = sorted(looked_at, key=lambda example: len(example.input_ids))
    longer = [example for example in by_length[2:] if len(example.input_ids) <= LONG]
    return [*by_length[:1], *longer[-1:], *by_length[1:2]]


def _borders(pair: Example) -> tuple[int, int]:
    """Return, for a pair that shares its prompt, the number of the prompt's tokens, and where the rejected
    answer's segment begins, which repeats the prompt's last token."""
    return pair.segment_starts[1] + 1, pair.segment_lengths[0]


def whole_rows(pair: Example) -> tuple[Example, Example]:
    """Return the chosen and the rejected answer as rows of their own, each after the whole prompt."""
    border, start = pair.segment_lengths[0], (pair.starts or (0, 0))[1]
    at = np.arange(len(pair.input_ids))
    chosen, rejected = at[:border], np.concatenate((at[:start], at[border:]))
    return (
        Example(pair.input_ids[chosen], pair.trained[chosen], pair.source),
        Example(pair.input_ids[rejected], pair.trained[rejected], pair.source),
    )


def answers_changed(pairs: Sequence[Example], answer: int) -> list[Example]:
    """Return the pairs, with every token of the chosen (0) or rejected (1) answer replaced by another token
    of these pairs."""
    known = np.unique(np.concatenate([pair.input_ids for pair in pairs]))
    changed = []
    for pair in pairs:
        prompt, border = _borders(pair)
        ids, tokens = pair.input_ids.copy(), slice(border + 1, None) if answer else slice(prompt, border)
        ids[tokens] = known[(np.searchsorted(known, ids[tokens]) + 1) % len(known)]
        changed.append(replace(pair, input_ids=ids))
    return changed


def _compare_answers(
    shared: Sequence[Tensor],
    alone: Sequence[Tensor],
    pairs: Sequence[Example],
    precision: Precision,
    way_out: str,
) -> None:
    """Raise SpecError where an answer's loss changes with the other answer, or differs from the loss that the
    answer has alone. Local; nothing to compare on a rank without the last stage. shared: log-probabilities of
    the pairs as they are, with changed chosen answers, and with changed rejected ones."""
    if not shared:
        return
    lengths = [length for pair in pairs for length in pair.segment_lengths]
    before, *changed = (logps[0].split(lengths) for logps in shared)
    for answer, after in enumerate(changed):
        for kept, again in list(zip(before, after, strict=True))[1 - answer :: 2]:
            apart = float((kept - again).abs().max())
            if not apart <= NEIGHBOR[precision]:
                said = f"the other answer changes its loss (a token's by {apart:.2g} nats)"
                raise _shared_error(said, way_out)
    targets = [row.target_count for pair in pairs for row in whole_rows(pair)]
    for together, own, tokens in zip(before, alone, targets, strict=True):
        apart = _apart_per_token(together, own[0], tokens)
        if not apart <= _rounding(tokens, precision):
            said = f"its loss is {apart:.2g} nats per token from what it is when alone"
            raise _shared_error(said, way_out)


def _shared_error(found: str, way_out: str) -> SpecError:
    message = f"of an answer that shares its prompt {found}: {way_out}"
    return SpecError(
        "Sharing the prompt of two answers was tried on rows of data.train and is not exact.",
        [Problem("dpo.share_prompts", message)],
    )


def _compare(
    together: Sequence[Tensor],
    alone: Sequence[Tensor],
    rows: Sequence[Example],
    precision: Precision,
    way_out: str,
) -> None:
    """Raise SpecError where a row's loss changes with its neighbors, or differs from the loss that the row
    has alone. Local; nothing to compare on a rank without the last stage."""
    if not together:
        return
    lengths = [len(row.input_ids) for row in rows]
    before, after = (logps[0].split(lengths) for logps in together)
    for kept, again in list(zip(before, after, strict=True))[1::2]:
        changed = float((kept - again).abs().max())
        if not changed <= NEIGHBOR[precision]:
            said = f"a packed row's neighbour changes its loss (a token's by {changed:.2g} nats)"
            raise _error(said, way_out)
    for packed, own in zip(before, alone, strict=True):
        tokens = len(packed) - 1
        apart = _apart_per_token(packed, own[0], tokens)
        if not apart <= _rounding(tokens, precision):
            raise _error(f"a row's loss is {apart:.2g} nats per token from what it is when alone", way_out)


def _apart_per_token(found: Tensor, own: Tensor, tokens: int) -> float:
    return abs(float(found.double().sum() - own.double().sum())) / tokens


def _rounding(tokens: int, precision: Precision) -> float:
    """Return how far the rounding of other kernels may move the mean loss of `tokens` tokens, in nats."""
    return ALONE[precision] * max(tokens**-0.5, 0.1)


def _error(found: str, way_out: str) -> SpecError:
    message = f"{found}: this model's packed rows would learn from each other; {way_out}"
    return SpecError(
        "Packing was tried on rows of data.train and is not exact.", [Problem("data.packing", message)]
    )
