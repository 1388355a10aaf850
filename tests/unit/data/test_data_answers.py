"""Whole answers, one or several to a record, with labels: from rows of format kto to micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dsft.data.rows import Records
from dsft.data.sets.answers import cut_answers
from dsft.data.sets.cut import CutOptions, CutRows
from dsft.data.sets.dataset import Dataset, Examples, Ids
from dsft.data.sets.load import load_data
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.steps import TrainSteps
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError
from dsft.spec.batch import batch_sizes
from dsft.spec.schema import Data, Source, Train
from dsft.spec.task import TASKS, TaskFacts
from tests.unit.data.token_rows import FakeRows, spec_of

LABELED = TaskFacts(
    "row", ("kto",), "KTO", "preference training", cut="answers", labels=True,
)  # fmt: skip


def kto_rows(path: Path, count: int) -> None:
    rows = ({"prompt": f"{i}?", "completion": "yes" * (1 + i), "label": i % 3 > 0} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("packing", [False, True])
def test_labels_reach_the_micro_batches(
    packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "labeled", LABELED)
    kto_rows(tmp_path / "a.jsonl", 8)
    data = Data(train=(Source(path=str(tmp_path / "a.jsonl")),), max_length=64, packing=packing)
    loaded = load_data(spec_of("labeled", data), byte_level_tokenizer())
    assert len(loaded.train) == 8 and "left out" not in " ".join(loaded.lines)
    train = Train(global_batch_size=8, micro_batch_size=2, max_steps=1, precision="fp32")
    sizes = batch_sizes(train, 1, data, "labeled")
    seen: dict[int, bool] = {}
    for batch in TrainSteps(loaded.train, sizes, 0, 1, pad_id=0).step(0).micro_batches:
        moved = batch.to(torch.device("cpu")).answers
        assert moved is not None and moved.desirable is not None
        assert moved.num_targets.shape == (len(moved.ids), 1) and moved.desirable.dtype == torch.bool
        seen |= dict(zip(moved.ids.tolist(), moved.desirable.tolist(), strict=True))
    assert seen == {i: i % 3 > 0 for i in range(8)}


def test_a_shorter_micro_batch_keeps_the_labels_of_its_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "labeled", LABELED)
    kto_rows(tmp_path / "a.jsonl", 3)
    data = Data(train=(Source(path=str(tmp_path / "a.jsonl")),), max_length=64, packing=True)
    train = load_data(spec_of("labeled", data), byte_level_tokenizer()).train
    sizes = batch_sizes(Train(global_batch_size=3, micro_batch_size=3, precision="fp32"), 1, data, "labeled")
    (batch,) = TrainSteps(train, sizes, 0, 1, pad_id=0).step(0).micro_batches
    assert batch.segments is not None and batch.answers is not None
    first: MicroBatch = batch.first(batch.segments.lengths[0] + 1)
    assert first.answers is not None and first.answers.desirable is not None
    assert first.answers.desirable.tolist() == [bool(i % 3) for i in first.answers.ids.tolist()]
    assert len(first.answers.ids) == 2


def cut(rows: FakeRows, each: int, max_length: int, *, share: bool = False) -> CutRows:
    ids: Ids = np.arange(len(rows.given) // each, dtype=np.int32)
    return cut_answers(Records(rows, each), ids, CutOptions(max_length, "truncate", None, share))


def row(prompt: int, *answer: int) -> tuple[list[int], list[bool]]:
    """A prompt of the tokens 1 to `prompt`, and an answer."""
    return [*range(1, prompt + 1), *answer], [False] * prompt + [True] * len(answer)


def test_one_answer_keeps_the_end_of_its_prompt_and_its_beginning() -> None:
    rows = FakeRows([row(3, 50, 51), row(9, 60, 61, 62), row(9, *range(70, 80))])
    made = cut(rows, 1, 8)
    read = [made.examples.read(i) for i in range(3)]
    assert [one.input_ids.tolist() for one in read] == [
        [1, 2, 3, 50, 51],
        [5, 6, 7, 8, 9, 60, 61, 62],
        [8, 9, *range(70, 76)],  # a quarter of max_length for the prompt
    ]
    assert [one.target_count for one in read] == made.examples.targets[:, 0].tolist() == [2, 3, 6]
    assert made.noted["prompt_cut"].tolist() == [1, 2] and not len(made.left_out["identical"])


@pytest.mark.parametrize("share", [False, True])
def test_three_answers_share_what_is_kept_of_their_prompt(share: bool) -> None:
    rows = FakeRows([row(4, 50, 51), row(4, 60), row(4, 70, 71, 72), *[row(2, *range(80, 90))] * 3])
    made = cut(rows, 3, 6, share=share)
    assert len(made.examples) == 1 and made.left_out["identical"].tolist() == [1]
    example = made.examples.read(0)
    assert made.examples.targets.tolist() == [[2, 1, 3]] and example.target_count == 6
    if share:
        assert example.segment_lengths == (5, 2, 4) and example.segment_starts == (0, 2, 2)
        assert example.input_ids.tolist() == [2, 3, 4, 50, 51, 4, 60, 4, 70, 71, 72]
    else:
        assert example.segment_lengths == (5, 4, 6)
        assert example.input_ids.tolist() == [2, 3, 4, 50, 51, 2, 3, 4, 60, 2, 3, 4, 70, 71, 72]


def test_a_segment_may_join_spans_of_different_rows() -> None:
    """As a prompt with the answer to another one does, from which KTO estimates a divergence."""
    rows = FakeRows([row(3, 50, 51), row(2, 60, 61)])
    row_of, start, length, spans = np.array([[0, 1], [0, 1], [2, 3], [0, 2]], np.int32)
    examples = Examples(rows, row_of, start, length, spans, np.array([[2]], np.int32), "digest")
    read = Dataset((examples,))[0]
    assert read.input_ids.tolist() == [1, 2, 2, 60, 61]
    assert read.trained.tolist() == [False, False, False, True, True]
    assert examples.sizes.tolist() == [[5]] and read.segments is None


def test_rows_that_make_no_whole_records_are_an_error() -> None:
    rows = FakeRows([row(1, 5)] * 5)
    with pytest.raises(DataError, match=r"whole pairs:\n  a:4: is the last of 5 rows, but a pair is 2 rows"):
        Records(rows, 2, "pair")
    assert len(Records(FakeRows([]), 2, "pair").lengths) == 0
