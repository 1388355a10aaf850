"""What a policy returns beside the log-probabilities is trained on, as plain PyTorch would, at every ZeRO
stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import forked, on_the_cpu

WORKER = Path(__file__).with_name("extras_worker.py")


def test_a_term_that_reads_an_extra_has_the_gradient_of_plain_pytorch(tmp_path: Path) -> None:
    with on_the_cpu():
        done = forked(WORKER, 2, [str(tmp_path / "results.json")])
    if done.returncode:
        pytest.fail("\n".join(done.stderr.splitlines()[-60:]))
    found = json.loads((tmp_path / "results.json").read_text())
    assert sorted(found) == ["0", "1", "2", "3"]
    for stage in found.values():
        assert stage["step"] > 0.1, "a gradient that can be told from none"
        assert stage["apart"] < 1e-5 * stage["step"]
        assert stage["sums"] == pytest.approx(stage["plain"], rel=1e-6)
