"""A frozen engine scores as the whole model does, alone and beside a policy that trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import forked
from tests.selected import selected, tiered

WORKER = Path(__file__).parent / "frozen_worker.py"
BOUNDS = {"score": 1e-6, "policy": 0.0, "left": 0.0, "reference": 1e-6, "switched": 0.0}
BOUNDS_BF16 = {**BOUNDS, "score": 0.0}  # the same kernels on the same shapes


@pytest.fixture(scope="module")
def figures(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float]]:
    output = tmp_path_factory.mktemp("frozen") / "figures.json"
    done = forked(WORKER, 2, [str(output), *selected(request, "name")])
    errors = "\n".join(path.read_text() for path in sorted(output.parent.glob("*.error")))
    assert done.returncode == 0, errors or done.stderr[-4000:]
    found: dict[str, dict[str, float]] = json.loads(output.read_text())
    return found


MODES = ("replicated", "zero3", "zero3_offload")
NAMES = [
    *(f"{mode}-{precision}" for mode in MODES for precision in ("fp32", "bf16")),
    *("split-replicated-fp32", "split-zero3_offload-fp32"),
    "pipeline-fp32",
    *("beside-0-zero3", "beside-1-replicated", "beside-2-zero3", "beside-3-replicated"),
    *("beside-3-zero3_offload", "beside-pipeline"),
    *("inside-1-lora", "inside-3-lora", "inside-0-dora", "inside-2-head", "inside-pipeline-head"),
    *("inside-1-continued", "inside-2-continued_dora", "inside-3-continued_dora"),
    "inside-pipeline-continued_dora",
]  # fmt: skip


ALWAYS = (
    *("replicated-fp32", "zero3-bf16", "zero3_offload-fp32", "split-zero3_offload-fp32", "pipeline-fp32"),
    *("beside-0-zero3", "beside-3-replicated", "beside-pipeline"),
    *("inside-3-lora", "inside-0-dora", "inside-2-head", "inside-pipeline-continued_dora"),
)
"""Each kind of reference, alone, beside each engine, and inside the policy with each kind of adapter."""


@pytest.mark.parametrize("name", tiered(NAMES, ALWAYS))
def test_frozen_engine_scores_as_whole_model(figures: dict[str, dict[str, float]], name: str) -> None:
    bounds = BOUNDS_BF16 if "bf16" in name else BOUNDS
    over = {key: value for key, value in figures[name].items() if not value <= bounds[key]}
    assert not over
