"""The plan's bytes against those of DeepSpeed's live tensors, and its traffic against what DeepSpeed's
collectives send, on two ranks, for every stage, type and offload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked, on_the_cpu
from tests.selected import selected, tiered

pytest.importorskip("deepspeed")

TYPES = tiered(["bf16", "fp32"], ["bf16"])


Found = dict[str, list[dict[str, Any]]]
GATHERED = "gathered"


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Found:
    """By type: what the worker's first rank says of each stage and offload; under GATHERED what ZeRO 3 has
    whole of a mixture of experts, with a limit below a layer's experts and with one above."""
    types = selected(request, "precision")
    with on_the_cpu():
        done = forked(Path(__file__).with_name("memory_worker.py"), 2, types)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    found = {name: [line for line in lines if line["case"].startswith(name)] for name in types}
    assert {len(cases) for cases in found.values()} == {8}
    found[GATHERED] = [
        json.loads(line[9:]) for line in done.stdout.splitlines() if line.startswith("GATHERED ")
    ]
    return found


@pytest.mark.parametrize("precision", TYPES)
def test_planned_memory_is_what_deepspeed_allocates(measured: Found, precision: str) -> None:
    cases = measured[precision]
    off = {
        case["case"]: round(case["measured"] / case["planned"], 3)
        for case in cases
        if not 0.84 <= case["measured"] / case["planned"] <= 1.02
    }
    assert off == {}
    assert [case["case"] for case in cases if not case["freed"]] == []


@pytest.mark.parametrize("precision", TYPES)
def test_planned_traffic_is_what_deepspeed_sends(measured: Found, precision: str) -> None:
    cases = measured[precision]
    assert {
        case["case"]: (case["sent"], case["to_send"])
        for case in cases
        if not 1 <= case["sent"] / case["to_send"] <= 1.01  # norms and flags beside the plan's
    } == {}


def test_zero_3_gathers_as_planned(measured: Found) -> None:
    most = [case["most"] for case in measured[GATHERED]]
    assert most == [case["planned"] for case in measured[GATHERED]]
    assert most[0] < most[1], "a higher limit lets it gather more ahead"
