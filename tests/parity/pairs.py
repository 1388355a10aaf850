"""Micro-batches of preference pairs and of rows with labels, by hand: takes the plain loop's; padded, packed
or shared.

The numbers of pairs count through the steps, the held-out ones after them, as in a dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch
from tests.make import make_micro_batch
from tests.parity import plain

Form = Literal["padded", "packed", "shared"]
Answered = tuple[plain.Row, ...]  # a pair, or a row alone
EMPTY = ([7, 7], [False, False])
PADDING = 7  # a token like others, to show that padding does not matter


def of_labels(step: plain.Step[plain.Row]) -> dict[str, int]:
    rows = plain.rows_of(step)
    desirable = sum(plain.label_of(row, 2) for row in rows)
    of_kto = {"desirable": desirable, "undesirable": len(rows) - desirable}
    return {"examples": len(rows), "sequences": len(rows), **of_kto}


def counts(step: plain.Step[plain.Pair]) -> dict[str, int]:
    pairs = plain.rows_of(step)
    chosen_tokens = plain.count(chosen for chosen, _ in pairs)
    return {"examples": len(pairs), "chosen_tokens": chosen_tokens, "sequences": 2 * len(pairs)}


def labeled(
    steps: Sequence[plain.Step[plain.Row]], data_rank: int, form: Form, labels: int, kl: float | None
) -> list[list[MicroBatch]]:
    """One rank's micro-batches of each step of rows with labels. kl: as in `Answers`; None: of a classifier,
    whose rows are scored."""
    pairs = [[[[(row,) for row in rank] for rank in ranks] for ranks in step] for step in steps]
    made = numbered(pairs, data_rank, form, scored=kl is None)
    for micro_batches, step in zip(made, pairs, strict=True):
        for number, (batch, ranks) in enumerate(zip(micro_batches, step, strict=True)):
            given = torch.tensor(
                [plain.label_of(row, labels) for (row,) in ranks[data_rank]], dtype=torch.long
            )
            assert batch.answers is not None
            answers = replace(
                batch.answers,
                num_targets=batch.answers.num_targets.view(-1, 1),
                values={"label": given},
                kl=None if kl is None else torch.tensor(kl, dtype=torch.float64),
            )
            micro_batches[number] = replace(batch, answers=answers)
    return made


def numbered(
    steps: Sequence[plain.Step[Any]], data_rank: int, form: Form, *, scored: bool = False
) -> list[list[MicroBatch]]:
    """One rank's micro-batches of each step. scored: the one target of an answer is its last token, at its
    own position."""
    first, made = 0, []
    for step in steps:
        micro_batches = []
        for ranks in step:
            before = sum(map(len, ranks[:data_rank]))
            micro_batches.append(micro_batch(ranks[data_rank], first + before, form, scored=scored))
            first += sum(map(len, ranks))
        made.append(micro_batches)
    return made


def micro_batch(pairs: Sequence[Answered], first: int, form: Form, *, scored: bool = False) -> MicroBatch:
    """`first`: the number of the first pair. No pair at all: a row of two tokens without a target."""
    segments = [segment for pair in pairs for segment in segments_of(pair, form)] or [(EMPTY, 0)]
    counts = [[1 if scored else plain.count([row]) for row in pair] for pair in pairs]
    margins = torch.tensor([plain.margin_of(pair) for pair in pairs], dtype=torch.float64)
    given_answers = Answers(
        torch.arange(first, first + len(pairs)),
        torch.tensor(counts).view(-1, len(pairs[0]) if pairs else 2),
        values={"margin": margins} if scored else {},
    )
    scored = scored and bool(pairs)
    if form == "padded":
        length = max(len(ids) for (ids, _), _ in segments)
        shape = (len(segments), length)
        ids, targets = torch.full(shape, PADDING), torch.full(shape, NO_TARGET)
        is_padding = torch.ones(shape, dtype=torch.bool)
        for number, (row, _) in enumerate(segments):
            ids[number, : len(row[0])], targets[number, : len(row[0])] = tensors(row, scored)
            is_padding[number, : len(row[0])] = not pairs
        positions = torch.arange(length).repeat(len(segments), 1)
        return make_micro_batch(ids, positions, targets, answers=given_answers, is_padding=is_padding)
    parts = zip(*(tensors(row, scored) for row, _ in segments), strict=True)
    ids, targets = (torch.cat(part)[None] for part in parts)
    starts = tuple(start for _, start in segments)
    lengths = tuple(len(ids) for (ids, _), _ in segments)
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    return make_micro_batch(
        ids,
        positions[None],
        targets,
        lengths,
        starts=starts if form == "shared" else None,
        answers=given_answers,
        is_padding=None if pairs else torch.ones_like(ids, dtype=torch.bool),
    )


def segments_of(pair: Answered, form: Form) -> Iterator[tuple[plain.Row, int]]:
    """Each with the position at which it begins. Shared: the rejected answer after the prompt's last one."""
    chosen, *others = pair
    yield chosen, 0
    for ids, trained in others:
        shared = trained.index(True) - 1 if form == "shared" else 0
        yield (ids[shared:], trained[shared:]), shared


def tensors(row: plain.Row, scored: bool) -> tuple[Tensor, Tensor]:
    ids, trained = row
    if scored:
        return torch.tensor(ids), torch.tensor([*[NO_TARGET] * (len(ids) - 1), ids[-1]])
    wanted = [i if is_target else NO_TARGET for i, is_target in zip(ids, trained, strict=True)]
    return torch.tensor(ids), torch.tensor([*wanted[1:], NO_TARGET])


def referred(reference: nn.Module, steps: Sequence[plain.Step[Any]], *, alone: bool = False) -> Tensor:
    """(pairs, 2) or, of rows alone, (rows, 1) float64, by the plain loop: what a store holds."""
    examples = [[pair] if alone else pair for step in steps for pair in plain.rows_of(step)]
    rows = [[plain.summed_logps(reference, row) for row in pair] for pair in examples]
    return torch.tensor(rows, dtype=torch.float64)
