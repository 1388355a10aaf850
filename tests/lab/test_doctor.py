"""`dsft doctor` over two hosts: each planted fault is found and named, and none on a healthy pair."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsft.engine.toolchain import build_folder
from tests.lab.hosts import ROOT, Lab

PLANT = "mount -t tmpfs -o size={size} none {place}"
LISTEN = (
    "import socket, time; s = socket.create_server(('', 29500)); print('ready', flush=True); time.sleep(60)"
)
COMMAND = "from dsft.cli import main; main()"
GPUS = """#!/bin/sh
case "$*" in *query-gpu*) ;; *) exit 1 ;; esac
for n in {numbers}; do echo "$n, {name}, 81559, {used}, 550.54.15, GPU-$n"; done
"""


@pytest.fixture
def spec(tmp_path: Path, lab: Lab) -> Iterator[Path]:
    """Of two hosts of one slot, with a data file, an output folder and operations of its own."""
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "runs").mkdir()
    compiled(tmp_path).parent.mkdir(parents=True)
    compiled(tmp_path).touch()
    text = (ROOT / "specs" / "two_nodes.yaml").read_text()
    text = text.replace("name: two_nodes", "name: doctored").replace(
        "8, node2: 8}", "1, node2: 1}\n  env: {TORCH_EXTENSIONS_DIR: HERE/ext}"
    )
    text = text.replace("HERE", str(tmp_path))
    text = re.sub(
        r"train: \[.*?\]", f'train: [{{path: "{rows}"}}]\n  cache_dir: {tmp_path}/cache', text, count=1
    )
    text = text.replace("output_dir: runs", f"output_dir: {tmp_path}/runs")
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    yield file
    lab.reset()


def compiled(folder: Path) -> Path:
    """A file that is there is taken for the op that ranks on CPUs need."""
    return folder / "ext" / build_folder().name / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"


def examine(lab: Lab, spec: Path, *words: str) -> tuple[list[dict[str, Any]], int, float]:
    """Its findings, its exit code, its seconds as it says them: Python's own start is not among them."""
    done = lab.run(
        "node1", [sys.executable, "-c", COMMAND, "doctor", str(spec), "--json", *words], cwd=spec.parent
    )
    assert done.stdout, done.stderr
    printed = json.loads(done.stdout)
    assert printed["exit_code"] == done.returncode
    return printed["findings"], done.returncode, printed["seconds"]


def assert_quick(seconds: float) -> None:
    """The bound of two hosts, 10 seconds. On a machine with three processes waiting for each core every one
    takes many times its own time, and a clock says nothing of the doctor."""
    if os.getloadavg()[0] < 3 * (os.cpu_count() or 1):
        assert seconds < 10


def faults(findings: list[dict[str, Any]]) -> dict[tuple[str, str | None], str]:
    """(check, host) -> level and value, of what is not in order; each says why, and what to do."""
    found = {}
    for finding in findings:
        if finding["level"] != "pass":
            assert finding["why"] and finding["do"], finding
            found[finding["check"], finding["host"]] = f"{finding['level']}: {finding['value']}"
    return found


def shell(lab: Lab, host: str, script: str) -> None:
    done = lab.run(host, ["sh", "-ec", script])
    assert done.returncode == 0, done.stderr


def test_healthy_pair(lab: Lab, spec: Path) -> None:
    """Also where a start-up file of the shell prints, without an end of line. The bound is 10 seconds."""
    compiled(spec.parent).unlink()  # so the compiler is tried
    noise = Path(lab.environ["HOME"]) / ".bashrc"
    noise.write_text("printf 'welcome to {\"a\": 1} '; echo; printf 'news: '\n")
    try:
        findings, code, seconds = examine(lab, spec)
    finally:
        noise.unlink()
    assert faults(findings) == {}
    assert code == 0
    assert {finding["check"] for finding in findings} >= {
        "reach", "versions", "devices", "names", "interface", "connection", "port", "shared", "space", "shm",
        "files", "compiler", "open files", "locked memory",
    }  # fmt: skip
    assert_quick(seconds)
    assert list((spec.parent / "runs").iterdir()) == [], "what it writes is gone"
    assert lab.processes() == []


def test_many_faults_at_once(lab: Lab, spec: Path) -> None:
    """Another version, a taken port, a full folder, an output folder that is not shared, other data: all are
    named in one go."""
    folder = spec.parent
    metadata = Path(str(importlib.metadata.distribution("transformers")._path), "METADATA")  # type: ignore[attr-defined]
    (folder / "metadata").write_text(re.sub(r"(?m)^Version: .*$", "Version: 5.0.0", metadata.read_text()))
    (folder / "other.jsonl").write_text((folder / "rows.jsonl").read_text().replace('"b"', '"bc"'))
    planted = {
        metadata: f"mount --bind {folder}/metadata {metadata}",
        folder / "rows.jsonl": f"mount --bind {folder}/other.jsonl {folder}/rows.jsonl",
        folder / "cache": PLANT.format(size="1m", place=folder / "cache"),
        folder / "runs": PLANT.format(size="8g", place=folder / "runs"),
        Path("/etc/hosts"): f"mount --bind {folder}/hosts /etc/hosts",
    }
    (folder / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node2\n10.77.0.1 node1\n")  # as Debian's
    with lab.start("node1", [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as taken:
        assert taken.stdout is not None and taken.stdout.readline()
        try:
            for command in planted.values():
                shell(lab, "node2", command)
            findings, code, seconds = examine(lab, spec)
        finally:
            for place in planted:
                lab.run("node2", ["umount", str(place)])
            taken.kill()
    found = faults(findings)
    assert code == 69
    assert set(found) == {
        ("versions", None), ("port", "node1"), ("space", "node2"), ("shared", "node2"), ("files", None),
    }  # fmt: skip
    assert all(value.startswith("failure") for value in found.values())
    assert (
        "transformers differs: node1 " in found["versions", None] and "node2 5.0.0" in found["versions", None]
    )
    assert "29500 is used by process " in found["port", "node1"]
    assert re.search(rf"data\.cache_dir {folder}/cache has [\d.]+ [KM]?i?B free", found["space", "node2"])
    assert "is not the folder that node1 has" in found["shared", "node2"]
    assert str(folder / "rows.jsonl") in found["files", None]
    assert_quick(seconds)


def test_host_that_is_down_and_one_without_sshd(lab: Lab, spec: Path) -> None:
    lab.stop_sshd("node2")
    findings, code, seconds = examine(lab, spec)
    assert code == 69
    assert "no sshd listens there" in faults(findings)["reach", "node2"]
    assert_quick(seconds)
    lab.mend("node2")
    lab.cut("node2")
    findings, code, seconds = examine(lab, spec)
    assert code == 69
    assert "it does not answer" in faults(findings)["reach", "node2"]
    assert ("reach", "node1") not in faults(findings)
    assert_quick(seconds)  # ssh gives up after 5


def test_a_wrong_interface_and_a_host_without_dsft(lab: Lab, spec: Path) -> None:
    findings, code, _ = examine(lab, spec, "cluster.interface=e9")
    assert code == 69
    assert "e9 does not exist; interfaces that are up: e0" in faults(findings)["interface", "node2"]
    own = ROOT / "dsft"
    try:
        shell(lab, "node2", PLANT.format(size="1m", place=own))
        findings, code, _ = examine(lab, spec)
    finally:
        lab.run("node2", ["umount", str(own)])
    assert code == 69
    assert "its dsft is missing or is another version" in faults(findings)["reach", "node2"]


def test_slots_kinds_and_memory_of_gpus(lab: Lab, spec: Path) -> None:
    """What nvidia-smi prints is a program's of this test: no GPU is here."""
    text = spec.read_text().replace("1, node2: 1}", "2, node2: 2}")
    spec.write_text(text)
    places = {"node1": ("0 1", "NVIDIA H100 80GB HBM3", 3), "node2": ("0", "NVIDIA A100-SXM4-80GB", 40000)}
    try:
        for host, (numbers, name, used) in places.items():
            file = spec.parent / f"nvidia-smi.{host}"
            file.write_text(GPUS.format(numbers=numbers, name=name, used=used))
            shell(
                lab, host,
                f"{PLANT.format(size='1m', place='/usr/local/sbin')}; "
                f"install -m 755 {file} /usr/local/sbin/nvidia-smi",
            )  # fmt: skip
        findings, code, _ = examine(
            lab, spec, "cluster.env.DS_ACCELERATOR=cuda", "cluster.env.CUDA_VISIBLE_DEVICES=0,1"
        )
    finally:
        for host in places:
            lab.run(host, ["umount", "/usr/local/sbin"])
    found_lines = [
        f"{each['level']} {each['host']} {each['value']}" for each in findings if each["check"] == "devices"
    ]
    assert code == 69
    assert found_lines == [
        "failure node2 2 slots and 1 GPU(s) (NVIDIA A100-SXM4-80GB)",
        "warning node2 memory in use: GPU 0 40,000 of 81,559 MiB",
        "warning None several kinds of GPU: NVIDIA H100 80GB HBM3 on node1; NVIDIA A100-SXM4-80GB on node2",
        "pass node1 2 × NVIDIA H100 80GB HBM3",
    ]


def test_through_srun(lab: Lab, spec: Path) -> None:
    """Inside of an allocation, without ssh; a host that is not of it is named."""
    from tests.lab.slurm import why_not

    if reason := why_not():
        pytest.skip(reason)
    lab.stop_sshd("node2")
    with lab.slurm():
        for hosts, expected in ((2, 0), (1, 69)):
            words = [
                "salloc", "--quiet", f"-N{hosts}", sys.executable, "-c", COMMAND, "doctor", str(spec),
                "--json",
            ]  # fmt: skip
            done = lab.run("node1", [*words, "cluster.launcher=slurm"], cwd=spec.parent)
            found = faults(json.loads(done.stdout)["findings"])
            assert done.returncode == expected, done.stderr
            assert [key for key in found] == ([] if hosts == 2 else [("reach", "node2")])
    assert "not among the hosts of this Slurm allocation" in found["reach", "node2"]
