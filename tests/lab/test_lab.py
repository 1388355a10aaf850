"""The lab itself: each host is alone with its processes, and what is cut, slow or stopped is so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.lab.hosts import ROOT, Lab, two_hosts, why_not
from tests.lab.slurm import why_not as no_slurm
from tests.launching import LATE, allowed

ROUND_TRIP = """
import socket, time
link = socket.create_connection(("node2", 5000))
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
begin = time.monotonic()
for _ in range(4):
    link.send(b"x"), link.recv(1)
print((time.monotonic() - begin) / 4)
begin = time.monotonic()
link.sendall(bytes(100_000)), link.shutdown(socket.SHUT_WR), link.recv(1)
print(100_000 * 8 / (time.monotonic() - begin))
"""
ECHO = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
link, _ = server.accept()
for _ in range(4):
    link.send(link.recv(1))
while link.recv(1 << 16):
    pass
link.send(b"k")
"""


def reached(lab: Lab, host: str) -> int:
    argv = ["ssh", "-o", "ConnectTimeout=1", host, "true"]
    return lab.run("node1", argv).returncode


def test_hosts_are_two(lab: Lab) -> None:
    assert lab.run("node1", ["hostname"]).stdout == "node1\n"
    assert lab.run("node1", ["ssh", "node2", "hostname; hostname -I"]).stdout.split() == [
        "node2",
        "10.77.0.2",
    ]
    printed = lab.run("node1", ["pdsh", "-w", "node1,node2", "hostname"]).stdout
    assert sorted(printed.splitlines()) == ["node1: node1", "node2: node2"]
    (Path("/dev/shm") / "dsft-lab-own").unlink(missing_ok=True)
    lab.run("node1", ["touch", "/dev/shm/dsft-lab-own"])
    assert lab.run("node2", ["ls", "/dev/shm"]).stdout == ""
    assert not Path("/dev/shm/dsft-lab-own").exists()


def test_processes_of_a_host_are_seen_from_outside_only(lab: Lab) -> None:
    process = lab.start("node1", ["ssh", "node2", "MARK=of-a-test exec sleep 600"])
    until = time.monotonic() + LATE
    while not (found := [seen for seen in lab.processes("of-a-test") if seen.argv[0] == "sleep"]):
        assert time.monotonic() < until
        time.sleep(0.05)
    (seen,) = found
    assert (seen.host, psutil.Process(seen.pid).name()) == ("node2", "sleep")
    assert lab.outside("node2", seen.inside) == seen.pid
    assert "sleep" not in lab.run("node1", ["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout
    os.kill(seen.pid, signal.SIGKILL)
    assert process.wait(LATE) != 0
    lab.reset()
    assert lab.processes() == []


def test_a_host_is_cut_slowed_and_mended(lab: Lab) -> None:
    assert reached(lab, "node2") == 0
    lab.cut("node2")
    assert reached(lab, "node2") == 255
    lab.mend("node2")
    lab.stop_sshd("node2")
    assert reached(lab, "node2") == 255
    lab.slow("node2", rate="2mbit", delay="20ms")
    echo = lab.start("node2", [sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
    seconds, bits = map(float, lab.run("node1", [sys.executable, "-c", ROUND_TRIP]).stdout.split())
    assert 0.04 <= seconds < allowed(0.4) and 0.5e6 / allowed(1) < bits <= 2.0e6
    lab.reset()
    assert reached(lab, "node2") == 0


def test_killed_owner_leaves_no_process() -> None:
    if reason := why_not():
        pytest.skip(reason)
    program = (
        "from tests.lab.hosts import two_hosts\n"
        "import time\n"
        "with two_hosts() as lab:\n"
        "    lab.start('node1', ['ssh', 'node2', 'exec sleep 600'])\n"
        "    while not [seen for seen in lab.processes() if seen.argv[0] == 'sleep']: time.sleep(0.05)\n"
        "    print(*[seen.pid for seen in lab.processes()], lab.folder, flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    *pids, folder = owner.stdout.readline().split()
    assert len(pids) >= 3 and Path(folder).exists()  # ssh, sshd, sleep
    owner.kill()
    owner.communicate()
    until = time.monotonic() + LATE
    while any(psutil.pid_exists(int(pid)) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)
    with two_hosts():
        assert not Path(folder).exists()


def test_slurm_starts_tasks_on_both_hosts(lab: Lab) -> None:
    if reason := no_slurm():
        pytest.skip(reason)
    with lab.slurm() as slurm:
        printed = lab.run(
            "node1", ["srun", "-N2", "--ntasks-per-node=1", "sh", "-c", "echo $SLURM_PROCID $(hostname)"]
        )
        assert sorted(printed.stdout.splitlines()) == ["0 node1", "1 node2"], printed
        out = slurm.folder / "out"
        asked = [
            "sbatch", "--parsable", "-N2", "--gpus-per-node=1", "--output", str(out), "--wrap",
            "srun hostname",
        ]  # fmt: skip
        job = lab.run("node1", asked).stdout.strip()
        assert slurm.wait(job)["JobState"] == "COMPLETED"
        assert sorted(out.read_text().split()) == ["node1", "node2"]
    assert lab.processes() == []
