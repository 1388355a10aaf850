"""Report which hosts answered, and explain from the output of ssh, srun, the shell and Python why others did
not. Also check what this machine knows alone: the hostfile, and the launcher's programs on PATH."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dsft.doctor.results import CheckResult, ProbeResults, passed
from dsft.errors import SpecError
from dsft.generate.hostfile import read_hostfile
from dsft.remote import NoAnswer

CHECK = "reach"
WHY = "a run has to start processes there, and would hang or fail"

# Pattern of the output -> the cause, and the remedy.
_WORDS: tuple[tuple[str, str, str], ...] = (
    (r"[Cc]ould not resolve hostname|Name or service not known|Temporary failure in name resolution",
     "its name is not known here", "correct cluster.hosts, or add it to /etc/hosts or the name service"),
    (r"Connection refused", "no sshd listens there", "start sshd there, or set its port in DSFT_SSH_ARGS"),
    (r"Connection timed out|[Oo]peration timed out|banner exchange|No route to host|Network is unreachable",
     "it does not answer", "check whether it is up, and whether a firewall blocks it"),
    (r"Permission denied|Too many authentication failures",
     "ssh cannot log in without a password", "put this user's public key there: ssh-copy-id HOST"),
    (r"Host key verification failed|REMOTE HOST IDENTIFICATION",
     "its host key is unknown or has changed",
     "log in once by hand (ssh HOST) and check the key, or put it into known_hosts"),
    (r"^ssh: .*No such file|^ssh: command not found|^ssh: No such file",
     "ssh is not installed here", "install openssh-client"),
    (r"^\S*srun: .*No such file", "srun is not installed here", "run it where Slurm's commands are"),
    (r"not in this job's allocation|Requested nodes? .*not|Invalid node name",
     "it is not among the hosts of this Slurm allocation",
     "put the hosts of the allocation into cluster.hosts: dsft hostfile --from-slurm"),
)  # fmt: skip

_PROGRAM: tuple[tuple[str, str, str], ...] = (
    (r"cd: .*(No such file|can't cd)", "dsft's folder does not exist there",
     "put dsft at the same path on every host, or on a disk that all share"),
    (r"No module named '?dsft\b|cannot import name .* from '?dsft\b",
     "its dsft is missing or is another version",
     "install the same dsft there, at the same path"),
    (r"ModuleNotFoundError: No module named '?([\w.]+)", "its Python lacks a package ({0})",
     "install the same packages there (docs/install.md)"),
    (r"SyntaxError|ImportError", "its Python or its packages are other versions ({last})",
     "make the environment the same (docs/install.md)"),
)  # fmt: skip


def reach(probed: ProbeResults) -> Iterator[CheckResult]:
    for host in probed.slots:
        silence = probed.answers.silent.get(host)
        if silence is None:
            yield passed(CHECK, host, "answers")
        elif host in probed.answers.first:
            yield CheckResult(
                CHECK, host, "failure", "gave no second answer", WHY, "check whether it is overloaded"
            )
        else:
            yield _from_outside(probed, fault(host, silence))


def _from_outside(probed: ProbeResults, finding: CheckResult) -> CheckResult:
    """Lower the finding to a warning outside a Slurm allocation, where Slurm may not let users onto its
    hosts."""
    cluster = probed.needs.spec.cluster
    if cluster is None or cluster.launcher != "slurm" or probed.needs.through == "srun":
        return finding
    do = "run it inside an allocation, where srun reaches the host: salloc --nodes=2 dsft doctor SPEC"
    return replace(finding, level="warning", why="this host could not be examined", do=do)


def fault(host: str, silence: NoAnswer) -> CheckResult:
    last = (silence.output.splitlines() or ["no output"])[-1].strip()
    value, do = _meaning(silence, last)
    quoted = "" if last in value or not silence.output else f" ({last[:200]})"
    return CheckResult(CHECK, host, "failure", f"{value}{quoted}", WHY, do.replace("HOST", host))


def _meaning(silence: NoAnswer, last: str) -> tuple[str, str]:
    if silence.code == 126:
        return "its Python cannot be started", "check the permissions of the interpreter there"
    for pattern, value, do in (*_PROGRAM, *_WORDS):
        found = re.search(pattern, silence.output, re.MULTILINE)
        if found:
            return value.format(*found.groups(), last=last), do
    if silence.code == 127:
        return (
            "the Python of this environment does not exist there",
            "create the environment at the same path on every host, or on a disk that all share",
        )
    if silence.code is None or silence.code < 0:
        return "gave no answer in time", "check whether it is overloaded, or a disk or the name service hangs"
    return f"the doctor's program ended with exit code {silence.code}", "try it by hand: ssh HOST"


def folders(probed: ProbeResults) -> Iterator[CheckResult]:
    for host, facts in probed.answers.first.items():
        if facts.get("folder") is not None:
            yield CheckResult(
                "folder", host, "failure", f"{os.getcwd()} cannot be entered ({facts['folder']})",
                "the run starts there on every host", "put it there at the same path, or on a shared disk",
            )  # fmt: skip


def hostfile(probed: ProbeResults) -> Iterator[CheckResult]:
    """Check that `hostfiles/NAME`, if it exists, has the spec's hosts and slots."""
    cluster, file = probed.needs.spec.cluster, Path("hostfiles", probed.needs.spec.name)
    if cluster is None or cluster.launcher not in {"dsft", "deepspeed"} or not file.is_file():
        return
    try:
        hosts = read_hostfile(file)
    except (SpecError, OSError) as error:
        why = error.problems[0] if isinstance(error, SpecError) else error
        yield CheckResult(
            "hostfile", None, "warning", f"{file} cannot be used ({why})", "deepspeed --hostfile would fail",
            "write it again: dsft generate SPEC",
        )  # fmt: skip
        return
    if hosts != cluster.hosts:
        yield CheckResult(
            "hostfile", None, "warning", f"{file} has other hosts or slots than cluster.hosts",
            "a run that is started with it stops at once", "write it again: dsft generate SPEC",
        )  # fmt: skip
    else:
        yield passed("hostfile", None, f"{file} has the spec's hosts")


def programs(probed: ProbeResults) -> Iterator[CheckResult]:
    """Check that the launcher's program is on this machine's PATH."""
    cluster = probed.needs.spec.cluster
    if cluster is None or len(cluster.hosts) < 2:
        return
    program = {"deepspeed": "pdsh", "slurm": "srun"}.get(cluster.launcher)
    if program is None:
        return
    if shutil.which(program) is None:
        is_pdsh = program == "pdsh"
        yield CheckResult(
            "programs", None, "warning", f"{program} is not on PATH here",
            f"{'deepspeed --hostfile' if is_pdsh else 'cluster.launcher slurm'} starts processes with it",
            f"install {program}" + (", or start with dsft launch, which needs none" if is_pdsh else ""),
        )  # fmt: skip
    else:
        yield passed("programs", None, f"{program} is on PATH here")
