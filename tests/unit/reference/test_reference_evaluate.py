"""Held-out pairs on two ranks that score in turn: metrics, and a row for each pair in a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsft.data.sets.dataset import Example
from dsft.data.sets.load import HeldOutSet
from dsft.data.steps.batch import Answers, MicroBatch, unchanged
from dsft.objective.preference import preference
from dsft.report.jsonl import cut_margins
from dsft.spec.schema import Dpo
from dsft.tasks import preference as preference_task
from dsft.tasks.api import EvaluationSet
from dsft.tasks.preference import pair_evaluation
from tests.examples import dataset_of
from tests.make import make_micro_batch

POLICY = torch.tensor([[-10.0, -12.0], [-20.0, -18.0], [-3.5, -3.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-11.0, -11.5], [-19.0, -18.5], [-3.5, -3.0]], dtype=torch.float64)
TOKENS = torch.tensor([[4, 5], [10, 9], [2, 1]])


@dataclass
class World:
    """The first of two ranks, with what the second one adds; `first` is rank 0 itself."""

    others: list[Tensor]
    sequence_rank: int = 0
    device: torch.device = torch.device("cpu")

    def sum(self, mine: Tensor) -> Tensor:
        return mine + self.others.pop(0)

    def first(self, work: Any) -> Any:
        return work()


class Engine:
    """Knows the log-probabilities; without the last stage it scores none."""

    def __init__(self, *, is_last: bool = True) -> None:
        self.is_last, self.calls = is_last, 0

    def score(self, micro_batches: Sequence[MicroBatch], kept: object) -> tuple[Tensor, ...]:
        self.calls += 1
        found = tuple(POLICY[batch.answers.ids] for batch in micro_batches if batch.answers is not None)
        return found if self.is_last else ()


def micro_batch(ids: list[int]) -> MicroBatch:
    empty = torch.zeros(1, 2, dtype=torch.int64)
    numbers = torch.tensor(ids, dtype=torch.int64)
    return make_micro_batch(empty, empty, empty, (2,), answers=Answers(numbers, TOKENS[numbers]))


def refer(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    return [
        replace(batch, answers=replace(batch.answers, reference=REFERENCE[batch.answers.ids]))
        for batch in micro_batches
        if batch.answers is not None
    ]


def pair_set(micro_batches: list[MicroBatch], name: str | None = None) -> EvaluationSet:
    ids = np.arange(3, dtype=np.int32)
    rows = dataset_of([Example(ids, ids > 0)] * 3, file="pairs.jsonl")
    return EvaluationSet(HeldOutSet(name, rows), micro_batches, {"examples": 3, "chosen_tokens": 16}, refer)


def nothing() -> Tensor:
    return torch.zeros(3, 6, dtype=torch.float64)


def test_metrics_and_rows_are_of_all_pairs_whoever_scored_them(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(preference_task, "TOGETHER", 2)
    there = nothing()
    there[1] = torch.cat((POLICY[1], TOKENS[1], REFERENCE[1]))
    mine = [micro_batch([2]), micro_batch([0]), micro_batch([])]
    dpo, engine, world = Dpo(beta=0.5), Engine(), World([there])
    run: Any = pair_evaluation([pair_set(mine)], preference(dpo), dpo, engine, world, tmp_path)  # type: ignore[arg-type]
    record = run(7)

    margins = [0.75, -0.75, 0.0]  # 0.5 × (1 + 0.5), 0.5 × (-1 - 0.5), 0
    losses = [0.386871, 1.136871, 0.693147]  # log(1 + e^-margin)
    assert record == {
        "eval/loss": pytest.approx(sum(losses) / 3, abs=1e-6), "eval/rewards/chosen": 0.0,
        "eval/rewards/rejected": 0.0, "eval/rewards/margins": 0.0,
        "eval/rewards/accuracies": pytest.approx(1 / 3), "eval/logps/chosen": pytest.approx(-33.5 / 3),
        "eval/logps/rejected": pytest.approx(-11.0),
    }  # fmt: skip
    assert engine.calls == 2  # at most two micro-batches in memory at once

    rows = [json.loads(line) for line in (tmp_path / "margins/step-7.jsonl").read_text().splitlines()]
    assert [row["margin"] for row in rows] == margins
    assert [row["source"] for row in rows] == ["pairs.jsonl:1", "pairs.jsonl:2", "pairs.jsonl:3"]
    assert rows[0] == {
        "step": 7, "set": None, "source": "pairs.jsonl:1", "logps/chosen": -10.0, "logps/rejected": -12.0,
        "rewards/chosen": 0.5, "rewards/rejected": -0.25, "reference_logps/chosen": -11.0,
        "reference_logps/rejected": -11.5, "tokens/chosen": 4, "tokens/rejected": 5, "margin": 0.75,
    }  # fmt: skip


def test_a_rank_without_the_last_stage_knows_the_metrics_too(tmp_path: Path) -> None:
    there = torch.cat((POLICY, TOKENS, REFERENCE), dim=1)
    dpo, world = Dpo(beta=0.5), World([there, there])
    sets = [pair_set([micro_batch([0, 1, 2])], name) for name in ("a", "b")]
    run: Any = pair_evaluation(sets, preference(dpo), dpo, Engine(is_last=False), world, tmp_path)  # type: ignore[arg-type]
    record = run(1)
    assert record["eval/rewards/accuracies"] == record["eval/b/rewards/accuracies"] == pytest.approx(1 / 3)
    rows = [json.loads(line) for line in (tmp_path / "margins/step-1.jsonl").read_text().splitlines()]
    assert [row["set"] for row in rows] == ["a"] * 3 + ["b"] * 3


def test_the_pairs_of_a_group_count_once(tmp_path: Path) -> None:
    """Its second rank has scored them too, and adds nothing to what the first gives."""
    first = torch.cat((POLICY, TOKENS, REFERENCE), dim=1)
    dpo, engine = Dpo(beta=0.5), Engine()
    sets: Any = [pair_set([micro_batch([0, 1, 2])])]
    run: Any = pair_evaluation(sets, preference(dpo), dpo, engine, World([first], 1), tmp_path)  # type: ignore[arg-type]
    assert run(1)["eval/logps/chosen"] == pytest.approx(-33.5 / 3) and engine.calls == 1


def test_without_a_reference_there_is_none_in_the_rows(tmp_path: Path) -> None:
    dpo = Dpo(loss_type="simpo", beta=2.0)
    one = replace(pair_set([micro_batch([0, 1, 2])]), annotate=unchanged)
    run: Any = pair_evaluation([one], preference(dpo), dpo, Engine(), World([nothing()]), tmp_path)  # type: ignore[arg-type]
    assert run(1)["eval/logps/chosen"] == pytest.approx((-10 / 4 - 20 / 10 - 3.5 / 2) / 3)
    row = json.loads((tmp_path / "margins/step-1.jsonl").read_text().splitlines()[0])
    assert not [name for name in row if name.startswith("reference")]
    assert row["margin"] == pytest.approx(2 * (-10 / 4 + 12 / 5))


def test_a_resumed_run_has_no_margins_of_later_steps(tmp_path: Path) -> None:
    folder = tmp_path / "margins"
    folder.mkdir()
    for name in ("step-9.jsonl", "step-10.jsonl", "step-11.jsonl", "step-mine.jsonl"):
        (folder / name).write_text("")
    cut_margins(tmp_path, 10)
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-10.jsonl",
        "step-9.jsonl",
        "step-mine.jsonl",
    ]
    cut_margins(tmp_path / "no", 10)
