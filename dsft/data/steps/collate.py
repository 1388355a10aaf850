"""Build the tensors of a micro-batch from its examples: one packed row, or padded rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dsft.data.sets.dataset import Example
from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch, Segments, Tokens


class AnswerIds(NamedTuple):
    """Which examples of the dataset a micro-batch has, how many answers each of them has, and the fields of
    their rows that the loss uses: (n,) each, as `Dataset.rows_of` gives them."""

    ids: NDArray[np.int64]
    per_example: int
    values: Mapping[str, NDArray[Any]] = {}


EMPTY_ROW_LENGTH = 2  # tokens of the row of a micro-batch without examples


def collate_packed(
    examples: Sequence[Example],
    pad_id: int,
    neftune_alpha: float | None = None,
    answers: AnswerIds | None = None,
) -> MicroBatch:
    """Return a packed micro-batch: one row of the examples' segments; without examples, a row of two tokens
    and no target.

    neftune_alpha  add the scale of the noise on embeddings, by the length of each segment
    answers        set if the segments of the examples are answers
    """
    if not examples:
        ids, targets = np.full(EMPTY_ROW_LENGTH, pad_id), np.full(EMPTY_ROW_LENGTH, NO_TARGET)
        lengths: tuple[int, ...] = (EMPTY_ROW_LENGTH,)
    else:
        ids = np.concatenate([example.input_ids for example in examples])
        targets = np.concatenate([targets_of(example) for example in examples])
        lengths = tuple(length for example in examples for length in example.segment_lengths)
    starts = tuple(start for example in examples for start in example.segment_starts)
    positions = np.concatenate(
        [start + np.arange(length) for start, length in zip(starts or (0,), lengths, strict=True)]
    )
    input_ids, position_ids, target_ids = (
        torch.from_numpy(row[None].astype(np.int64)) for row in (ids, positions, targets)
    )
    noise_scale = None if neftune_alpha is None else noise_scales(lengths, neftune_alpha)[None]
    is_padding = None if examples else torch.ones(1, EMPTY_ROW_LENGTH, dtype=torch.bool)
    return MicroBatch(
        Tokens(input_ids, position_ids, target_ids, noise_scale, is_padding),
        Segments(lengths, starts if any(starts) else None),
        answers and _answers(examples, answers),
    )


def collate_padded(
    examples: Sequence[Example],
    pad_id: int,
    neftune_alpha: float | None = None,
    answers: AnswerIds | None = None,
) -> MicroBatch:
    """Return a padded micro-batch: a row per example, or per answer, right-padded to the longest; without
    examples, one row without targets.

    neftune_alpha  add the scale of the noise on embeddings, by the length of each segment; 0 on padding
    answers        as in `collate_packed`
    """
    compared = answers and _answers(examples, answers)
    if compared is not None:
        examples = [segment for example in examples for segment in _segments(example)]
    rows = max(1, len(examples))
    length = max((len(example.input_ids) for example in examples), default=EMPTY_ROW_LENGTH)
    input_ids = np.full((rows, length), pad_id, dtype=np.int64)
    targets = np.full((rows, length), NO_TARGET, dtype=np.int64)
    is_padding = torch.ones(rows, length, dtype=torch.bool)
    noise_scale = None if neftune_alpha is None else torch.zeros(rows, length)
    for row, example in enumerate(examples):
        n = len(example.input_ids)
        input_ids[row, :n] = example.input_ids
        is_padding[row, :n] = False
        targets[row, :n] = targets_of(example)
        if noise_scale is not None and neftune_alpha is not None:
            noise_scale[row, :n] = noise_scales(example.segment_lengths, neftune_alpha)
    tokens = Tokens(
        torch.from_numpy(input_ids),
        torch.arange(length).repeat(rows, 1),
        torch.from_numpy(targets),
        noise_scale,
        is_padding if is_padding.any() else None,
    )
    return MicroBatch(tokens, answers=compared)


def _answers(examples: Sequence[Example], given: AnswerIds) -> Answers:
    counts = [segment.target_count for example in examples for segment in _segments(example)]
    num_targets = torch.tensor(counts).long().reshape(-1, given.per_example)
    ids, *values = (
        torch.from_numpy(one.astype(np.float64 if one.dtype.kind == "f" else np.int64))
        for one in (given.ids, *given.values.values())
    )
    return Answers(ids, num_targets, values=dict(zip(given.values, values, strict=True)))


def _segments(example: Example) -> Iterator[Example]:
    """Yield each segment of an example as an example."""
    ends = np.cumsum(example.segment_lengths)
    for begin, end in zip((0, *ends), ends, strict=False):
        ids, trained = example.input_ids[begin:end], example.trained[begin:end]
        yield Example(ids, trained, scored=example.scored)


def noise_scales(lengths: Sequence[int], alpha: float) -> torch.Tensor:
    """Return α ÷ √L for each token of a segment of L tokens, (sum of lengths,) float32."""
    return torch.cat([torch.full((length,), alpha / math.sqrt(length)) for length in lengths])


def targets_of(example: Example) -> NDArray[np.int64]:
    """Return the token that each position predicts, or NO_TARGET, (T,); for scores, each target itself."""
    targets = np.full(len(example.input_ids), NO_TARGET, dtype=np.int64)
    if example.scored:
        return np.where(example.trained, example.input_ids, targets)
    targets[:-1] = np.where(example.trained[1:], example.input_ids[1:], NO_TARGET)
    return targets
