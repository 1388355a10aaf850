"""The check at step 0 on real engines of two ranks: what passes, in every layout and type, and each cause.
Held-out pairs are scored by the same engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import forked

pytest.importorskip("deepspeed")

WEIGHTS = "pairs are the same in both: the reference has other weights"
CAUSES = {
    "dropout": "dropout is on",
    "other weights": WEIGHTS,
    "other weights, pipeline": WEIGHTS,
    "one weight in bf16": WEIGHTS,
    "another template": WEIGHTS,
    "other rows": "others were scored from different rows",
    "an adapter that the reference lacks": "the policy without its adapter",
}


def test_check_at_step_0() -> None:
    done = forked(Path(__file__).with_name("first_step_worker.py"), 2)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(cases) == 14
    for case in cases:
        first, second = case["messages"]
        assert first == second  # on every rank
        assert case["apart"][0] == case["apart"][1]
        cause = CAUSES.get(case["case"])
        if cause is None:
            assert "the policy equals its reference" in first, case
            assert "allowed for rounding: 1e-05" in first or "bf16" in case["case"], case
            assert case["apart"][0] < (1.0 if "bf16" in case["case"] else 1e-4), case
        else:
            assert cause in first and "pairs.jsonl:" in first, case
