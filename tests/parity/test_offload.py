"""The case in which DeepSpeed's pipeline loses gradients in silence: ZeRO 1, CPU offload, bf16, tied
embedding. And each rank reads its part alone of parameters that stay in host memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked, on_the_cpu

WORKER = Path(__file__).with_name("offload_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("offload") / "found.json"
    with on_the_cpu():
        done = forked(WORKER, 2, [str(output)])
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-60:])
    return json.loads(output.read_text())


def test_tied_copies_diverge_in_plain_deepspeed(found: dict[str, Any]) -> None:
    """Were this no longer so, the row of spec/rules.py and the reason in engine/pipeline.py would go."""
    assert found["apart"]["offload"] > 1e-2


@pytest.mark.parametrize(
    "case", ["offload, gradients kept in the type of the weights", "on the device", "offload, dsft"]
)
def test_tied_copies_stay_equal(found: dict[str, Any], case: str) -> None:
    assert found["apart"][case] == 0.0
    assert found["moved"][case] > 1e-2


def test_rank_loads_only_its_part_into_host_memory(found: dict[str, Any]) -> None:
    assert found["spans"] == [[0, 5], [5, 10]]
