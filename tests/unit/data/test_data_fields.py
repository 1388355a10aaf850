"""Numbers of rows beside their tokens: from the columns of a file to the micro-batches of the task that uses
them, and to the digest of its data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsft.data.cache.store import Cache
from dsft.data.rows import FIELDS, RowField
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import load_data
from dsft.data.steps.steps import TrainSteps, evaluation
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError
from dsft.spec.batch import BatchSizes, batch_sizes
from dsft.spec.schema import Data, Source, Train
from dsft.spec.task import TASKS
from tests.specs import minimal_spec

MARGINS: list[Any] = [0.5, None, 3, -1.25, "0.1", "absent", 0, 2.5]
NUMBERS = [0.5, 0.0, 3.0, -1.25, 0.1, 0.0, 0.0, 2.5]


def rows_of(margins: list[Any], name: str = "margin") -> list[dict[str, Any]]:
    pairs = [{"prompt": f"{i}?", "chosen": "yes" * (1 + i), "rejected": "no"} for i in range(len(margins))]
    given = zip(pairs, margins, strict=True)
    return [row if margin == "absent" else row | {name: margin} for row, margin in given]


def loaded(folder: Path, rows: list[dict[str, Any]], task: str = "reward", **keys: Any) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    packing = keys.pop("packing", True)
    data = {"train": [{"path": str(path), **keys}], "max_length": 64, "packing": packing}
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
    with pytest.raises(DataError, match=r'columns names "none", which no row of the source has; the first'):
        loaded(tmp_path, margins, columns={"margin": "none"})
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
