"""`dsft doctor SPEC --network` over two hosts: no warning of a healthy pair; a slow link is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import write_spec
from tests.lab.hosts import Lab

DSFT = "import sys; from dsft.cli import main; sys.exit(main())"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = write_spec(tmp_path)
    path.write_text(path.read_text() + "cluster: {hosts: {node1: 1, node2: 1}, interface: e0}\n")
    return path


def doctor(lab: Lab, spec: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and what it has found of the network: `links` by their ends, and its findings."""
    argv = [sys.executable, "-c", DSFT, "doctor", str(spec), "--network", "--json", *words]
    done = lab.run("node1", argv)
    found = json.loads(done.stdout)
    network = found["network"] or {"links": []}
    network["links"] = {(link["sender"], link["receiver"]): link for link in network["links"]}
    network["findings"] = [each for each in found["findings"] if each["check"] in ("links", "all-reduce")]
    return done.returncode, network


def test_healthy_pair(lab: Lab, spec: Path) -> None:
    code, network = doctor(lab, spec)
    assert code == 0
    assert {each["level"] for each in network["findings"]} == {"pass"}, network["findings"]
    assert network["links"].keys() == {("node1", "node2"), ("node2", "node1")}
    assert [each["bytes"] for each in network["reduces"]] == [4, 65_536, 1 << 20, 1 << 24]
    assert lab.processes() == []


def test_slow_link_is_named(lab: Lab, spec: Path) -> None:
    lab.slow("node2", rate="100mbit", delay="20ms")
    try:
        code, network = doctor(lab, spec, "--expect-gbit", "1")
    finally:
        lab.reset()
    assert code == 0  # a run could start
    warned = [each["value"] for each in network["findings"] if each["level"] == "warning"]
    assert [value.partition(":")[0] for value in warned] == ["node2 → node1", "node1 → node2"]
    for link in network["links"].values():
        assert 0.002 < link["gbit"] <= 0.105 and 0.02 <= link["seconds"] < 0.4, link
    assert "all-reduce" in {each["check"] for each in network["findings"]}


def test_nothing_is_measured_where_a_host_is_not_reached(lab: Lab, spec: Path) -> None:
    lab.cut("node2")
    try:
        code, network = doctor(lab, spec)
    finally:
        lab.reset()
    assert code == 69 and network == {"links": {}, "findings": []}
