"""The plan's bytes against those of DeepSpeed's live tensors, and its traffic against what DeepSpeed's
collectives send, on two ranks, for every stage, type and offload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import on_the_cpu, torchrun

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    """What the worker's first rank says of each stage, type and offload."""
    with on_the_cpu():
        done = torchrun(Path(__file__).with_name("memory_worker.py"), 2)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(found) == 14
    return found


def test_the_memory_table_is_what_deepspeed_allocates(cases: list[dict[str, Any]]) -> None:
    off = {
        case["case"]: round(case["measured"] / case["planned"], 3)
        for case in cases
        if not 0.85 <= case["measured"] / case["planned"] <= 1.02
    }
    assert off == {}
    assert [case["case"] for case in cases if not case["freed"]] == []


def test_the_traffic_is_what_deepspeed_sends(cases: list[dict[str, Any]]) -> None:
    assert {
        case["case"]: (case["sent"], case["to_send"])
        for case in cases
        if not 1 <= case["sent"] / case["to_send"] <= 1.01  # norms and flags beside the plan's
    } == {}
