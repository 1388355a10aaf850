"""`dsft doctor SPEC --network` over two hosts: nothing is said of a healthy pair, a slow link and one that is
cut are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import write_spec
from tests.lab.hosts import Lab
from tests.launching import allowed

DSFT = "import sys; from dsft.cli import main; sys.exit(main())"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = write_spec(tmp_path)
    path.write_text(path.read_text() + "cluster: {hosts: {node1: 1, node2: 1}, interface: e0}\n")
    return path


def doctor(lab: Lab, spec: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what it found of the network: `links` by their ends, and its findings."""
    argv = [sys.executable, "-c", DSFT, "doctor", str(spec), "--network", "--json", *words]
    done = lab.run("node1", argv)
    found = json.loads(done.stdout)
    network = found["network"]
    network["links"] = {(link["sender"], link["receiver"]): link for link in network["links"]}
    network["findings"] = [each for each in found["findings"] if each["check"] in ("links", "all-reduce")]
    return done.returncode, network


def test_a_healthy_pair(lab: Lab, spec: Path) -> None:
    code, network = doctor(lab, spec)
    assert code == 0
    assert {each["level"] for each in network["findings"]} == {"pass"}, network["findings"]
    assert network["links"].keys() == {("node1", "node2"), ("node2", "node1")}
    assert all(link["interface"] == "e0" for link in network["links"].values())
    assert [each["bytes"] for each in network["reduces"]] == [4, 65_536, 1 << 20, 1 << 24]


def test_a_slow_link_is_named(lab: Lab, spec: Path) -> None:
    lab.slow("node2", rate="100mbit", delay="20ms")
    try:
        code, network = doctor(lab, spec)
    finally:
        lab.reset()
    assert code == 0  # a run could start
    warned = [each["value"] for each in network["findings"] if each["level"] == "warning"]
    assert [value.partition(":")[0] for value in warned] == [
        "node1 (e0) → node2 (10.77.0.2)",
        "node2 (e0) → node1 (10.77.0.1)",
    ]
    for link in network["links"].values():
        assert 0.002 < link["gbit"] <= 0.105 and 0.04 <= link["round_trip"] < 0.4, link
    assert "all-reduce" in {each["check"] for each in network["findings"]}


def test_a_link_that_is_cut_is_named(lab: Lab, spec: Path) -> None:
    lab.cut("node2")
    try:
        code, network = doctor(lab, spec)
    finally:
        lab.reset()
    assert code == 69
    [value] = [each["value"] for each in network["findings"] if each["level"] == "failure"]
    assert value.startswith("node1 (e0) → node2: no program could be started there"), value


def test_a_pair_that_cannot_talk_is_named_though_both_answer() -> None:
    """Three hosts, of which node2's packets to node3 go to nobody: ssh from node1 reaches both."""
    from tests.lab.hosts import two_hosts, why_not

    if reason := why_not():
        pytest.skip(reason)
    program = (
        "import json; from dataclasses import asdict; from dsft.doctor.links import measure\n"
        "found = measure({'node1': 1, 'node2': 1, 'node3': 1}, interface='e0')\n"
        "print(json.dumps(asdict(found)))"
    )
    with two_hosts(("node1", "node2", "node3")) as lab:
        nobody = [
            "ip",
            "neigh",
            "replace",
            "10.77.0.3",
            "lladdr",
            "02:00:00:00:00:99",
            "dev",
            "e0",
            "nud",
            "permanent",
        ]
        assert lab.run("node2", nobody).returncode == 0
        done = lab.run("node1", [sys.executable, "-c", program])
    network = json.loads(done.stdout)
    dead = [f["value"] for f in network["findings"] if f["level"] == "failure"]
    assert [value.partition(": no")[0] for value in dead] == [
        "node2 (e0) → node3 (10.77.0.3)",
        "node3 (e0) → node2 (10.77.0.2)",
    ]
    assert network["reduces"] == [] and network["seconds"] < allowed(60)
    alive = [link for link in network["links"] if {link["sender"], link["receiver"]} != {"node2", "node3"}]
    assert len(alive) == 4 and all(link["gbit"] for link in alive)
