"""Whether a store still says what the reference says: takes pairs of it that were scored again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset
from dsft.engine.proof import ALONE, Precision
from dsft.errors import CheckpointError
from dsft.reference.store import Stored

ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True)
class Again:
    """Pairs (k,) of a dataset, and what the store has of them, (k, 2)."""

    ids: NDArray[np.int64]
    logps: NDArray[np.float64]


def choose_again(held: Stored, count: int) -> tuple[Again, ...]:
    """`count` random pairs of those that are there, by dataset; other ones at each start."""
    known = [np.flatnonzero(~np.isnan(one).any(axis=1)) for one in held.logps]
    borders = np.cumsum([0, *map(len, known)])
    drawn = random_pairs(int(borders[-1]), count)
    places = np.searchsorted(drawn, borders)
    chosen = [
        ids[drawn[first:last] - border]
        for ids, border, first, last in zip(known, borders[:-1], places[:-1], places[1:], strict=True)
    ]
    return tuple(Again(ids, logps[ids]) for ids, logps in zip(chosen, held.logps, strict=True))


def random_pairs(total: int, count: int) -> NDArray[np.int64]:
    """(count,) numbers below `total`, or all of them where there are fewer, ascending."""
    return np.sort(np.random.default_rng().permutation(total)[:count])


def check_again(
    folder: Path, dataset: Dataset, one: Again, found: NDArray[np.float64], precision: Precision
) -> None:
    """found: (k, 2), as the reference scores them now. Raises CheckpointError with the first pair that it
    scores otherwise than rounding explains: another layout runs other kernels, as a row alone does."""
    for pair, stored, now in zip(one.ids.tolist(), one.logps, found, strict=True):
        for answer, was, is_, tokens in zip(ANSWERS, stored, now, _tokens(dataset, pair), strict=True):
            bound = allowed(precision, tokens)
            if not abs(was - is_) <= bound:
                raise CheckpointError(
                    f"{dataset.source(pair)}: {folder} says that the reference gives the {answer} answer a "
                    f"log-probability of {was:.6g}, and scored again it gives {is_:.6g} ({bound:.2g} apart "
                    "would be rounding); remove the store, to have it made anew, and look for what changed: "
                    "another version of transformers or torch, or weights that the key does not see."
                )


def allowed(precision: Precision, tokens: int) -> float:
    """What rounding may change of a sum over so many tokens, in nats: that of `engine.proof` for their mean,
    and for one token at least."""
    tokens = max(1, tokens)
    return ALONE[precision] * float(max(tokens**-0.5, 0.1)) * tokens


def _tokens(dataset: Dataset, pair: int) -> Sequence[int]:
    """Targets of both answers."""
    example = dataset[pair]
    border = example.segment_lengths[0]
    return [int(np.count_nonzero(part[1:])) for part in np.split(example.trained, [border])]
