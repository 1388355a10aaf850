"""Datasets of examples that a test has made: takes examples, gives a Dataset of rows in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsft.data.sets.dataset import Dataset, Example, Examples, Ids, digest_of
from tests.unit.data.token_rows import FakeRows, Given


def dataset_of(examples: Sequence[Example], *, pairs: bool = False, file: str = "a") -> Dataset:
    """pairs: each example is a preference pair; file: example i is its line i + 1."""
    return Dataset((examples_of(examples, pairs=pairs, file=file),), whole=pairs)


def examples_of(examples: Sequence[Example], *, pairs: bool = False, file: str = "a") -> Examples:
    """Each segment is a row; that of an answer which continues a shared prompt has the whole prompt."""
    given, places, starts, targets = list[Given](), list[str](), list[int](), list[int]()
    for line, one in enumerate(examples, start=1):
        borders = np.cumsum(one.segment_lengths)[:-1]
        ids, trained = (np.split(column, borders) for column in (one.input_ids, one.trained))
        for number, start in enumerate(one.segment_starts):
            row = np.concatenate([ids[0][:start], ids[number]])
            mask = np.concatenate([trained[0][:start], trained[number]])
            given.append((row.tolist(), mask.tolist()))
            places.append(f"{file}:{line}")
            starts.append(start)
            targets.append(int(np.count_nonzero(trained[number][1:])))
    lengths = small([length for one in examples for length in one.segment_lengths])
    by_answer, positions, segments = small(targets).reshape(-1, 2 if pairs else 1), None, None
    if pairs and any(one.starts for one in examples):
        positions = small(starts).reshape(-1, 2)
    elif not pairs and any(one.segments for one in examples):
        segments = np.cumsum([0, *(len(one.segment_lengths) for one in examples)], dtype=np.int32)
        by_answer = np.add.reduceat(by_answer, segments[:-1], dtype=np.int32)
    rows = FakeRows(given, places=places)
    digest = digest_of(rows, small(starts), lengths, segments)
    row_ids = np.arange(len(given), dtype=np.int32)
    return Examples(rows, row_ids, small(starts), lengths, None, by_answer, digest, segments, positions)


def small(numbers: Sequence[int]) -> Ids:
    return np.array(numbers, dtype=np.int32)
