"""Prompts with the answers to other prompts: which they are, their tokens, and how ranks share them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsft.data.rows import Records
from dsft.data.sets.answers import cut_answers
from dsft.data.sets.cut import CutOptions
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import load_data
from dsft.data.sets.mismatched import of_set, of_steps
from dsft.data.sets.order import Order
from dsft.data.steps.steps import TrainSteps, micro_batches_of
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Data, Source
from dsft.spec.task import LABELS
from tests.unit.data.token_rows import FakeRows, spec_of

SEED = 3


def dataset(*sizes: int) -> Dataset:
    """Sources of these sizes. Example n has a prompt of 1 + n % 3 tokens 100 + n and an answer of 1 + n % 4
    tokens 200 + n, of which the second is no target; it is desirable if n is even."""
    parts, first = [], 0
    for size in sizes:
        numbers = range(first, first + size)
        rows = [
            (
                [100 + n] * (1 + n % 3) + [200 + n] * (1 + n % 4),
                [False] * (1 + n % 3) + [t != 1 for t in range(1 + n % 4)],
            )
            for n in numbers
        ]
        read = FakeRows(rows, undesirable=frozenset(n - first for n in numbers if n % 2))
        options = CutOptions(64, "error", None)
        parts.append(cut_answers(Records(read, 1), np.arange(size, dtype=np.int32), options).examples)
        first += size
    return Dataset(tuple(parts), None, tuple("abc"[: len(sizes)]), whole=True, labels=LABELS)


def test_each_prompt_gets_the_answer_of_the_example_before_it_in_its_step() -> None:
    data = dataset(7, 3)
    made, order, first = of_steps(data, 4, SEED, 5, 64), Order(data, 4, SEED), 0
    steps = [order.step(index).ids.tolist() for index in range(5)]
    assert len(made) == sum(map(len, steps)) == 18 and [len(ids) for ids in steps] == [4, 4, 2, 4, 4]
    for number, ids in enumerate(steps):
        assert TrainSteps(data, BatchSizes(4, 2, 1, 2), 0, SEED, 0).step(number).examples_before == first
        for place, (prompt, answer) in enumerate(zip(ids, [ids[-1], *ids[:-1]], strict=True)):
            example = made[first + place]
            expected = [100 + prompt] * (1 + prompt % 3) + [200 + answer] * (1 + answer % 4)
            assert example.input_ids.tolist() == expected and made.lengths[first + place] == len(expected)
            answer_mask = [t != 1 for t in range(1 + answer % 4)]
            assert example.trained.tolist() == [False] * (1 + prompt % 3) + answer_mask
            assert made.source(first + place).count(" with the answer of ") == 1
        assert sorted(made.answer[first : first + len(ids)]) == sorted(ids), "the step's own answers"
        first += len(ids)
    assert any((made.prompt < 7) != (made.answer < 7)), "of different sources too"


def test_the_end_of_an_answer_that_is_too_long_is_cut_off() -> None:
    data = dataset(12)
    made = of_steps(data, 12, SEED, 1, 4)
    whole = of_steps(data, 12, SEED, 1, 64)
    assert (whole.lengths > 4).any()
    for index in range(12):
        assert made[index].input_ids.tolist() == whole[index].input_ids[:4].tolist()
        assert made.lengths[index] == len(made[index].input_ids) and made[index].target_count >= 1


@pytest.mark.parametrize("budget", [None, 20])
def test_ranks_share_all_pairs_of_a_step_in_every_division(budget: int | None) -> None:
    data = dataset(9)
    made, found = of_steps(data, 9, SEED, 2, 64), []
    for ranks, size in ((1, 9), (2, 1), (3, 2)):
        sizes = BatchSizes(9, size, 1, ranks, budget)
        shares = [micro_batches_of(made, np.arange(9, 18), sizes, rank, 0) for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        answers = [batch.answers for share in shares for batch in share]
        numbers = [n for one in answers if one is not None for n in one.ids.tolist()]
        assert sorted(numbers) == list(range(9, 18))
        assert all(one is not None and one.num_targets.shape[1] == 1 for one in answers)
        found.append(sum(int(one.num_targets.sum()) for one in answers if one is not None))
    assert len(set(found)) == 1


def test_a_longer_run_begins_with_the_same_pairs() -> None:
    data = dataset(10)
    short, long = (of_steps(data, 4, SEED, steps, 64) for steps in (2, 9))
    assert (short.prompt == long.prompt[:8]).all() and (short.answer == long.answer[:8]).all()
    assert short.fingerprint == long.fingerprint
    others = [of_steps(data, 5, SEED, 2, 64), of_steps(data, 4, 4, 2, 64), of_set(data, 64)]
    assert len({short.fingerprint, *(one.fingerprint for one in others)}) == 4


def test_a_held_out_set_is_paired_in_a_shuffled_order() -> None:
    made = of_set(dataset(50), 64)
    assert made.prompt.tolist() == list(range(50)) and sorted(made.answer) == list(range(50))
    assert (made.answer != made.prompt).all()
    near = np.abs(made.answer - made.prompt) == 1
    assert near.sum() < 10, "rows that follow each other in a file may have the same prompt"


def test_labels_are_part_of_what_identifies_the_rows(tmp_path: Path) -> None:
    path, found = tmp_path / "a.jsonl", []
    for label in (True, False):
        path.write_text(json.dumps({"prompt": "a?", "completion": "b", "label": label}) + "\n")
        data = Data(train=(Source(path=str(path)),), max_length=64)
        found.append(load_data(spec_of("kto", data), byte_level_tokenizer()).identity["data.train a"])
    assert found[0]["tokens"] == found[1]["tokens"] and found[0]["fingerprint"] != found[1]["fingerprint"]


def test_counts_of_labels() -> None:
    data = dataset(5, 2)
    assert data.values["label"].tolist() == [1, 0, 1, 0, 1, 0, 1]
    counts = data.count()
    assert (counts["desirable"], counts["undesirable"], counts["examples"]) == (4, 3, 7)
    counts = data.count(np.array([1, 2, 3]))
    assert (counts["desirable"], counts["undesirable"], counts["examples"]) == (1, 2, 3)


def test_pairs_are_split_in_two_rows_with_labels(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": "no"} for n in range(40)]
    rows += [{"prompt": "a", "chosen": "b", "rejected": "b"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (Source(path=str(path)),)
    data = Data(train=sources, max_length=64, on_bad_row="drop", eval_count=5)
    loaded = load_data(spec_of("kto", data), byte_level_tokenizer())
    (held_out,) = loaded.held_out
    ledger = loaded.sources[0].ledger
    assert (ledger.bad, ledger.duplicate, len(loaded.train) + len(held_out.data)) == (1, 0, 80)
    for one in (loaded.train, held_out.data):
        assert one.values["label"].tolist() == [1, 0] * (len(one) // 2)
        places = [one.source(n) for n in range(len(one))]
        assert places[::2] == places[1::2], "both answers to a prompt are on the same side"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:40], rows[7]]))
    repeated = load_data(spec_of("kto", Data(train=sources, max_length=64)), byte_level_tokenizer())
    assert repeated.sources[0].ledger.duplicate == 2
