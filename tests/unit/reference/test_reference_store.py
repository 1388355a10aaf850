"""The store of reference log-probabilities: whole, in part, damaged, of another key; and what reads it."""

import json
import os
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsft.data.steps.batch import Answers, MicroBatch
from dsft.errors import CheckpointError, StorageError
from dsft.reference.key import Key, differences
from dsft.reference.refer import look_up
from dsft.reference.store import Store, _components
from tests.make import make_micro_batch

COMPONENTS: dict[str, Any] = {
    "format": 1,
    "weights": {"model-1.safetensors": "a", "model-2.safetensors": "b"},
    "config": {"model_type": "llama", "rope_parameters": {"rope_theta": 10000.0}},
    "adapter": None,
    "new_rows": None,
    "tokenizer": "t",
    "template": "{{ bos_token }}{% for message in messages %}",
    "truncation": {"max_length": 512, "on_too_long": "truncate"},
    "data": {
        "sources": {"data.train a.jsonl": {"rows": 9, "tokens": 90, "fingerprint": "f"}},
        "examples": ["e"],
    },
    "precision": "bf16",
}
MINE = Key(COMPONENTS)
SIZES = (9, 3)
SHAPES = ((9, 2), (3, 2))


def values(pairs: Sequence[int]) -> np.ndarray[Any, Any]:
    """(k, 2), all different."""
    return np.array([[-1.0 - pair, -1000.5 - pair] for pair in pairs])


def of(folder: Path, key: Key = MINE) -> Store:
    return Store(folder, key, "dpo.reference_store")


def add(folder: Path, dataset: int, *pairs: int) -> None:
    of(folder).write(dataset, np.array(pairs), values(pairs))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    of(tmp_path / "s").prepare()
    return tmp_path / "s"


def test_any_ranks_write_and_one_reads(folder: Path) -> None:
    add(folder, 0, 8, 1, 3)
    add(folder, 0, 0, 2)
    add(folder, 1, 2, 1)
    logged: list[str] = []
    found = of(folder).read(SHAPES, logged.append)
    assert [one.tolist() for one in found.missing] == [[4, 5, 6, 7], [0]] and found.num_missing == 5
    add(folder, 0, 4, 5, 6, 7)
    add(folder, 1, 0)
    found = of(folder).read(SHAPES, logged.append)
    assert found.num_missing == 0 and not logged
    for logps, size in zip(found.logps, SIZES, strict=True):
        assert isinstance(logps, np.ndarray) and logps.dtype == np.float64
        assert np.array_equal(logps, values(range(size)))


@pytest.mark.parametrize("answers", [1, 3])
def test_examples_may_have_any_number_of_answers(folder: Path, answers: int) -> None:
    logps = -np.arange(1.0, 1 + 4 * answers).reshape(4, answers)
    of(folder).write(0, np.array([3, 0, 1]), logps[:3])
    found = of(folder).read([(4, answers)], print)
    assert found.missing[0].tolist() == [2] and np.array_equal(found.logps[0][[3, 0, 1]], logps[:3])
    (batch,) = look_up(found.logps[0])((batch_of(3, 1),))
    assert batch.answers.reference.tolist() == logps[[0, 2]].tolist()


@pytest.mark.parametrize("at", [0, 9, -1])
def test_a_damaged_shard_is_scored_again(folder: Path, at: int) -> None:
    add(folder, 0, *range(5))
    (path,) = folder.glob("shard-*")
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    add(folder, 0, *range(5, 9))
    logged: list[str] = []
    found = of(folder).read(SHAPES, logged.append)
    assert found.missing[0].tolist() == [0, 1, 2, 3, 4] and path.name in logged[0]
    of(folder).prepare()
    assert not path.exists() and len(list(folder.glob("shard-*"))) == 1
    add(folder, 0, *range(5))
    assert not len(of(folder).read(SHAPES, logged.append).missing[0])


def test_a_cut_shard_and_what_a_killed_writer_left(folder: Path) -> None:
    add(folder, 0, 1, 2)
    (path,) = folder.glob("shard-*")
    path.write_bytes(path.read_bytes()[:-7])
    (folder / "shard-0.safetensors.tmp").write_bytes(b"half")
    of(folder).prepare()
    assert [file.name for file in folder.iterdir()] == ["key.json"]


def test_a_value_that_is_no_number_hides_no_other(folder: Path) -> None:
    add(folder, 0, 1, 2)
    for other in range(8):  # by their names, some are read before and some after
        of(folder).write(0, np.array([1, 2]), np.array([[-1.0, -other], [-1.0, np.nan]]))
    logged: list[str] = []
    assert of(folder).read(SHAPES, logged.append).missing[0].tolist() == [0, 3, 4, 5, 6, 7, 8] and logged


def test_a_damaged_shard_that_is_removed_while_another_job_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(folder, 0, 1)
    (folder / "shard-0.safetensors").write_bytes(b"torn")
    whole = Path.read_bytes

    def removed(path: Path) -> bytes:
        (folder / "shard-0.safetensors").unlink(missing_ok=True)
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", removed)
    assert of(folder).read(SHAPES, print).num_missing == sum(SIZES) - 1


def test_a_writer_killed_in_the_middle_leaves_whole_shards(folder: Path) -> None:
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads' locks: it only writes files
        writer = os.fork()
    if writer == 0:
        for pair in range(10**6):
            of(folder).write(0, np.arange(9), values(range(pair, pair + 9)))
            os.write(theirs, b".")
    written = 0
    while written < 20:
        written += len(os.read(ours, 20))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    logged: list[str] = []
    of(folder).read(SHAPES, logged.append)
    of(folder).prepare()
    assert not logged and len(list(folder.glob("shard-*"))) >= 20 and not list(folder.glob("*.tmp"))


CHANGES: list[tuple[str, Any, str]] = [
    ("weights", {"model-1.safetensors": "a", "model-2.safetensors": "c"}, "weight file model-2.safetensors"),
    ("weights", {"model-1.safetensors": "a"}, "model-2.safetensors is missing now"),
    ("weights", {"from_config": {"model_type": "llama"}, "seed": 1}, "fresh ones of model.from_config"),
    ("config",
     {"model_type": "llama", "rope_parameters": {"rope_theta": 1e6}},
     "config: rope_parameters.rope_theta was 10000.0, now 1000000.0"),
    ("adapter", {"adapter_model.safetensors": "x"}, "adapter's file adapter_model.safetensors is new"),
    ("new_rows", {"first": 1, "stop": 2, "held": 1, "added": ["<x>"]}, "model.add_tokens"),
    ("tokenizer", "u", "the tokenizer has changed"),
    ("template",
     "{{ bos_token }}{%- for message in messages %}",
     "chat template has changed at its character 18"),
    ("truncation", {"max_length": 256, "on_too_long": "truncate"}, "data.max_length was 512, now 256"),
    ("data",
     {"sources": {"data.train a.jsonl": {"rows": 9, "tokens": 90, "fingerprint": "g"}}, "examples": ["g"]},
     r"data.train a.jsonl had 9 pairs of 90 tokens, now the same number of different pairs"),
    ("data", COMPONENTS["data"] | {"examples": ["g"]}, "in another order"),
    ("precision", "fp32", "train.precision was bf16, now fp32"),
    ("format", 2, "version 1, now 2"),
]  # fmt: skip


@pytest.mark.parametrize("name, value, shown", CHANGES)
def test_another_key_is_refused_by_name(folder: Path, name: str, value: Any, shown: str) -> None:
    other = Key(COMPONENTS | {name: value})
    assert other.digest != MINE.digest
    with pytest.raises(CheckpointError, match=shown):
        of(folder, other).check()
    add(folder, 0, 1)
    (folder / "key.json").write_bytes(b"\xfftorn")
    of(folder, other).check()
    assert of(folder, other).read(SHAPES, print).num_missing == sum(SIZES)
    of(folder).prepare()  # which writes it again
    with pytest.raises(CheckpointError, match=shown):
        of(folder, other).prepare()
    assert of(folder).read(SHAPES, print).num_missing == sum(SIZES) - 1


def test_a_flipped_bit_of_the_key_is_damage_and_no_other_key(folder: Path) -> None:
    """It is never reported as another template, tokenizer, …, which the user could not put back."""
    path = folder / "key.json"
    content = path.read_bytes()
    ignored = 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        of(folder).check()
        ignored += _components(path) is None
    assert ignored > len(content) / 2


def test_a_key_of_an_earlier_dsft_has_no_digest(folder: Path) -> None:
    held = json.loads((folder / "key.json").read_text())
    (folder / "key.json").write_text(json.dumps({"components": held["components"]}))
    of(folder).check()
    with pytest.raises(CheckpointError, match=r"train\.precision was bf16, now fp32"):
        of(folder, Key(COMPONENTS | {"precision": "fp32"})).check()


def test_every_component_that_differs_is_described() -> None:
    changed = {name: value for name, value, _ in CHANGES}
    assert changed.keys() == COMPONENTS.keys()
    assert len(differences(COMPONENTS, changed)) >= len(changed)
    assert not differences(COMPONENTS, dict(COMPONENTS))
    assert differences(COMPONENTS | {"newer": 1}, COMPONENTS) == ["another dsft wrote its 'newer'"]


def test_looking_writes_nothing(tmp_path: Path) -> None:
    """So that jobs that start together do not disturb each other, nor the one that makes the store."""
    of(tmp_path / "s").check()
    assert not (tmp_path / "s").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file")
    with pytest.raises(StorageError, match=r"dpo\.reference_store"):
        of(tmp_path / "s").check()


def batch_of(*ids: int) -> MicroBatch:
    nothing = torch.zeros(1, 2, dtype=torch.int64)
    return make_micro_batch(
        nothing,
        nothing,
        nothing,
        answers=Answers(torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids), 2)),
    )


def test_the_reference_is_looked_up_by_the_pairs_numbers() -> None:
    refer = look_up(values(range(9)))
    given = (batch_of(3, 0), batch_of(), batch_of(8))
    found = refer(given)
    assert len(found) == 3
    for batch in found:
        assert batch.answers.reference.dtype == torch.float64
        assert batch.answers.reference.tolist() == values(batch.answers.ids.tolist()).reshape(-1, 2).tolist()
    assert [len(batch.answers.ids) for batch in found[1:] if batch.answers] == [0, 1]
    assert found[0].tokens.input_ids is given[0].tokens.input_ids
