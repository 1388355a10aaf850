"""Generated launch scripts under the real `deepspeed`: what reaches other hosts, seen by an ssh and a pdsh
that only write down what they are asked; and a start on this machine alone, which needs neither."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dsft.generate.hostfile import render
from dsft.generate.scripts import deepspeed_script, environment_file, environment_text
from dsft.spec.schema import Cluster

pytest.importorskip("deepspeed")

TRAIN = """
import json, os, sys
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ)}, file)
"""
SSH = '#!/bin/sh\necho "$*" >> "$RECORD/ssh"\necho 10.0.0.1\n'
PDSH = '#!/bin/sh\nfor word in "$@"; do echo "$word" >> "$RECORD/pdsh"; done\n'


def start(root: Path, cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Lay out a repository with the cluster's script and run it from elsewhere."""
    texts = {
        "dsft/train.py": TRAIN,
        "hostfiles/x": render(cluster.hosts),
        "scripts/launch/x.deepspeed.sh": deepspeed_script(cluster, "x", "dsft/train.py", "specs/x.yaml"),
        environment_file("x"): environment_text(cluster) or "",
        "bin/ssh": SSH,
        "bin/pdsh": PDSH,
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    search = os.pathsep.join([str(root / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": search, "RECORD": str(root), "DS_ACCELERATOR": "cpu", "HOME": str(root)}
    script = str(root / "scripts/launch/x.deepspeed.sh")
    return subprocess.run(["bash", script, *arguments], cwd="/", env=environ, capture_output=True, text=True)


def test_other_hosts_get_the_command_and_the_variables(tmp_path: Path) -> None:
    cluster = Cluster(
        hosts={"node1": 2, "node2": 2}, interface="eth0", env={"HF_HUB_OFFLINE": "1", "WORDS": "two words"}
    )
    done = start(tmp_path, cluster, "parallel.zero_stage=3")
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "pdsh").read_text().splitlines()
    assert words[words.index("-w") + 1] == "node1,node2"
    sent = " ".join(words)
    for variable in (
        "HF_HUB_OFFLINE=1",
        'WORDS="two words"',
        "NCCL_SOCKET_IFNAME=eth0",
        "GLOO_SOCKET_IFNAME=eth0",
    ):
        assert f"export {variable};" in sent
    assert f"cd {tmp_path};" in sent and "--master_addr=10.0.0.1" in sent
    assert words[-3:] == ["dsft/train.py", "specs/x.yaml", "parallel.zero_stage=3"]


@pytest.mark.long  # as two hosts
def test_one_named_host_is_reached_too(tmp_path: Path) -> None:
    done = start(tmp_path, Cluster(hosts={"node7": 2}))
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "pdsh").read_text().splitlines()
    assert words[words.index("-w") + 1] == "node7"
    assert not list(tmp_path.glob("rank*.json"))


def test_this_machine_alone_needs_no_ssh(tmp_path: Path) -> None:
    done = start(tmp_path, Cluster(hosts={"localhost": 2}, env={"WORDS": "two words"}), "name=a b")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ssh").exists() and not (tmp_path / "pdsh").exists()
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [one["env"]["WORLD_SIZE"] for one in seen] == ["2", "2"]
    assert seen[1]["env"]["WORDS"] == "two words"
    assert [word for word in seen[0]["argv"] if not word.startswith("--local_rank")] == [
        "specs/x.yaml",
        "name=a b",
    ]
