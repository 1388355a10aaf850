"""Prefetched steps, against the steps themselves, slow ones and ones that fail."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dsft.data.steps.batch import GlobalStep
from dsft.data.steps.prefetch import Prefetcher
from dsft.errors import DataError
from tests.make import make_micro_batch

CPU = torch.device("cpu")
THREAD = "dsft-next-step"


class Steps:
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.made: list[int] = []

    def step(self, index: int) -> GlobalStep:
        self.made.append(index)
        if index == self.fails_at:
            raise DataError("no such row", [])
        tokens = torch.full((1, 2), index)
        return GlobalStep(
            (make_micro_batch(tokens, tokens, tokens, (2,)),), {"tokens": index}, 2, 0.0, (index,)
        )


def test_steps_are_the_same_in_any_order_and_one_is_made_ahead() -> None:
    steps = Steps()
    with Prefetcher(steps.step, 5, CPU) as found:
        for index in (0, 1, 4, 2, 2, 3, 4):
            step = found.step(index)
            assert (step.counts["tokens"], step.example_ids) == (index, (index,))
            assert step.micro_batches[0].tokens.input_ids.tolist() == [[index, index]]
            assert step.micro_batches[0].segments.lengths == (2,)
    assert max(steps.made) == 4, "nothing is made past the last step"
    assert steps.made[:2] == [0, 1] and steps.made.count(3) <= 3


def test_no_more_than_one_step_is_begun_ahead() -> None:
    steps = Steps()
    with Prefetcher(steps.step, 9, CPU) as found:
        found.step(3)
        wait_for(steps, 4)
        time.sleep(0.05)
        assert steps.made == [3, 4]


def test_the_making_of_a_step_hides_behind_the_one_before() -> None:
    steps = Steps()
    with Prefetcher(steps.step, 5, CPU) as found:
        for index in range(4):
            found.step(index)
            wait_for(steps, index + 1)  # while the step trains, and before the next one is asked for
    assert steps.made == [0, 1, 2, 3, 4]


def wait_for(steps: Steps, index: int) -> None:
    while index not in steps.made:
        time.sleep(0.01)


def test_what_fails_ahead_is_raised_by_the_step_that_needs_it_and_the_thread_ends() -> None:
    with pytest.raises(DataError, match="no such row"), Prefetcher(Steps(fails_at=1).step, 5, CPU) as found:
        assert found.step(0).example_ids == (0,)
        time.sleep(0.02)
        found.step(1)
    assert not any(THREAD in thread.name for thread in threading.enumerate())
