"""The world over two hosts: another one than promised stops on every rank, before torch is imported wherever
the launcher tells; and under torchrun's elastic launch a run goes on with the host that is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.runs import TRAIN, records, trained, write_spec
from tests.lab.hosts import ROOT, Lab
from tests.lab.slurm import why_not as no_slurm
from tests.launching import LATE

ONE_OF_TWO = "cluster={hosts: {node1: 1, node2: 1}, min_hosts: 1}"
OTHER = "cluster.hosts={node1: 2}"
SAID = "cluster.hosts expects 2 processes (node1 2) but {} started 2"


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Variables under which whoever imports torch ends with 99."""
    (tmp_path / "no" / "torch").mkdir(parents=True)
    (tmp_path / "no" / "torch" / "__init__.py").write_text("raise SystemExit(99)\n")
    return {"PYTHONPATH": f"{tmp_path / 'no'}:{ROOT}"}


@pytest.mark.skipif(no_slurm() is not None, reason=str(no_slurm()))
def test_tasks_of_srun_stop_before_torch(lab: Lab, tmp_path: Path, without_torch: dict[str, str]) -> None:
    spec = write_spec(tmp_path)
    with lab.slurm():
        words = ["srun", "--nodes=2", sys.executable, str(TRAIN), str(spec), OTHER]
        ended = lab.run("node1", words, env=without_torch)
        script = tmp_path / "alone.sh"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} {TRAIN} {spec}\n")
        words = ["sbatch", "--wait", "--nodes=2", f"--output={tmp_path / 'out'}", str(script)]
        alone = lab.run("node1", words, env=without_torch)
    assert f"{SAID.format('srun')} on 2 hosts (1 + 1): srun's --nodes and --ntasks-per-node" in ended.stderr
    for rank, host in enumerate(("node1", "node2")):
        assert f"{host}: task {rank}: Exited with exit code 69" in ended.stderr
    assert alone.returncode == 69 and "put srun before the command" in (tmp_path / "out").read_text()


@pytest.mark.long  # as under srun
def test_processes_of_mpirun_stop_before_torch(
    lab: Lab, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    spec, hostfile = write_spec(tmp_path), tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    words = [
        "mpirun", "-n", "2", "-hostfile", str(hostfile), "--mca", "plm_rsh_args",
        lab.environ["DSFT_SSH_ARGS"],
    ]  # fmt: skip
    words += ["-x", "PYTHONPATH", sys.executable, str(TRAIN), str(spec)]
    ended = lab.run("node1", [*words, OTHER], env=without_torch)
    assert f"{SAID.format('mpirun')}: mpirun's -n and hostfile decide that" in ended.stderr
    assert ended.returncode == 69 and not lab.processes(str(TRAIN))


@pytest.mark.long  # on one host tests/integration/test_launchers.py always tries deepspeed
def test_ranks_under_pdsh_know_all_hosts(lab: Lab, tmp_path: Path) -> None:
    spec, hostfile = write_spec(tmp_path), tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    words = ["deepspeed", "--hostfile", str(hostfile), str(TRAIN), str(spec), OTHER]
    ended = lab.run("node1", words)
    assert f"{SAID.format('deepspeed')} on 2 hosts (1 + 1): give the launcher" in ended.stdout + ended.stderr
    assert not lab.processes(str(TRAIN)) and not (tmp_path / "runs").exists()


def test_hosts_without_variables_are_compared_once_all_have_met(lab: Lab, tmp_path: Path) -> None:
    """The five variables alone name no hosts. They meet though each host's own name is a loopback address, as
    Debian writes /etc/hosts: gloo would listen where no other host reaches it."""
    spec = write_spec(tmp_path)
    five = {"WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29521", "LOCAL_RANK": "0"}
    five["GLOO_SOCKET_IFNAME"] = ""  # which the lab names
    addresses = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
    ranks = []
    try:
        for host in addresses:
            known = {**addresses, host: "127.0.1.1"}
            names = "".join(f"{address} {name}\n" for name, address in known.items())
            (tmp_path / f"{host}.hosts").write_text(f"127.0.0.1 localhost\n{names}")
            lab.run(host, ["mount", "--bind", str(tmp_path / f"{host}.hosts"), "/etc/hosts"])
        for rank, host in enumerate(addresses):
            with (tmp_path / host).open("w") as out:
                words = [sys.executable, str(TRAIN), str(spec), OTHER]
                own = {**five, "RANK": str(rank)}
                ranks.append(lab.start(host, words, env=own, stdout=out, stderr=subprocess.STDOUT))
        assert [rank.wait(LATE) for rank in ranks] == [69, 69], (tmp_path / "node1").read_text()
    finally:
        for host in addresses:
            lab.run(host, ["umount", "/etc/hosts"])
    text = (tmp_path / "node1").read_text()
    assert f"{SAID.format('environment')} on 2 hosts (1 + 1): WORLD_SIZE decides that" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.long  # a lost host is always tried in tests/lab/test_supervised_faults.py
def test_run_goes_on_with_the_remaining_host(lab: Lab, tmp_path: Path) -> None:
    """All processes of node2 are killed: torchrun starts again on node1, from the last checkpoint, and the
    losses are those of one host that goes on from there."""
    spec = write_spec(tmp_path)
    options = [
        ONE_OF_TWO,
        "checkpoint={every: 5, keep_last: 20}",
        "train.max_steps=40",
        "train.eval_every=null",
    ]
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "node1:29522", "--rdzv_id", "elastic"]
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max-restarts", "2",
        "--nproc_per_node", "1", *meet, str(TRAIN), str(spec), *options,
    ]  # fmt: skip
    agents = []
    for host in ("node1", "node2"):
        last_call = ["--rdzv_conf", f"last_call_timeout=2,is_host={int(host == 'node1')}"]
        argv = [*words[:3], *last_call, *words[3:]]
        with (tmp_path / f"{host}.out").open("w") as out, (tmp_path / f"{host}.err").open("w") as err:
            agents.append(lab.start(host, argv, cwd=tmp_path, stdout=out, stderr=err))
    run = tmp_path / "runs" / "small"
    until = time.monotonic() + LATE
    while not (run / "checkpoints" / "step-10").exists():
        assert time.monotonic() < until and agents[0].poll() is None, (tmp_path / "node1.err").read_text()
        time.sleep(0.02)
    for seen in lab.processes(host="node2"):
        os.kill(seen.pid, signal.SIGKILL)
    assert agents[0].wait(LATE) == 0, (tmp_path / "node1.err").read_text()
    text = (tmp_path / "node1.out").read_text()
    assert text.count("rank map: 0 = node1 0, 1 = node2 0\n") == 1 and "1 process on 1 host" in text
    assert text.count("rank map: 0 = node1 0\n") == 1
    assert "warning: 1 host of cluster.hosts is missing, as cluster.min_hosts allows" in text
    step = int(text.partition("going on from step ")[2].partition(":")[0])
    assert 10 <= step < 40

    alone = tmp_path / "runs" / "alone" / "checkpoints" / f"step-{step}"
    shutil.copytree(run / "checkpoints" / f"step-{step}", alone)
    assert f"going on from step {step}" in trained(spec, *options, "name=alone", nproc=1)
    for key in ("train/loss", "train/grad_norm"):
        own, other = (records(tmp_path / "runs" / name, key) for name in ("small", "alone"))
        assert list(own) == list(range(1, 41)) and list(other) == list(range(step + 1, 41))
        assert {at: own[at] for at in other} == other
