"""What follows from a task alone."""

from typing import get_args

import pytest

from dsft.spec.losses import PREFERENCE_LOSSES, LossType
from dsft.spec.task import TASKS
from tests.specs import minimal_spec

LOSSES = get_args(LossType)


@pytest.mark.parametrize(("task", "tokens"), [("sft", 64), ("pretrain", 64), ("dpo", 128)])
def test_the_longest_example_has_all_its_rows(task, tokens):
    data = {"train": [{"path": "a.jsonl"}], "max_length": 64}
    spec = minimal_spec(task, data=data, train={"global_batch_size": 4, "micro_batch_size": 2})
    assert spec.task_kind is TASKS[task]
    assert spec.longest_example == tokens


def test_each_loss_has_its_properties():
    assert tuple(PREFERENCE_LOSSES) == LOSSES
    assert [name for name, loss in PREFERENCE_LOSSES.items() if not loss.reference] == ["simpo", "orpo"]
