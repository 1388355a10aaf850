"""The memory probe before the first step allocates what steps do, and changes nothing that follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked, on_the_cpu
from tests.parity.cases import core, probes
from tests.selected import selected, tiered

WORKER = Path(__file__).with_name("probe_worker.py")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("probe") / "results.jsonl"
    with on_the_cpu():
        done = forked(WORKER, 2, [str(output), *selected(request, "name")])
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-60:])
    found = [json.loads(line) for line in output.read_text().splitlines()]
    return {result["case"]: result for result in found}


NAMES = [case.name for case in probes()]
CORE = [case.name for case in core(probes(), paired=())]  # every value of each field once


@pytest.mark.parametrize("name", tiered(NAMES, CORE))
def test_probe_changes_no_bit_of_a_run(results: dict[str, Any], name: str) -> None:
    found = results[name]
    assert found["differences"] == []
    assert found["compared"] > 20
    assert found["allocated"] > 0, "the probe's step makes the optimizer's states"
    assert found["before"] == found["allocated"], "and has them in its backward"
    assert set(found["rates"]) == {0.0}
