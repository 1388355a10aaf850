"""Datasets of examples that a test has made: takes examples, gives a Dataset without rows behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows
from dsft.data.sets.dataset import Dataset, Example


def dataset_of(examples: Sequence[Example], *, pairs: bool = False) -> Dataset:
    """pairs: each example is a preference pair."""
    return Dataset((ExamplePart(tuple(examples), pairs=pairs),))


@dataclass(frozen=True, eq=False)
class ExamplePart:
    """Examples as the part of a dataset. pairs: each is a preference pair."""

    examples: tuple[Example, ...]
    name: str | None = None
    pairs: bool = False

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([len(example.input_ids) for example in self.examples], dtype=np.int32)

    @cached_property
    def widths(self) -> NDArray[np.int32]:
        if not self.pairs:
            return self.lengths
        return np.array([max(example.segment_lengths) for example in self.examples], dtype=np.int32)

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        if not self.pairs:
            return self.lengths.astype(np.int64) ** 2
        segments = [zip(one.segment_lengths, one.segment_starts, strict=True) for one in self.examples]
        return np.array([sum(n * (n + start) for n, start in one) for one in segments], dtype=np.int64)

    @cached_property
    def target_counts(self) -> NDArray[np.int32]:
        return np.array([example.target_count for example in self.examples], dtype=np.int32)

    @cached_property
    def counts(self) -> Mapping[str, NDArray[np.int32]]:
        if not self.pairs:
            return {"tokens": self.target_counts}
        chosen = [np.count_nonzero(one.trained[1 : one.segment_lengths[0]]) for one in self.examples]
        return {
            "pairs": np.ones(len(self.examples), np.int32),
            "chosen_tokens": np.array(chosen, dtype=np.int32),
        }

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for example in self.examples:
            digest.update(example.input_ids.astype("<i4").tobytes())
            digest.update(example.trained.tobytes())
            for numbers in (example.segments, example.starts):
                if numbers is not None:
                    digest.update(np.array(numbers, dtype="<i8").tobytes())
        return digest.hexdigest()

    def source(self, index: int) -> str:
        return self.examples[index].source

    @property
    def rows(self) -> TokenRows:
        raise AssertionError("there are no rows behind them")

    @property
    def row_ids(self) -> NDArray[np.int32]:
        raise AssertionError("there are no rows behind them")

    @property
    def lost(self) -> NDArray[np.int64]:
        raise AssertionError("there are no rows behind them")

    def extent(self, index: int) -> str:
        raise AssertionError("there are no rows behind them")

    def example(self, index: int) -> Example:
        return self.examples[index]
