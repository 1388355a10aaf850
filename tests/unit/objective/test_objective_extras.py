"""Terms that read what the policy returns beside the log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsft.data.steps.batch import MicroBatch
from dsft.engine.build import build_engine
from dsft.errors import SpecError
from dsft.objective.api import Objective, Term
from dsft.objective.next_token import next_token

OBJECTIVE = Objective((Term("rows", 0.5, extra="router"), *next_token().terms), next_token().sums)
IDS = torch.zeros(1, 3, dtype=torch.int64)
MICRO_BATCH = MicroBatch(IDS, IDS, IDS)


def test_an_extra_is_added_up_in_the_place_of_its_term() -> None:
    router = torch.tensor([1.0, 2.0], requires_grad=True)
    sums = OBJECTIVE.term_sums(torch.full((1, 3), -2.0), {"router": router, "other": router}, MICRO_BATCH)
    assert sums.dtype == torch.float64 and sums.tolist() == [3.0, 6.0]
    sums.dot(torch.tensor(OBJECTIVE.scales({"rows": 5, "tokens": 3}), dtype=torch.float64)).backward()
    assert router.grad is not None and router.grad.tolist() == pytest.approx([0.1, 0.1])


def test_an_extra_that_the_policy_does_not_return_is_named() -> None:
    with pytest.raises(ValueError, match=r"extra 'router', and the policy returns none"):
        OBJECTIVE.term_sums(torch.zeros(1, 3), {}, MICRO_BATCH)


def test_a_pipeline_refuses_a_term_that_reads_an_extra() -> None:
    world: Any = SimpleNamespace(layout=SimpleNamespace(pipeline_stages=2))
    with pytest.raises(
        SpecError, match="parallel.pipeline_stages: the objective needs router from the model"
    ):
        build_engine(None, None, {}, world, OBJECTIVE)  # type: ignore[arg-type]
