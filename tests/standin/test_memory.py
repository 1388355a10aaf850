"""The plan's memory against torch's own allocator, on the stand-in GPU: one rank, models of 1.3 and 8 billion
parameters. What several ranks share out, tests/integration/test_memory.py has of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.selected import selected, tiered
from tests.standin.gpu import run

pytestmark = pytest.mark.standin

CLOSE = 0.03
ALWAYS = (
    "1.3B zero2 bf16 accumulation", "1.3B zero3 bf16", "8B zero2 bf16 lora checkpointing",
    "8B zero2 bf16 distill 2048", "experts zero0 bf16 muon",
)  # fmt: skip
NAMES = (
    *ALWAYS, "1.3B zero0 bf16", "1.3B zero1 bf16", "1.3B zero2 bf16", "1.3B zero1 fp32", "1.3B zero2 fp32",
    "1.3B zero1 bf16 accumulation", "1.3B zero3 bf16 accumulation", "1.3B zero1 bf16 checkpointing 16k",
    "1.3B zero1 bf16 lora", "8B zero0 bf16 lora", "8B zero3 bf16 checkpointing",
    "experts zero1 bf16 muon", "experts zero2 bf16 muon", "experts zero3 bf16 muon",
    "experts zero2 fp32 muon", "8B zero2 bf16 distill 8192",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By name, of the cases that are selected."""
    output = tmp_path_factory.mktemp("memory") / "cases.jsonl"
    done = run(
        "memory_worker", str(output), *selected(request, "name"),
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {case["case"]: case for case in read(output)}


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", tiered(NAMES, ALWAYS))
def test_planned_memory_is_what_torch_allocates(name: str, cases: dict[str, dict[str, Any]]) -> None:
    case = cases[name]
    assert "error" not in case, case["error"]
    assert case["measured"]["first_step"] >= 0.999 * case["measured"]["steady"], (
        "the probe is as full as a step"
    )
    errors = {phase: round(case["planned"][phase] / size - 1, 3) for phase, size in case["measured"].items()}
    assert {phase: error for phase, error in errors.items() if abs(error) > CLOSE} == {}
