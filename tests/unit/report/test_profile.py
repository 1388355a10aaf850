"""The trace of one step of several, read back."""

import json
from pathlib import Path

import pytest
import torch

from dsft.errors import SpecError
from dsft.report.profile import StepTrace, traced_step


def test_one_step_is_traced_with_its_operations(tmp_path: Path) -> None:
    printed: list[str] = []
    trace = StepTrace(tmp_path, 2, printed.append)
    for step in (1, 2, 3):
        with trace(step):
            torch.ones(8, 8 * step) @ torch.ones(8 * step, 8)
    assert printed == [f"trace of step 2: {tmp_path / 'logs' / 'trace-step-2.json'}"]
    events = json.loads(trace.path.read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert [event["args"]["Input Dims"] for event in products] == [[[8, 16], [16, 8]]]


@pytest.mark.parametrize(
    ("asked", "first", "last", "step"),
    [(None, 1, 100, 3), (None, 11, 12, 12), (None, 5, 5, 5), (7, 1, 10, 7), (10, 10, 10, 10)],
)
def test_the_step_is_the_third_unless_asked(asked: int | None, first: int, last: int, step: int) -> None:
    assert traced_step(asked, first, last) == step


def test_a_step_that_is_not_trained_is_refused() -> None:
    with pytest.raises(SpecError, match="trains steps 11 to 20"):
        traced_step(3, 11, 20)
