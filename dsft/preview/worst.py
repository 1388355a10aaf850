"""The examples to look at first: takes a run's examples, gives some of each way in which rows are bad."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset, RowPart
from dsft.data.sets.pairs import PairPart
from dsft.preview.problems import lost_of, parts_of, row_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EACH = 3
DECODED = 2_000  # examples that are decoded to tell their tokens per character: a second


@dataclass(frozen=True)
class Worst:
    """examples: (number in the dataset from 0, why)."""

    title: str
    examples: tuple[tuple[int, str], ...]


def worst_of(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Worst]:
    """The worst EACH of each kind, of the kinds that occur."""
    kinds = (
        Worst("longest", tuple(_longest(data))),
        Worst("least share of trained tokens", tuple(_least_trained(data))),
        Worst("most tokens cut off", tuple(_most_cut(data))),
        Worst(_efficiency_title(data), tuple(_least_efficient(data, tokenizer))),
        Worst("said most often", tuple(_repeated(data))),
    )
    return [kind for kind in kinds if kind.examples]


def _longest(data: Dataset) -> Iterator[tuple[int, str]]:
    for index in _largest(data.lengths):
        yield index, ""


def _least_trained(data: Dataset) -> Iterator[tuple[int, str]]:
    share = data.target_counts / data.lengths
    for index in _largest(-share):
        yield index, f"{share[index]:.1%} trained on"


def _most_cut(data: Dataset) -> Iterator[tuple[int, str]]:
    """Of truncated rows. Where rows are split, nothing is cut off."""
    parts = parts_of(data.parts)
    cut = _joined([lost_of(part) for part in parts])
    rows = _joined([row_of(part) + offset for part, offset in _offsets(data)])
    once = np.bincount(rows)[rows] == 1
    is_window = all(isinstance(part, PairPart) or part.pieces.at is None for part in parts)
    for index in _largest(np.where(once & is_window, cut, 0)):
        if cut[index] > 0 and once[index] and is_window:
            yield index, f"{cut[index]:,} tokens cut off"


def _least_efficient(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, str]]:
    looked_at = np.unique(np.linspace(0, len(data) - 1, min(DECODED, len(data))).astype(np.int64))
    texts = tokenizer.batch_decode([data[int(index)].input_ids.tolist() for index in looked_at])
    characters = np.array([max(1, len(text)) for text in texts])
    rates = data.lengths[looked_at] / characters
    for at in _largest(rates):
        index = int(looked_at[at])
        yield index, f"{characters[at]:,} characters, {rates[at]:.2f} tokens each"


def _efficiency_title(data: Dataset) -> str:
    of = "" if len(data) <= DECODED else f", of {DECODED:,} that were looked at"
    return f"most tokens per character{of}"


def _repeated(data: Dataset) -> Iterator[tuple[int, str]]:
    content = _joined([part.rows.content[row_of(part)] for part in parts_of(data.parts)])
    rows = _joined([row_of(part) + offset for part, offset in _offsets(data)])
    _, first_of_row = np.unique(rows, return_index=True)  # a row that was split is one
    _, first, times = np.unique(content[first_of_row], return_index=True, return_counts=True)
    for at in _largest(times):
        if times[at] > 1:
            yield int(first_of_row[first[at]]), f"{times[at]:,} rows say this"


def _offsets(data: Dataset) -> Iterator[tuple[RowPart | PairPart, int]]:
    """Each source, and how many rows stand in those before it."""
    offset = 0
    for part in parts_of(data.parts):
        yield part, offset
        offset += len(part.rows.lengths)


def _largest(values: NDArray[np.number]) -> list[int]:
    """Where the EACH largest stand, the earlier of equals first."""
    return [int(index) for index in np.argsort(-values, kind="stable")[:EACH]]


def _joined(arrays: list[NDArray[np.number]]) -> NDArray[np.number]:
    return np.concatenate(arrays)
