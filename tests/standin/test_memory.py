"""The plan's memory against torch's own allocator, on the stand-in GPU: one rank, models of 1.3 and 8 billion
parameters. What several ranks share out, tests/integration/test_memory.py has of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.standin.gpu import run

pytestmark = pytest.mark.standin

CLOSE = 0.03


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output = tmp_path_factory.mktemp("memory") / "cases.jsonl"
    done = run(
        "-m", "tests.standin.memory_worker", str(output), PYTORCH_ALLOC_CONF="expandable_segments:True"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read(output)


def read(output: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [case for case in found if "error" in case] == []
    return found


def test_the_plan_is_what_torch_allocates(cases: list[dict[str, Any]]) -> None:
    assert len(cases) > 10
    errors = {
        f"{case['case']}, {phase}": round(case["planned"][phase] / measured - 1, 3)
        for case in cases
        for phase, measured in case["measured"].items()
    }
    assert {name: error for name, error in errors.items() if abs(error) > CLOSE} == {}


def test_the_probe_is_as_full_as_any_step(cases: list[dict[str, Any]]) -> None:
    less = [c["case"] for c in cases if c["measured"]["first_step"] < 0.999 * c["measured"]["steady"]]
    assert less == []
