"""A rank of real engines that is stopped and continued from outside is named, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import forked

pytest.importorskip("deepspeed")

HEALTHY, SLOWED = 30, 60


@pytest.mark.long  # the rule is tried in tests/unit/report/test_hosts.py
def test_slow_rank_is_named() -> None:
    done = forked(Path(__file__).with_name("lagging_worker.py"), 2, [str(HEALTHY), str(SLOWED)])
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert [case["case"] for case in cases] == ["ZeRO 2", "ZeRO 3", "data"]
    for case in cases:
        # A busy machine's own noise may name a rank sooner, so the step is not asked for.
        named = [line for _, line in case["messages"] if line.startswith("warning: rank 1 (")]
        assert named and " lags: over " in named[0], case
        hosts = {name.split("/")[1] for name in case["last"] if name.startswith("host/")}
        assert len(hosts) == 1, hosts
