"""What follows from a task alone."""

from __future__ import annotations

from typing import get_args

import pytest

from dsft.spec.schema import REFERENCE_FREE, LossType, Spec
from dsft.spec.task import TASKS

LOSSES = get_args(LossType)


@pytest.mark.parametrize(("task", "tokens"), [("sft", 64), ("pretrain", 64), ("dpo", 128)])
def test_the_longest_example_has_all_its_rows(task, tokens):
    spec = Spec.model_validate({
        "name": "a", "task": task, "model": {"name_or_path": "m"}, "optim": {"learning_rate": 1e-3},
        "data": {"train": [{"path": "a.jsonl"}], "max_length": 64},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 1, "precision": "fp32"},
    })  # fmt: skip
    assert spec.task_kind is TASKS[task]
    assert spec.longest_example == tokens


def test_losses_without_a_reference_are_losses():
    assert set(REFERENCE_FREE) < set(LOSSES)
