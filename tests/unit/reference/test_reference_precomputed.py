"""The reference out of a store: made once, by one of several jobs, gone on with, scored again, remembered.

The pass is a function here, which writes what a reference would say of each pair."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsft.engine import self_check
from dsft.errors import CheckpointError, StorageError, WorldError
from dsft.reference import precomputed
from dsft.reference.check import allowed, check_rescored
from dsft.reference.key import Key
from dsft.reference.precomputed import PrecomputedReference, ScoringPass, precompute, random_stored
from dsft.reference.store import StoreContents
from dsft.setup.inputs import Inputs, read_inputs
from dsft.system.lock import lock_folder
from dsft.tasks.referenced import check_same_reference, record_reference
from tests.launching import LATE
from tests.unit.reference.small import ALONE, rows, spec

SIZES = (5, 2)
SHAPES = ((5, 2), (2, 2))


def same(one: Any, other: Any) -> bool:
    return np.array_equal(one, other)


def values(dataset: int, pairs: Any) -> Any:
    return np.stack([-1.0 - dataset - pairs, -100.5 - pairs], axis=1)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[ScoringPass]:
    """Those that were run."""
    run: list[ScoringPass] = []

    def score(asked: ScoringPass, *others: Any) -> None:
        run.append(asked)
        for dataset, missing in enumerate(asked.store.read(SHAPES, print).missing):
            if len(missing):
                asked.store.write(dataset, missing, values(dataset, missing))

    monkeypatch.setattr(precomputed, "score", score)
    return run


def made(
    folder: Path, *, again: bool = False, say: Callable[[str], None] = print, **changed: Any
) -> tuple[PrecomputedReference, Inputs]:
    mine = spec(folder, changed)
    inputs = read_inputs(mine, lambda text: None)
    return precompute(mine, 2, inputs, ALONE, say, recheck=again), inputs


def test_the_same_rows_in_two_sets_are_scored_once(folder: Path, passes: list[ScoringPass]) -> None:
    """As where dsft eval --data gives a run other rows."""
    (folder / "b.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    shown: list[str] = []
    found, inputs = made(folder, say=shown.append)
    assert inputs.train.fingerprint == inputs.held_out[0].data.fingerprint
    assert [*map(len, passes[0].stored.missing)] == [5, 0] and "5 pairs scored in" in shown[1]
    assert found.logps[1] is found.logps[0] and same(found.logps[0], values(0, np.arange(5)))
    made(folder, say=shown.append)
    assert len(passes) == 1 and "the log-probabilities of 5 pairs" in shown[-1]


def test_computed_once_and_read_afterwards(folder: Path, passes: list[ScoringPass]) -> None:
    shown: list[str] = []
    found, _ = made(folder, say=shown.append)
    assert len(passes) == 1 and not sum(map(len, passes[0].recheck)) and passes[0].micro_batch_size == 2
    for dataset, size in enumerate(SIZES):
        assert same(found.logps[dataset], values(dataset, np.arange(size)))
    assert len(found.annotate) == 2
    assert shown[0].startswith("reference: the policy as it starts") and "7 pairs scored in" in shown[1]
    assert shown[2] == f"reference: the log-probabilities of 7 pairs are in {found.folder}"
    assert found.folder.parent == folder / "runs" / ".cache" / "reference"
    made(folder)
    assert len(passes) == 1
    made(folder, again=True)
    assert len(passes) == 2 and sum(map(len, passes[1].recheck)) == 4
    (found.folder / "key.json").write_text("{")
    assert same(made(folder)[0].logps[0], found.logps[0]) and len(passes) == 2


def test_a_killed_pass_is_continued(
    folder: Path, passes: list[ScoringPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = precomputed.score

    def killed(asked: ScoringPass, *others: Any) -> None:
        asked.store.write(0, np.arange(3), values(0, np.arange(3)))
        (asked.store.folder / "shard-x.safetensors.tmp").write_bytes(b"half")
        raise WorldError("was ended by signal 9")

    monkeypatch.setattr(precomputed, "score", killed)
    with pytest.raises(WorldError):
        made(folder)
    monkeypatch.setattr(precomputed, "score", whole)
    shown: list[str] = []
    found, _ = made(folder, say=shown.append)
    assert "4 pairs scored" in shown[1] and "3 pairs already stored" in shown[1]
    assert not list(found.folder.glob("*.tmp"))
    assert same(found.logps[0], values(0, np.arange(SIZES[0])))


def test_two_jobs_at_once_make_one_store(
    folder: Path, passes: list[ScoringPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, began, waits = precomputed.score, threading.Event(), threading.Event()
    shown: list[str] = []

    def slow(*given: Any) -> None:
        began.set()
        waits.wait(LATE)
        whole(*given)

    def say(line: str) -> None:
        shown.append(line)
        if "which is scoring the same rows" in line:
            waits.set()

    monkeypatch.setattr(precomputed, "score", slow)
    monkeypatch.setattr(precomputed, "_WAIT", 0.05)
    found: list[PrecomputedReference] = []
    other = threading.Thread(target=lambda: found.append(made(folder)[0]))
    other.start()
    assert began.wait(LATE)
    mine, _ = made(folder, say=say)
    other.join()
    assert len(passes) == 1 and mine.key.digest == found[0].key.digest
    assert any("which is scoring the same rows" in line for line in shown)
    assert all(same(a, b) for a, b in zip(mine.logps, found[0].logps, strict=True))


def test_the_store_may_be_in_the_runs_own_folder(folder: Path, passes: list[ScoringPass]) -> None:
    run = folder / "runs" / "dpo"
    with lock_folder(run):  # as the run does
        found, _ = made(folder, dpo={"reference_store": str(run)})
    assert found.folder == run and len(passes) == 1


def test_a_store_of_its_own_place_refuses_another_key(folder: Path, passes: list[ScoringPass]) -> None:
    given = {"reference_store": str(folder / "store")}
    found, _ = made(folder, dpo=given)
    assert found.folder == folder / "store"
    rows(folder / "a.jsonl", SIZES[0], "maybe")
    with pytest.raises(CheckpointError, match=r"store has .*: data\.train a had 5 pairs"):
        made(folder, dpo=given)
    assert len(passes) == 1
    made(folder)
    assert len(passes) == 2


def test_a_key_that_is_refused_costs_no_pass(folder: Path, passes: list[ScoringPass]) -> None:
    mine = spec(folder)
    inputs = read_inputs(mine, lambda text: None)

    def refuse(key: Key) -> None:
        raise CheckpointError(key.digest)

    with pytest.raises(CheckpointError):
        precompute(mine, 2, inputs, ALONE, print, recheck=False, check_key=refuse)
    assert not passes and not (folder / "runs" / ".cache" / "reference").exists()


def test_a_store_that_loses_what_was_written(
    folder: Path, passes: list[ScoringPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precomputed, "score", lambda *given: None)
    with pytest.raises(StorageError, match=r"lacks 7 of 7 pairs .* dpo\.reference_store"):
        made(folder)


def test_a_checkpoint_refuses_another_reference(folder: Path, passes: list[ScoringPass]) -> None:
    run = folder / "runs" / "small"
    run.mkdir(parents=True)
    before, _ = made(folder)
    record_reference(run, before.key, before.folder)
    recorded = json.loads((run / "reference.json").read_text())
    assert recorded == {"store": str(before.folder), **before.key.as_json()}
    checkpoint: Any = SimpleNamespace(path=run / "checkpoints/step-1", state={"reference": recorded})
    now, _ = made(folder, data={"max_length": 128})
    check_same_reference(None, now.key)
    check_same_reference(checkpoint, before.key)
    with pytest.raises(
        CheckpointError, match=r"step-1 was trained against .*: data\.max_length was 256, now"
    ):
        check_same_reference(checkpoint, now.key)


def test_random_pairs_of_all_datasets_are_chosen() -> None:
    logps = tuple(np.arange(2.0 * size).reshape(size, 2) for size in (50, 0, 30))
    logps[0][7] = np.nan
    held, seen = StoreContents(logps), set()
    for _ in range(100):
        chosen = random_stored(held, 6)
        assert sum(map(len, chosen)) == 6
        for dataset, one in enumerate(chosen):
            seen |= {(dataset, pair) for pair in one.tolist()}
    assert (0, 7) not in seen and len(seen) > 70
    assert sum(map(len, random_stored(held, 1000))) == 79
    assert not sum(map(len, random_stored(held, 0)))


def test_what_rounding_may_change_grows_with_the_root_of_the_tokens_and_then_with_the_tokens() -> None:
    for tokens, times in ((0, 1.0), (1, 1.0), (4, 2.0), (100, 10.0), (400, 40.0)):
        assert allowed("fp32", tokens) == pytest.approx(times * self_check.ALONE["fp32"])
        assert allowed("bf16", tokens) == pytest.approx(times * self_check.ALONE["bf16"])


def test_what_is_scored_otherwise_is_refused_with_both_values(
    folder: Path, passes: list[ScoringPass]
) -> None:
    found, inputs = made(folder)
    ids = np.array([1, 3])
    stored = found.logps[0][ids]
    tokens = [
        int(part[1:].sum())
        for part in np.split(inputs.train[3].trained, [inputs.train[3].segment_lengths[0]])
    ]
    near, far = stored.copy(), stored.copy()
    near[1, 1] += 0.9 * allowed("fp32", tokens[1])
    far[1, 1] += 1.1 * allowed("fp32", tokens[1])
    check_rescored(found.folder, inputs.train, ids, stored, near, "fp32")
    check_rescored(found.folder, inputs.train, ids, stored, far, "bf16")
    with pytest.raises(CheckpointError) as raised:
        check_rescored(found.folder, inputs.train, ids, stored, far, "fp32")
    assert f"{folder}/a.jsonl:4: " in str(raised.value) and "answer 2 of 2" in str(raised.value)
    assert "-103.5" in str(raised.value) and f"{far[1, 1]:.6g}" in str(raised.value)
    far[1, 1] = np.nan
    with pytest.raises(CheckpointError):
        check_rescored(found.folder, inputs.train, ids, stored, far, "bf16")
