"""Numbers of rows beside their tokens: from the columns of a file to the micro-batches of the task that uses
them, and to the digest of its data."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsft.data.cache.store import Cache
from dsft.data.rows import FIELDS, RowField
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import load_data
from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.data.steps.steps import TrainSteps, evaluation, micro_batches_of
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError
from dsft.spec.batch import BatchSizes, batch_sizes
from dsft.spec.schema import Data, Source, Train
from dsft.spec.task import TASKS
from tests.specs import minimal_spec

MARGINS: list[Any] = [0.5, None, 3, -1.25, "0.1", "absent", 0, 2.5]
NUMBERS = [0.5, 0.0, 3.0, -1.25, 0.1, 0.0, 0.0, 2.5]
LETTERS = [{"text": chr(ord("a") + n) * (40 if n % 2 else 9)} for n in range(7)]


def rows_of(margins: list[Any], name: str = "margin") -> list[dict[str, Any]]:
    pairs = [{"prompt": f"{i}?", "chosen": "yes" * (1 + i), "rejected": "no"} for i in range(len(margins))]
    given = zip(pairs, margins, strict=True)
    return [row if margin == "absent" else row | {name: margin} for row, margin in given]


def loaded(
    folder: Path,
    rows: list[dict[str, Any]],
    task: str = "reward",
    packing: bool = True,
    how: str = "error",
    **keys: Any,
) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"path": str(path)} | keys
    data = {"train": [source], "max_length": 64, "packing": packing, "on_too_long": how}
    spec = minimal_spec(task, data=data)
    return load_data(spec, byte_level_tokenizer(), Cache(folder / "cache")).train


@pytest.mark.parametrize("packing", [True, False])
def test_margins_reach_the_micro_batches_that_have_their_pairs(packing: bool, tmp_path: Path) -> None:
    """Of every division of a step; from the file, and from the cache."""
    for _ in range(2):
        train = loaded(tmp_path, rows_of(MARGINS), packing=packing)
        assert train.values["margin"].tolist() == NUMBERS and list(train.values) == ["margin"]
        data = Data(train=(Source(path="rows.jsonl"),), max_length=64, packing=packing)
        how = Train(global_batch_size=8, micro_batch_size=2, precision="fp32")
        sizes = batch_sizes(how, 1, data, "reward")
        for batch in TrainSteps(train, sizes, 0, 1, pad_id=0).step(0).micro_batches:
            moved = batch.to(torch.device("cpu"))
            lengths = train.lengths[list(batch.ids)].tolist()
            each = [one for _, _, one in moved.examples(lengths)] if packing else []
            for one in (batch, moved, *each):
                assert one.answers is not None and one.answers.values["margin"].dtype == torch.float64
                expected = [NUMBERS[i] for i in one.answers.ids.tolist()]
                assert one.answers.values["margin"].tolist() == expected
            if packing and len(batch.ids) > 1:
                first = batch.first(int(train.lengths[batch.ids[0]])).answers
                assert first is not None and first.values["margin"].tolist() == [NUMBERS[batch.ids[0]]]


def test_a_renamed_column_may_come_after_the_first_rows(tmp_path: Path) -> None:
    """One that no row has is refused: see margin_not_there of test_data_misuse.py."""
    rows = rows_of(["absent"]) * 150 + rows_of([2.0], "by")
    train = loaded(tmp_path, rows, columns={"margin": "by"})
    assert train.values["margin"].tolist() == [0.0] * 150 + [2.0]


def test_a_column_that_no_row_has_changes_no_digest(tmp_path: Path) -> None:
    """So that runs that began before rows could have margins go on."""
    without = loaded(tmp_path, rows_of(["absent"] * len(MARGINS))).fingerprint
    margins = rows_of(MARGINS)
    assert loaded(tmp_path, rows_of([None] * len(MARGINS))).fingerprint == without
    for _ in range(2):  # the cache knows it, and a source of two files has the mistake once
        shutil.copy(tmp_path / "rows.jsonl", tmp_path / "rows2.jsonl")
        with pytest.raises(
            DataError, match=r'columns names "none", which no row of the source has; .*'
        ) as error:
            loaded(tmp_path, margins, columns={"margin": "none"}, path=str(tmp_path / "rows*.jsonl"))
        assert error.value.title == "1 mistake in the data:"
    (tmp_path / "rows2.jsonl").write_text(json.dumps(margins[0] | {"none": 1}) + "\n")
    loaded(tmp_path, margins, columns={"margin": "none"}, path=str(tmp_path / "rows*.jsonl"))
    (tmp_path / "rows2.jsonl").unlink()
    assert loaded(tmp_path, margins).fingerprint != without
    assert loaded(tmp_path, rows_of(MARGINS[::-1])).fingerprint != loaded(tmp_path, margins).fingerprint
    other = loaded(tmp_path, rows_of(MARGINS, "gap"), columns={"margin": "gap"})
    assert other.values["margin"].tolist() == NUMBERS


def test_tasks_without_margins_do_not_read_them(tmp_path: Path) -> None:
    dpo = loaded(tmp_path, rows_of(["much"] * len(MARGINS)), "dpo")
    assert not dpo.values and len(dpo) == len(MARGINS)


@pytest.mark.parametrize("margin", ["much", True, [1], {"a": 1}, 10**400, "nan", "inf"])
def test_what_is_no_number_is_refused_with_its_place(margin: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'rows.jsonl:2: "margin" is .*; it must be a number'):
        loaded(tmp_path, rows_of([0, margin]))


def test_a_needed_field_is_in_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIELDS, "margin", FIELDS["margin"]._replace(needed=True))
    assert loaded(tmp_path, rows_of([0.5, 2])).values["margin"].tolist() == [0.5, 2.0]
    with pytest.raises(DataError, match=r'rows.jsonl:2: "margin" is missing; it must be a number'):
        loaded(tmp_path, rows_of([0.5, "absent"]))


def test_a_new_field_is_two_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of FIELDS, and its name among those of the task."""
    monkeypatch.setitem(FIELDS, "weight", RowField("weights", "<f8", 1))
    monkeypatch.setitem(TASKS, "reward", replace(TASKS["reward"], fields=("margin", "weight")))
    rows = [row | {"w": n} for n, row in enumerate(rows_of(MARGINS))]
    for _ in range(2):
        train = loaded(tmp_path, [*rows, *rows_of([2])], columns={"weight": "w"})
        assert train.values["weight"].tolist() == [*range(len(MARGINS)), 1.0]
        assert train.values["margin"].tolist() == [*NUMBERS, 2.0]
    (batch,) = evaluation(train, BatchSizes(9, 9, 1, 1, 1024), 0, 0)[0]
    assert batch.answers is not None and list(batch.answers.values) == ["margin", "weight"]
    expected = train.values["weight"][list(batch.ids)].tolist()
    assert batch.answers.values["weight"].tolist() == expected


def weights_of(batch: MicroBatch) -> list[float]:
    """Return the weight of each target of a micro-batch, in order, as a loss finds it."""
    answers, rows = batch.answers, torch.arange(batch.shape[0])[:, None].expand(batch.shape)
    assert answers is not None and len(answers.ids) == len(answers.num_targets)
    of_position = rows if answers.segments is None else answers.segments[None].long()
    return answers.values["weight"][of_position[batch.tokens.targets != NO_TARGET]].tolist()


@pytest.mark.parametrize(("task", "packing", "how"), [
    ("sft", False, "error"), ("sft", True, "truncate"), ("sft", True, "split"), ("pretrain", True, "error"),
])  # fmt: skip
def test_rows_that_are_no_answers_carry_their_numbers(
    task: str, packing: bool, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, cut in pieces, and joined: the letter of each target is its row's. The numbers are a part of the
    digest if rows have them."""
    monkeypatch.setitem(FIELDS, "weight", RowField("weights", "<f8", 1))
    before = loaded(tmp_path, LETTERS, task, packing, how).fingerprint
    monkeypatch.setitem(TASKS, task, replace(TASKS[task], fields=("weight",)))
    assert loaded(tmp_path, LETTERS, task, packing, how).fingerprint == before
    train = loaded(tmp_path, [row | {"weight": n} for n, row in enumerate(LETTERS)], task, packing, how)
    assert train.fingerprint != before
    found = 0
    for batch in evaluation(train, BatchSizes(9, 2, 1, 1, 128 if packing else None), 0, 0)[0]:
        moved = batch.to(torch.device("cpu"))
        for _, _, one in [(0, 0, moved), *moved.examples(train.lengths[list(batch.ids)].tolist())]:
            letters = one.tokens.input_ids[one.tokens.targets != NO_TARGET].tolist()
            assert weights_of(one) == [letter - ord("a") for letter in letters]
        found += len(weights_of(moved))
    assert found == train.count()["tokens"]
    (empty,) = micro_batches_of(train, np.zeros(0, np.int64), BatchSizes(9, 9, 1, 1, 4096), 0, 0)
    assert weights_of(empty.to(torch.device("cpu"))) == []
