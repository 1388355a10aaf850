"""Takes a worker script, starts it on several processes, gives what it printed: with torchrun, or as torchrun
would (`forked`), which takes a third of the time.

All of its processes are ended with it: no rank outlives its test.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

ROOT = Path(__file__).resolve().parent.parent
WITHOUT = ROOT / "tests" / "without"
"""A folder that hides matplotlib from what finds it on PYTHONPATH."""
LATE = 1500.0
"""Seconds after which something that a test waits for is taken to hang. This one limit is far above what any
test takes, so that a busy machine is not a failure."""

_TURNS, _QUIET = 1_000_000, 0.03
"""Turns of an empty loop, and seconds for them on a quiet machine, rounded up."""


def torchrun(
    worker: Path, nproc: int, args: Sequence[str] = (), timeout: float = LATE
) -> subprocess.CompletedProcess[str]:
    """stdout and stderr of all ranks, and the launcher's exit code. Raises TimeoutExpired, with the output so
    far, after `timeout` seconds."""
    command = [
        sys.executable, "-m", "torch.distributed.run",
        "--nproc_per_node", str(nproc), "--master_addr", "127.0.0.1", "--master_port", str(free_port()),
        str(worker), *args,
    ]  # fmt: skip
    environ = _environ()
    environ["PYTHONPATH"] = f"{WITHOUT}:{environ['PYTHONPATH']}"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        end_group(process.pid)
        expired.stdout, expired.stderr = process.communicate()
        raise
    finally:
        end_group(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def forked(
    worker: Path, nproc: int, args: Sequence[str] = (), timeout: float = LATE, *, supervised: bool = True
) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, where neither the launcher nor what a rank imports is looked at. With `torchrun` where
    ranks may take a GPU: DeepSpeed looks for it when it is imported, and CUDA knows no fork. Without
    `supervised` the ranks that are left go on after one has failed."""
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        return torchrun(worker, nproc, args, timeout)
    return _forked(worker, nproc, args, timeout, supervised)


def alone(
    script: Path,
    args: Sequence[str] = (),
    timeout: float = LATE,
    standin: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `python SCRIPT ARGS`, with its exit code, where what it imports is not looked at; forked as `forked`
    does, and where that does not, not. standin: the variables of a process over the stand-in GPU, which is
    forked from a server over it."""
    if standin is None and os.environ.get("DS_ACCELERATOR") != "cpu":
        command = [sys.executable, str(script), *args]
        return subprocess.run(command, env=_environ(), capture_output=True, text=True, timeout=timeout)
    return _forked(script, 0, args, timeout, standin=standin)


def _forked(
    worker: Path,
    nproc: int,
    args: Sequence[str],
    timeout: float,
    supervised: bool = True,
    standin: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    server = _server(standin is not None)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {
            "script": str(worker), "args": list(args), "ranks": nproc, "supervised": supervised,
            "port": free_port(), "environ": {**(standin or _environ())}, "cwd": str(Path.cwd()),
            "stdout": str(out), "stderr": str(err),
        }  # fmt: skip
        server.ask(asked)
        leader = server.answer("pid", LATE)
        try:
            code = server.answer("code", timeout)
        except TimeoutError:
            end_group(leader)
            server.answer("code", LATE)
            printed = out.read_bytes(), err.read_bytes()
            raise subprocess.TimeoutExpired([str(worker), *args], timeout, *printed) from None
        finally:
            end_group(leader)
        return subprocess.CompletedProcess([str(worker), *args], code, out.read_text(), err.read_text())


def allowed(seconds: float) -> float:
    """Return a bound on how long something may take, on this machine as it is now: `seconds` where it is
    quiet, and in proportion longer where an empty loop takes longer because other processes use the cores."""
    began = time.perf_counter()
    for _ in range(_TURNS):
        pass
    return seconds * max(1.0, (time.perf_counter() - began) / _QUIET)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Ranks that are started meanwhile see no GPU and reckon with one thread each."""
    forced = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, forced):
        yield


@dataclass(frozen=True)
class _Server:
    connection: socket.socket

    def ask(self, asked: Mapping[str, Any]) -> None:
        self.connection.send(json.dumps(asked).encode())

    def answer(self, key: str, timeout: float) -> int:
        self.connection.settimeout(timeout)
        if not (message := self.connection.recv(1000)):
            raise RuntimeError("tests/forked.py has ended")
        return int(json.loads(message)[key])


@functools.cache
def _server(on_standin: bool) -> _Server:
    """Return this process's connection to the server that all workers of pytest share, on the CPU or over the
    stand-in GPU; the first one starts it. The name of its socket is no file."""
    from tests.standin.gpu import environ

    tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"\0dsft-forked-{tests}-{on_standin}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while connection.connect_ex(name):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(name)
            except OSError:  # another worker is starting it
                continue
            listener.listen()
            listener.set_inheritable(True)
            command = [sys.executable, str(ROOT / "tests" / "forked.py"), str(listener.fileno()), str(tests)]
            os.posix_spawn(sys.executable, command, environ() if on_standin else _environ())
    atexit.register(connection.close)
    return _Server(connection)


def _environ() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    scripts = str(Path(sys.executable).parent)  # ninja is there
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]),
    }


def end_group(leader: int) -> None:
    """SIGKILL to `leader`, to all that it started (torchrun gives each rank its own session), and to what
    is left of its process group after its own end."""
    try:
        started = psutil.Process(leader).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # all have ended
        pass


def free_port() -> int:
    """Return a port of this machine that nothing listens on, below those that outgoing connections get: one
    of those may be in use a moment later."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
