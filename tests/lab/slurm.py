"""Slurm inside a lab: takes the lab, gives slurmctld on its first host and munged and slurmd on each.

with two_hosts() as lab, cluster(lab):
    lab.run("node1", ["srun", "-N2", "hostname"])
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launching import LATE

if TYPE_CHECKING:
    from tests.lab.hosts import Lab

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "setpriv")

# Two tasks may share a processor: each host has two, and a test's ranks are few and small.
# Two devices that are there stand for GPUs, so that a script that asks for them is taken; a task is given
# their numbers (CUDA_VISIBLE_DEVICES).
GPUS = "AutoDetect=off\nName=gpu File=/dev/full\nName=gpu File=/dev/zero\n"
CONFIG = """ClusterName=lab
SlurmctldHost={first}({address})
AuthType=auth/munge
AuthInfo=cred_expire=5
SchedulerParameters=bf_interval=2,sched_interval=2
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmdUser=root
ReturnToService=2
KillWait=5
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%h
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile={folder}/slurmd-%h.log
{nodes}
PartitionName=lab Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """`folder`: its configuration, logs and state."""

    lab: Lab
    folder: Path

    def jobs(self) -> str:
        """What squeue says: one line per job, `id state reason`."""
        return self.lab.run("node1", ["squeue", "--noheader", "--format=%i %T %r"]).stdout

    def state(self, job: str) -> dict[str, str]:
        """`scontrol show job`, key to value; empty once Slurm has forgotten it."""
        output = self.lab.run("node1", ["scontrol", "--oneliner", "show", "job", job]).stdout
        return dict(word.split("=", 1) for word in output.split() if "=" in word)

    def wait(self, job: str, timeout: float = LATE) -> dict[str, str]:
        """The job's state once it has ended. Raises TimeoutError."""
        until = time.monotonic() + timeout
        while (found := self.state(job)).get("JobState") in (
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "COMPLETING",
        ):
            if time.monotonic() > until:
                raise TimeoutError(f"job {job} is still {found['JobState']} after {timeout:g} s: {found}")
            time.sleep(0.2)
        return found


def why_not() -> str | None:
    from tests.lab.hosts import search_path
    from tests.lab.hosts import why_not as no_hosts

    if reason := no_hosts():
        return reason
    if absent := [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]:
        return f"not installed: {', '.join(absent)}; scripts/lab installs them"
    return None


@contextmanager
def cluster(lab: Lab) -> Iterator[Slurm]:
    """Every node is idle. The daemons, and all that runs on the hosts, end with the block. Raises
    RuntimeError, with the logs, where one does not start."""
    if reason := why_not():
        raise RuntimeError(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=lab.folder))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    _configure(lab, folder)
    daemons = []
    first = next(iter(lab.hosts))
    for host in lab.hosts:
        daemons.append((host, ["munged", "--foreground", "--force", *_munge_files(folder, host)]))
    daemons.append((first, ["slurmctld", "-D"]))
    daemons += [(host, ["slurmd", "-D", "-N", host]) for host in lab.hosts]
    running = []
    try:
        for host, argv in daemons:
            with (folder / f"{argv[0]}-{host}.out").open("w") as out:
                as_munge = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
                words = [*as_munge, *argv] if argv[0] == "munged" else argv
                running.append(lab.start(host, words, stdout=out, stderr=out, cwd="/"))
        _wait_until_idle(lab, first, folder)
        yield Slurm(lab, folder)
    finally:
        for process in running:
            process.kill()
            process.wait()
        lab.end_all()
        for host in lab.hosts:
            lab.run(host, ["umount", "/etc/slurm"])


def _configure(lab: Lab, folder: Path) -> None:
    """/etc/slurm, and /run/munge with a key of this lab's own, in every host."""
    first = next(iter(lab.hosts.values()))
    nodes = [
        f"NodeName={host.name} NodeAddr={host.address} CPUs=2 Gres=gpu:2 State=UNKNOWN"
        for host in lab.hosts.values()
    ]
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            first=first.name,
            address=first.address,
            folder=folder,
            nodes="\n".join(nodes),
            names=",".join(lab.hosts),
        )
    )
    (folder / "gres.conf").write_text(GPUS)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    shutil.chown(key, "munge", "munge")
    for host in lab.hosts:
        own = folder / f"munge-{host}"
        own.mkdir(mode=0o700)
        shutil.chown(own, "munge", "munge")
        made = lab.run(
            host,
            ["sh", "-c", 'mkdir -p /etc/slurm "$1" && mount --bind "$0" /etc/slurm && '
             "mkdir -p /run/munge && chown munge:munge /run/munge && chmod 755 /run/munge",
             str(folder), str(folder / f"spool-{host}")],
        )  # fmt: skip
        if made.returncode != 0:
            raise RuntimeError(made.stderr)


def _munge_files(folder: Path, host: str) -> list[str]:
    own = folder / f"munge-{host}"
    return [
        f"--key-file={folder / 'munge.key'}", f"--log-file={own / 'log'}", f"--seed-file={own / 'seed'}",
        "--pid-file=/run/munge/munged.pid",
    ]  # fmt: skip


def _wait_until_idle(lab: Lab, first: str, folder: Path) -> None:
    until = time.monotonic() + LATE
    while True:
        output = lab.run(first, ["sinfo", "--noheader", "--Node", "--format=%N %T"])
        states = [line.split()[-1] for line in output.stdout.splitlines()]
        if states and all(state == "idle" for state in states):
            return
        if time.monotonic() > until:
            logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(folder.glob("*.*o*"))]
            raise RuntimeError("\n".join(["Slurm did not come up:", output.stdout, output.stderr, *logs]))
        time.sleep(0.2)
