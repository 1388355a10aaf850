"""A teacher's rows of targets: in a store whose shards stay in their files, and filled into micro-batches."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from dsft.data.steps.batch import NO_TARGET
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import SpecError, StorageError
from dsft.model.config import TokenFacts
from dsft.model.head import Top
from dsft.reference import target_rows
from dsft.reference.key import Key
from dsft.reference.model import same_tokens
from dsft.reference.store import Store, StoreContents
from dsft.reference.target_rows import TargetRows, mapped
from dsft.reference.teacher import ask_for_top, look_up_rows, with_teacher
from tests.make import padded
from tests.specs import minimal_spec
from tests.unit.reference.small import TINY

COUNTS = np.array([3, 0, 2, 4, 1], np.int32)
TOP_K = 2
COLUMNS = 2 * TOP_K + 1
ENDS = np.cumsum(COUNTS)
TABLE = np.arange(ENDS[-1] * COLUMNS, dtype=np.float32).reshape(-1, COLUMNS) - 30
"""Of all examples, in order."""


def rows_of(*ids: int) -> np.ndarray[Any, Any]:
    return np.concatenate([TABLE[ENDS[i] - COUNTS[i] : ENDS[i]] for i in ids])


def store(folder: Path, digest: str = "a") -> Store:
    return Store(folder, Key({"digest": digest}), "distill.reference_store", of_targets=True)


def add(folder: Path, *ids: int) -> None:
    store(folder).write(0, np.array(ids), rows_of(*ids))


def read(folder: Path, log: Any = pytest.fail) -> StoreContents:
    return store(folder).read([(COUNTS, COLUMNS)], log)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store(tmp_path / "s").prepare()
    return tmp_path / "s"


def test_any_ranks_write_and_rows_are_read_where_they_lie(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more shards than are mapped at once. An example without a target needs no row."""
    add(folder, 3, 0)
    assert [one.tolist() for one in read(folder).missing] == [[2, 4]]
    add(folder, 4)
    add(folder, 2)
    found = read(folder)
    assert found.num_missing == 0
    (table,) = found.logps
    assert isinstance(table, TargetRows) and len(table) == 5
    monkeypatch.setattr(target_rows, "mapped", lambda path: mapped.__wrapped__(path))
    for ids in ([4, 0, 1], [3], [1], [2, 3, 4, 0]):
        assert np.array_equal(table[ids], rows_of(*ids)) and table[ids].dtype == np.float32
    assert all(isinstance(mapped(path).rows, np.memmap) for path in folder.glob("shard-*"))


def test_a_damaged_shard_is_scored_again(folder: Path) -> None:
    add(folder, 0, 3)
    (path,) = folder.glob("shard-*")
    add(folder, 2)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    logged: list[str] = []
    assert read(folder, logged.append).missing[0].tolist() == [0, 3, 4] and path.name in logged[0]
    store(folder).prepare()
    assert not path.exists()
    assert store(folder, "b").read([(COUNTS, COLUMNS)]).num_missing == 4, "those of another key"


def test_rows_are_filled_in_at_the_targets_of_a_micro_batch(folder: Path) -> None:
    add(folder, 0, 2)
    (table,) = read(folder).logps
    assert isinstance(table, TargetRows)
    batch = padded([([5, 6, 7, 8, 9], [False, True, True, False, True]), ([1, 2, 3], [True] * 3)])
    (filled,) = look_up_rows(table)([replace(batch, ids=(0, 2))])
    is_target = batch.tokens.targets != NO_TARGET
    assert filled.tokens.others is not None and filled.teacher is not None
    assert filled.tokens.others[is_target].tolist() == rows_of(0, 2)[:, :TOP_K].astype(int).tolist()
    assert filled.teacher[is_target].tolist() == rows_of(0, 2)[:, TOP_K:].tolist()
    assert not filled.teacher[~is_target].any() and filled.tokens.others.dtype == torch.int32

    moved = filled.to(torch.device("cpu"))
    assert moved.teacher is not None and torch.equal(moved.teacher, filled.teacher)
    cut = filled.first(2)
    assert cut.teacher is not None and cut.teacher.shape == (2, 2, TOP_K + 1)
    empty = with_teacher(padded([]), torch.zeros(0, COLUMNS))
    assert empty.teacher is not None and empty.teacher.shape == (1, 2, TOP_K + 1)


def test_a_store_that_is_removed_while_the_run_trains_is_named(folder: Path) -> None:
    add(folder, 0)
    (table,) = read(folder).logps
    assert isinstance(table, TargetRows)
    mapped.cache_clear()
    for path in folder.glob("shard-*"):
        path.unlink()
    batch = replace(padded([([5, 6, 7, 8], [True] * 4)]), ids=(0,))
    with pytest.raises(StorageError, match=r"shard-.* cannot be read any more .*put it back"):
        look_up_rows(table)([batch])[0]


@pytest.mark.parametrize("teacher, student, top_k, shown", [
    (300, 270, 269, None),
    (300, 270, 270, "the teacher has 300 tokens and the student 270; set at most 269"),
    (270, 270, 270, None),
    (270, 300, 269, None),
    (270, 300, 270, "set at most 269"),
])  # fmt: skip
def test_more_tokens_than_both_models_have(
    teacher: int, student: int, top_k: int, shown: str | None, tmp_path: Path
) -> None:
    for name, size in (("teacher", teacher), ("student", student)):
        LlamaConfig(**TINY | {"vocab_size": size}).save_pretrained(tmp_path / name)
    asked = minimal_spec(
        "distill",
        model={"name_or_path": str(tmp_path / "student")},
        distill={"reference_model": str(tmp_path / "teacher"), "top_k": top_k, "temperature": 2.0},
    )
    given: list[Any] = []
    policy: Any = SimpleNamespace(score_top=lambda *what: given.append(what))
    facts = TokenFacts(259, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    if shown is None:
        ask_for_top(policy, asked, facts)
        assert given == [(Top(top_k, min(teacher, student)), 2.0)]
    else:
        with pytest.raises(SpecError, match=f"distill.top_k: {top_k}, but .*{shown}"):
            ask_for_top(policy, asked, facts)


def test_a_teacher_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="distill.reference_model: .*has no tokenizer to compare"):
        same_tokens(str(tmp_path), "distill.reference_model", byte_level_tokenizer(), required=True)
