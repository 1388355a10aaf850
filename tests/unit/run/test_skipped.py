"""A step that was not applied: which rows are named, padded, packed and as pairs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.steps import TrainSteps
from dsft.engine.api import ScoreOutput, log_probabilities
from dsft.run.trainer import skipped_rows
from dsft.spec.batch import BatchSizes
from tests.examples import dataset_of

PAD, COUNT = 1, 12
PADDED, PACKED = BatchSizes(COUNT, 2, 3, 2), BatchSizes(COUNT, 2, 3, 2, tokens_per_micro_batch=24)


def dataset(pairs: bool) -> Dataset:
    """Example i holds the token 100 + i, and is line i + 1 of a file."""
    examples = []
    for i in range(COUNT):
        lengths = (2 + i % 3, 3 + i % 2) if pairs else (3 + i % 5,)
        trained = np.arange(sum(lengths)) > 0
        ids = np.full(sum(lengths), 100 + i, dtype=np.int32)
        examples.append(Example(ids, trained, lengths))
    return dataset_of(examples, pairs=pairs, file="a.jsonl")


class Scorer:
    """NaN at the tokens of some examples, and at every padding, which is no target."""

    def __init__(self, *faults: int) -> None:
        self.faults, self.passes = torch.tensor([PAD, *(100 + i for i in faults)]), 0

    def score(
        self,
        micro_batches: Sequence[MicroBatch],
        output: ScoreOutput = log_probabilities,
        *,
        training: bool = False,
    ) -> tuple[Tensor, ...]:
        self.passes += 1
        found = (torch.isin(batch.tokens.input_ids, self.faults) for batch in micro_batches)
        logps = (torch.zeros(fault.shape).masked_fill(fault, math.nan) for fault in found)
        return tuple(output(one, batch) for one, batch in zip(logps, micro_batches, strict=True))


class World:
    """This rank is the second; the first has found nothing, or `other`."""

    def __init__(self, *other: int, sequence_rank: int = 0) -> None:
        self.other, self.sequence_rank = list(other), sequence_rank

    def gather(self, mine: Any) -> list[Any]:
        return [self.other, mine]


def skipped(scorer: Scorer, world: Any, batch: BatchSizes, loss: float, pairs: bool = False) -> list[str]:
    """Why, and the rows."""
    data = dataset(pairs)
    step = TrainSteps(data, batch, 1, 0, PAD).step(0)
    return [*skipped_rows(scorer, data, world, step, loss)]


def mine(batch: BatchSizes, pairs: bool = False) -> list[int]:
    return sorted(i for ids in TrainSteps(dataset(pairs), batch, 1, 0, PAD).step(0).assigned_ids for i in ids)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("batch", [PADDED, PACKED], ids=["padded", "packed"])
def test_the_rows_whose_loss_is_not_finite_are_named_with_their_rank(batch: BatchSizes, pairs: bool) -> None:
    for bad in mine(batch, pairs):
        why, named = skipped(Scorer(bad), World(), batch, math.nan, pairs)
        assert named == f"a.jsonl:{bad + 1} (rank 1)"
        assert why == "the loss is not finite on"


class OfSeveral(Scorer):
    """Scores several tokens of each target, of which the last always has the log-probability -inf."""

    def score(self, micro_batches: Any, output: Any = log_probabilities, **options: Any) -> Any:
        def several(logps: Tensor, batch: MicroBatch) -> Tensor:
            return output(torch.stack((logps, logps, torch.full_like(logps, -math.inf)), -1), batch)

        return super().score(micro_batches, several, **options)


def test_rows_whose_targets_have_several_scored_tokens() -> None:
    bad = mine(PADDED)[0]
    assert skipped(OfSeveral(bad), World(), PADDED, math.nan)[1] == f"a.jsonl:{bad + 1} (rank 1)"
    assert skipped(OfSeveral(), World(), PADDED, math.nan)[0].endswith("without dropout; its rows are")


def test_of_many_rows_the_first_are_named() -> None:
    others = [i for i in range(COUNT) if i not in mine(PADDED)]
    _, named = skipped(Scorer(*range(COUNT)), World(*others), PADDED, math.inf)
    assert named.startswith(f"a.jsonl:{others[0] + 1} (rank 0), ")
    assert named.count("a.jsonl") == 8 and named.endswith(" and 4 more")


def test_ranks_of_one_group_name_their_rows_once() -> None:
    bad = mine(PADDED)[0]
    _, named = skipped(Scorer(bad), World(bad, sequence_rank=1), PADDED, math.nan)
    assert named == f"a.jsonl:{bad + 1} (rank 0)"


def test_a_finite_loss_is_not_computed_again() -> None:
    scorer = Scorer(*range(COUNT))
    why, named = skipped(scorer, World(), PADDED, 2.0)
    assert scorer.passes == 0
    assert why == "the gradient is not finite although the loss is; its rows are"
    assert named.startswith("a.jsonl:")
    assert named.endswith(" and 4 more") and "rank" not in named


def test_where_no_row_is_at_fault_without_dropout_all_are_given() -> None:
    why, named = skipped(Scorer(), World(), PADDED, math.nan)
    assert why.endswith("but it is when computed again without dropout; its rows are")
    assert named.startswith("a.jsonl:")


def test_a_stage_without_the_head_finds_nothing() -> None:
    class NoHead(Scorer):
        def score(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            return ()

    assert skipped(NoHead(), World(0), PADDED, math.nan)[1] == "a.jsonl:1 (rank 0)"
