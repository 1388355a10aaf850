"""ZeRO 3 keeps bf16 gradients as they are where an fp32 copy would hold the same values, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked, on_the_cpu

WORKER = Path(__file__).with_name("gradient_worker.py")


def compared(folder: Path, ranks: int) -> dict[str, Any]:
    with on_the_cpu():
        done = forked(WORKER, ranks, [str(folder / "results.json")])
    if done.returncode:
        pytest.fail("\n".join(done.stderr.splitlines()[-60:]))
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_bf16_gradients_on_one_rank_train_bit_for_bit(tmp_path: Path) -> None:
    for found in compared(tmp_path, 1).values():
        assert found["by_itself"] == "bf16"
        assert found["differs"] == 0
        assert found["norms"]["fp32"] == found["norms"]["bf16"]
        assert min(found["norms"]["fp32"]) > 0.1  # so that every step was clipped


def test_gradients_on_two_ranks_are_bf16_only_where_their_sum_is(tmp_path: Path) -> None:
    found = compared(tmp_path, 2)
    assert found["bf16"]["by_itself"] == "bf16"
    assert found["bf16"]["differs"] == 0
    assert found["fp32"]["by_itself"] == "fp32"
    assert found["fp32"]["differs"] > 0  # the fp32 sum would be rounded
    # of the class that several GPUs have at ZeRO 1 and 2; its streams are in tests/standin/test_overlap.py
    assert len(found["overlapped"]) == 4 and not any(found["overlapped"].values()), found["overlapped"]
