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
    "row", ("kto",), "KTO", "preference training", cut="answers", label="answer",
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
        assert moved.num_targets.shape == (len(moved.ids), 1) and moved.values["label"].dtype == torch.int64
        seen |= dict(zip(moved.ids.tolist(), moved.values["label"].tolist(), strict=True))
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
    assert first.answers.values["label"].tolist() == [bool(i % 3) for i in first.answers.ids.tolist()]
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


REWARDS = TaskFacts("pair", ("preference",), "rewards", "fine-tuning", cut="answers", rows=2, head="score")
FORMS = {"padded": False, "packed": False, "shared": True}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pads_with_the_end", [False, True])
def test_a_score_is_at_the_last_token_that_is_no_padding(
    form: str, pads_with_the_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers chooses it in right-padded rows, whether the rows are cut or share their prompt."""
    pairs = [{"prompt": "?" * (1 + n), "chosen": "y" * n + "!", "rejected": "n" * (9 - n)} for n in range(8)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    packing = form != "padded"
    data = Data(train=(Source(path=str(path)),), max_length=8, packing=packing, on_too_long="truncate")
    monkeypatch.setitem(TASKS, "reward", REWARDS)
    monkeypatch.setattr("dsft.data.sets.load.shares_prompts", lambda spec: FORMS[form])
    tokenizer = byte_level_tokenizer()
    if pads_with_the_end:
        tokenizer.pad_token = tokenizer.eos_token
    pad = tokenizer.pad_token_id
    loaded = load_data(spec_of("reward", data), tokenizer).train
    assert (loaded.target_counts == 2).all() and (loaded.counts["tokens"] == 2).all()
    train = Train(global_batch_size=8, micro_batch_size=4, max_steps=1, precision="fp32")
    batches = TrainSteps(loaded, batch_sizes(train, 1, data, "reward"), 0, 1, pad).step(0).micro_batches
    ends = set[bool]()
    for batch in batches:
        ids, targets = batch.tokens.input_ids, batch.tokens.targets
        rows = list(zip(ids, targets, strict=True))
        if batch.segments is not None:
            parts = (one[0].split(list(batch.segments.lengths)) for one in (ids, targets))
            rows = list(zip(*parts, strict=True))
        assert batch.answers is not None and (batch.answers.num_targets == 1).all()
        assert len(rows) == 2 * len(batch.answers.ids)
        for tokens, wanted in rows:
            last = int((torch.arange(len(tokens)) * (tokens != pad)).argmax())  # of transformers
            expected = torch.full_like(wanted, -100)
            expected[last] = tokens[last]
            assert torch.equal(wanted, expected)
            ends.add(int(tokens[last]) == tokenizer.eos_token_id)
    assert ends == ({False} if pads_with_the_end else {True, False}), "cut answers have no end"


def test_scores_are_part_of_what_identifies_the_examples(tmp_path: Path) -> None:
    digests = set()
    for pad in (None, 3, 4):
        options = CutOptions(64, "error", None, pad_id=pad)
        rows = FakeRows([([1, 2, 3, 4], [False, False, True, True]), ([1, 2, 5], [False, False, True])])
        records = Records(rows, 2, "pair")
        digests.add(cut_answers(records, np.arange(1, dtype=np.int32), options).examples.digest)
    assert len(digests) == 3
