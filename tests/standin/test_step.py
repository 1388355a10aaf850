"""What a step of training asks of a GPU, and what its host waits for: exact numbers, of bf16 on one rank."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.selected import selected, tiered
from tests.standin.gpu import answer

pytestmark = pytest.mark.standin

MICRO_BATCHES = 2
SYNCS = 2
"""Of DeepSpeed's step: what is the norm of the gradients, are they clipped. None of a micro-batch."""
OF_NORM = int(os.environ.get("STANDIN_TORCH", "") >= "2.15")
"""From 2.15 on torch's norm of many tensors copies the list of them to the device, without waiting."""
BYTES = 60
"""At most that many are moved for each parameter beside what the passes and AdamW move, in a step of two
micro-batches."""


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Any:
    names = [f"{task} {zero_stage}" for task, zero_stage in selected(request, "step")]
    return answer("step_worker", *names, mode="numbers")


CASES = [(task, zero_stage) for task in ("sft", "dpo") for zero_stage in (1, 2, 3)]
ALWAYS = [("sft", 1), ("sft", 2), ("dpo", 3)]


@pytest.mark.parametrize("step", tiered(CASES, ALWAYS), ids=str)
def test_step_adds_no_wait_to_deepspeeds(report: Any, step: tuple[str, int]) -> None:
    task, zero_stage = step
    case = report[f"{task}, ZeRO {zero_stage}"]
    assert case["tensors"] >= MICRO_BATCHES * (6 if task == "dpo" else 3)
    assert not [place for place in case["waits"] if place.startswith("dsft/")], case["waits"]
    in_transformers = sum(n for place, n in case["waits"].items() if place.startswith("transformers/"))
    assert in_transformers <= MICRO_BATCHES
    for counts in case["steps"]:
        assert counts["stream_syncs"] == SYNCS + in_transformers
        assert counts["device_syncs"] == 0
        assert counts["pageable"] == 0
        # beside the micro-batches the factors on their sums, and this rank's row of the record
        assert counts["to_device"] == case["tensors"] + 2 + OF_NORM


def test_record_costs_one_collective_and_two_copies(
    report: Any,
) -> None:
    [step, same], [bare, _] = report["sft, ZeRO 1"]["steps"], report["no record"]["steps"]
    assert step == same
    assert {name: step[name] - bare[name] for name in step if step[name] != bare[name]} == {
        "launches": 1, "on_device": 1, "to_device": 1, "to_host": 2, "event_syncs": 2, "collectives": 1,
    }  # fmt: skip
    assert set(report["sft, ZeRO 1"]["losses"]) == {"1", "2", "3", "4", "5", "6"}
    assert set(report["no record"]["losses"]) == {"6"}


def test_one_rank_accumulates_gradients_in_place(report: Any) -> None:
    for case in ("sft, ZeRO 1", "sft, ZeRO 2", "dpo, ZeRO 3"):
        assert 30 < report[case]["bytes"] <= BYTES, case


def test_late_records_belong_to_their_step(report: Any) -> None:
    """The mean over the whole run is that of its steps, which have equally many targets."""
    steps = list(report["sft, ZeRO 1"]["losses"].values())
    assert len(set(steps)) == len(steps)
    assert report["no record"]["losses"]["6"] == pytest.approx(sum(steps) / len(steps), rel=1e-12)


def test_launches_do_not_depend_on_the_number_of_answers(report: Any) -> None:
    few, many = report["answers"]
    assert few["taken"] == many["taken"]
    assert few["taken"]["stream_syncs"] == few["taken"]["pageable"] == 0
    assert many["sums"] == [-7.0] * 40


@pytest.mark.long
def test_device_calls_per_layer_do_not_depend_on_segments() -> None:
    """The tables of docs/performance.md."""
    report = answer("counts", mode="numbers")
    of_a_layer = {(False, 1): 120, (False, 2): 240, (True, 1): 150, (True, 2): 300}  # a few more elsewhere
    for row in report["steps"]:
        asked, layer = row["step"], row["layer"]
        assert layer["launches"] <= of_a_layer[tuple(row["case"])], row
        assert asked["device_syncs"] == 0 and asked["stream_syncs"] == SYNCS, row
        assert not any(layer[kind] for kind in ("to_device", "to_host", "stream_syncs", "event_syncs")), row
    assert len({(*row["case"], row["step"]["launches"]) for row in report["steps"]}) == len(of_a_layer)
    assert min(report["modules"].values()) >= 5, "fusing saves less than the page says"
