"""Two hosts on one machine: takes root's rights, gives hosts with their own host name, address, processes,
sshd, /etc/hosts, /dev/shm, /run and Slurm. The file system is shared, as by NFS.

    with two_hosts() as lab:
        lab.run("node1", ["ssh", "node2", "hostname"])

A host is a set of namespaces (network, mounts, host name, IPC, process ids) without a name in the machine's
own, so labs of several processes do not meet: each has 10.77.0.1 and 10.77.0.2 for itself. A thread of the
caller makes them and starts all that runs there, so a process that `start` gives is the caller's child, with
an id that the caller can send signals to; inside it has another. No host sees another's processes.
All of them die with the lab, also where the caller is killed: its thread's death kills each host's first
process, and the kernel all others with it. What stays then is a folder, removed by the next lab.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.lab.slurm import Slurm, cluster
from tests.launching import LATE, WITHOUT

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = ("node1", "node2")
INTERFACE = "e0"
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "pdsh", "ip", "nsenter", "mount")
_FOLDER = "dsft-lab-"  # in /tmp: sockets below it need short paths
_INIT = Path(__file__).with_name("init.py")
_RELAY = Path(__file__).with_name("relay.py")

# linux/sched.h, in this order: fs, mounts, uts, ipc, pids, network
_UNSHARE = 0x00000200 | 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000

T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """A process of a host: `pid` is what the caller calls it, `inside` what its own host does."""

    host: str
    pid: int
    inside: int
    argv: tuple[str, ...]


@dataclass
class Host:
    """`thread` is the one that lives in the host's namespaces; `init` its first process."""

    name: str
    address: str
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    init: subprocess.Popen[str] | None = None
    sshd: subprocess.Popen[str] | None = None
    relay: subprocess.Popen[str] | None = None
    started: list[subprocess.Popen[Any]] = field(default_factory=list)
    namespace: str = ""

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the host's thread. Garbage is not collected there: a semaphore of this machine's
        /dev/shm that is found to be unused would be looked for in the host's."""
        gc.disable()
        try:
            return self.thread.submit(function).result()
        finally:
            gc.enable()


@dataclass
class Lab:
    """What `two_hosts` gives. `environ`: what commands get beside their own `env`; `folder`: its own."""

    folder: Path
    hosts: dict[str, Host]
    switch: Host
    environ: dict[str, str]

    def start(
        self,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | str = ROOT,
        **popen: Any,
    ) -> subprocess.Popen[str]:
        """A process on the host, leader of a session of its own. `env` is laid over `environ`; the rest is
        Popen's. `send_signal`, `wait` and `communicate` reach the process itself; its parent inside is 0."""
        place = self.hosts[host]
        given = {"text": True, "start_new_session": True, **popen}
        environ = self.environ | dict(env or {})
        process: subprocess.Popen[str] = place.call(
            lambda: subprocess.Popen(list(argv), env=environ, cwd=cwd, **given)
        )
        place.started.append(process)
        return process

    def run(
        self,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | str = ROOT,
        timeout: float = LATE,
        **popen: Any,
    ) -> subprocess.CompletedProcess[str]:
        """stdout, stderr and exit code, which the caller checks. Raises TimeoutExpired, with the output so
        far, when it takes longer; its process group is killed then, what it started elsewhere is not."""
        given_input = popen.pop("input", None)
        stdin = subprocess.DEVNULL if given_input is None else subprocess.PIPE
        given = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        process = self.start(host, argv, env, cwd, **given)
        try:
            stdout, stderr = process.communicate(given_input, timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a grandchild may hold the pipes
                expired.stdout, expired.stderr = process.communicate(timeout=60)
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def cut(self, host: str) -> None:
        """Its cable is pulled at the switch: no socket is notified, and what is sent is lost."""
        self._at_switch("ip", "link", "set", host, "down")

    def mend(self, host: str) -> None:
        """Undo `cut`, `slow` and `stop_sshd`."""
        relay = self.hosts[host].relay
        if relay is not None:
            relay.kill()
            relay.wait()
            self.hosts[host].relay = None
            self._at_switch("ip", "link", "del", f"s-{host}")
            self._at_switch("ip", "link", "set", host, "master", "bridge")
        self._at_switch("ip", "link", "set", host, "up")
        self.start_sshd(host)
        _wait_for_sshd(self, host)

    def slow(self, host: str, rate: str = "1mbit", delay: str = "50ms") -> None:
        """The host's link has this rate and this delay, each way: a round trip takes twice it."""
        self.mend(host)
        bits = float(rate.removesuffix("bit").replace("g", "e9").replace("m", "e6").replace("k", "e3"))
        seconds = float(delay.removesuffix("ms")) / 1000
        self._at_switch("ip", "link", "add", f"s-{host}", "type", "veth", "peer", "name", f"r-{host}")
        self._at_switch("ip", "link", "set", host, "nomaster")
        self._at_switch("ip", "link", "set", f"r-{host}", "up")
        self._at_switch("ip", "link", "set", f"s-{host}", "master", "bridge", "up")
        words = [sys.executable, "-IS", str(_RELAY), host, f"r-{host}", str(bits), str(seconds)]
        relay = self.switch.call(lambda: subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        self.switch.started.append(relay)
        self.hosts[host].relay = relay
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"the slow link of {host} ended at once")

    def stop_sshd(self, host: str) -> None:
        """No new connection is taken: "connection refused". Those that stand go on."""
        place = self.hosts[host]
        if place.sshd is not None:
            place.sshd.terminate()
            place.sshd.wait()
            place.sshd = None

    def start_sshd(self, host: str) -> None:
        """Does nothing where it runs."""
        place = self.hosts[host]
        if place.sshd is None:
            log = (self.folder / host / "sshd.log").open("w")  # of this one alone: it tells when it listens
            place.sshd = self.start(host, [_program("sshd"), "-D", "-e"], stdout=log, stderr=log)
            log.close()

    def processes(self, marker: str = "", host: str | None = None) -> list[Seen]:
        """Those of the hosts (or of one) that have `marker` in their arguments or their environment, but not
        the lab's own: each host's first process, sshd's listener and Slurm's daemons. Zombies are none."""
        own = {each.pid for place in self.hosts.values() for each in (place.init, place.sshd) if each}
        found = []
        for place in self.hosts.values():
            if host in (None, place.name):
                found += [seen for seen in _seen(place, marker) if seen.pid not in own]
        return [seen for seen in found if not _is_daemon(seen)]

    def outside(self, host: str, inside: int) -> int:
        """The caller's id of the process that the host itself calls `inside`. KeyError: there is none."""
        found = {seen.inside: seen.pid for seen in _seen(self.hosts[host], "")}
        return found[inside]

    def end_all(self) -> None:
        """Kill every process that `processes` shows, and wait until they are gone: for between two tests."""
        while found := self.processes():
            for seen in found:
                with suppress(ProcessLookupError):
                    os.kill(seen.pid, signal.SIGKILL)
            time.sleep(0.02)
            for place in self.hosts.values():
                for process in place.started:
                    process.poll()

    def reset(self) -> None:
        """As new: nothing runs, every link and sshd is whole."""
        self.end_all()
        for name in self.hosts:
            self.mend(name)

    def slurm(self) -> AbstractContextManager[Slurm]:
        """slurmctld, slurmd and munged for the length of a `with`: tests/lab/slurm.py, whose `why_not` says
        whether this machine has them."""
        return cluster(self)

    def _at_switch(self, *argv: str) -> None:
        self.switch.call(functools.partial(_must, *argv))


@functools.cache
def why_not() -> str | None:
    """Why this machine can have no lab; None where it can."""
    if not sys.platform.startswith("linux"):
        return "two hosts are namespaces of Linux, which this is not"
    if os.geteuid() != 0:
        return "two hosts on one machine need root"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]:
        return f"not installed: {', '.join(absent)}; scripts/lab installs them"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "lab", "type", "bridge"],
        capture_output=True, text=True, env=os.environ | {"PATH": search_path()},
    )  # fmt: skip
    if tried.returncode != 0:
        return f"this machine gives no namespaces with links of their own: {tried.stderr.strip()[-200:]}"
    return None


@contextmanager
def two_hosts(names: Sequence[str] = NAMES, environ: Mapping[str, str] | None = None) -> Iterator[Lab]:
    """node1 (10.77.0.1) and node2 (10.77.0.2) on one switch, an sshd in each. `environ`: further variables
    of every host, in each session of its sshd too. Every process of theirs is killed at the end. Raises
    RuntimeError, with the reason, where the machine can have none."""
    if reason := why_not():
        raise RuntimeError(reason)
    _remove_left_behind()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir="/tmp"))
    hosts = {name: Host(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)}
    switch = Host("switch", "")
    try:
        _write_files(folder, hosts, environ or {})
        for host in (switch, *hosts.values()):
            host.call(functools.partial(_make, host, folder))
        _join(switch, hosts)
        lab = Lab(folder, hosts, switch, _environ(folder) | dict(environ or {}))
        for name in names:
            lab.start_sshd(name)
        for name in names:
            _wait_for_sshd(lab, name)
        yield lab
    finally:
        for host in (*hosts.values(), switch):
            _end(host)
        shutil.rmtree(folder, ignore_errors=True)


def _make(host: Host, folder: Path) -> None:
    """In the host's thread: leave the machine's namespaces, and be the host from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_UNSHARE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare for the lab's {host.name}: {os.strerror(number)}")
    # The first process of the new namespace of process ids, so it must be started first.
    host.init = subprocess.Popen(
        [sys.executable, "-IS", str(_INIT)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env={},
    )  # fmt: skip
    assert host.init.stdout is not None
    if host.init.stdout.readline() != "ready\n":
        raise RuntimeError(f"the first process of the lab's {host.name} ended at once")
    host.namespace = os.readlink(f"/proc/{host.init.pid}/ns/pid")
    own = folder / host.name
    script = f"""
        set -e
        mount --make-rprivate /
        mount -t proc proc /proc
        mount --rbind /sys/fs/cgroup {own}/cgroup
        mount -t sysfs sysfs /sys
        mount --rbind {own}/cgroup /sys/fs/cgroup
        mount -t tmpfs -o mode=1777 shm /dev/shm
        mount -t tmpfs -o mode=755 run /run
        mkdir -p /run/sshd /run/lock
        mount --bind {own}/hosts /etc/hosts
        mount --bind {own}/hostname /etc/hostname
        mount --bind {folder}/ssh /etc/ssh
        mount --bind {folder}/passwd /etc/passwd
        hostname {host.name}
        ip link set lo up
    """
    _must("sh", "-c", script)


def _join(switch: Host, hosts: Mapping[str, Host]) -> None:
    """A bridge in the switch; a cable from it to each host's interface."""
    assert switch.init is not None
    inside = ["nsenter", f"--net=/proc/{switch.init.pid}/ns/net"]
    _must(*inside, "ip", "link", "add", "bridge", "type", "bridge")
    _must(*inside, "ip", "link", "set", "bridge", "up")
    for host in hosts.values():
        assert host.init is not None
        # netns takes a process id as the caller sees it: so not in the switch's thread.
        _must(
            *inside, "ip", "link", "add", host.name, "type", "veth",
            "peer", "name", INTERFACE, "netns", str(host.init.pid),
        )  # fmt: skip
        _must(*inside, "ip", "link", "set", host.name, "master", "bridge", "up")
        wire = f"ip address add {host.address}/24 dev {INTERFACE} && ip link set {INTERFACE} up"
        host.call(functools.partial(_must, "sh", "-c", wire))


def _write_files(folder: Path, hosts: Mapping[str, Host], environ: Mapping[str, str]) -> None:
    folder.chmod(0o755)
    ssh = folder / "ssh"
    for each in (ssh, folder / "home", *(folder / name for name in ("switch", *hosts))):
        each.mkdir()
        (each / "cgroup").mkdir()
    # A home of the lab's own: no ~/.ssh, ~/.bashrc or ~/.deepspeed_env of this machine's is read or written.
    users = Path("/etc/passwd").read_text().splitlines()
    own = [
        f"root:x:0:0:root:{folder / 'home'}:/bin/bash" if row.startswith("root:") else row for row in users
    ]
    (folder / "passwd").write_text("\n".join(own) + "\n")
    for key in ("id", "host_key"):
        _must("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(ssh / key))
    (ssh / "authorized_keys").write_text((ssh / "id.pub").read_text())
    (ssh / "ssh_config").write_text(
        "Host *\n    IdentityFile /etc/ssh/id\n    IdentitiesOnly yes\n    StrictHostKeyChecking no\n"
        "    UserKnownHostsFile /dev/null\n    LogLevel ERROR\n"
    )
    # What /etc/environment would set on a host: nothing of one run's.
    named = " ".join(f'"{name}={value}"' for name, value in (_of_every_host() | dict(environ)).items())
    (ssh / "sshd_config").write_text(
        "HostKey /etc/ssh/host_key\nAuthorizedKeysFile /etc/ssh/authorized_keys\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\nUseDNS no\nPidFile none\n"
        f"MaxStartups 100\nMaxSessions 100\nSetEnv {named}\n"
    )
    table = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts.values())
    for name in ("switch", *hosts):
        (folder / name / "hosts").write_text(table)
        (folder / name / "hostname").write_text(f"{name}\n")


def _of_every_host() -> dict[str, str]:
    taken = {
        name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR", "LD_LIBRARY_PATH") if name in os.environ
    }
    return {
        "PATH": search_path(), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled", "DSFT_VERBOSE": "1", **taken,
    }  # fmt: skip


def _environ(folder: Path) -> dict[str, str]:
    config = f"-F {folder / 'ssh' / 'ssh_config'}"
    return {
        **_of_every_host(),
        "HOME": str(folder / "home"), "USER": "root", "LANG": "C.UTF-8", "PYTHONPATH": f"{WITHOUT}:{ROOT}",
        "DSFT_SSH_ARGS": config, "PDSH_SSH_ARGS_APPEND": config, "PDSH_RCMD_TYPE": "ssh",
        "GLOO_SOCKET_IFNAME": INTERFACE, "OMPI_MCA_orte_tmpdir_base": str(folder),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip


def search_path() -> str:
    """This interpreter's programs first, then the system's, sbin among them."""
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return f"{Path(sys.executable).parent}:{system}"


def _program(name: str) -> str:
    found = shutil.which(name, path=search_path())
    assert found is not None
    return found


def _must(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"PATH": search_path()})
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")


def _wait_for_sshd(lab: Lab, name: str) -> None:
    until = time.monotonic() + 30
    while "Server listening" not in (lab.folder / name / "sshd.log").read_text():
        sshd = lab.hosts[name].sshd
        if time.monotonic() > until or sshd is None or sshd.poll() is not None:
            raise RuntimeError(f"no sshd on {name}: {(lab.folder / name / 'sshd.log').read_text()}")
        time.sleep(0.01)


def _seen(host: Host, marker: str) -> Iterator[Seen]:
    wanted = marker.encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{entry}/ns/pid") != host.namespace:  # a zombie has none
                continue
            argv = Path("/proc", entry, "cmdline").read_bytes()
            environ = Path("/proc", entry, "environ").read_bytes()
            if wanted not in argv and wanted not in environ:
                continue
            status = Path("/proc", entry, "status").read_text()
        except OSError:
            continue
        inside = next(int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:"))
        words = tuple(word.decode(errors="replace") for word in argv.rstrip(b"\0").split(b"\0"))
        yield Seen(host.name, int(entry), inside, words)


def _is_daemon(seen: Seen) -> bool:
    return Path(seen.argv[0]).name in ("munged", "slurmctld", "slurmd", ": slurmscriptd")


def _end(host: Host) -> None:
    if host.init is not None:
        host.init.kill()
        # A host's first process is only gone once the children that it does not own were waited for.
        for process in host.started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
        host.init.wait()
        for stream in (host.init.stdin, host.init.stdout):
            if stream is not None:
                stream.close()
    host.thread.shutdown()


def _remove_left_behind() -> None:
    """Folders of labs whose process was killed."""
    for folder in Path("/tmp").glob(f"{_FOLDER}*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
