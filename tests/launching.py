"""Takes a worker script, starts it on several processes with torchrun, gives what it printed.

All of its processes are ended with it: no rank outlives its test.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def torchrun(
    worker: Path, nproc: int, args: Sequence[str] = (), timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """stdout and stderr of all ranks, and the launcher's exit code. Raises TimeoutExpired, with the output so
    far, after `timeout` seconds."""
    command = [
        sys.executable, "-m", "torch.distributed.run",
        "--nproc_per_node", str(nproc), "--master_addr", "127.0.0.1", "--master_port", str(free_port()),
        str(worker), *args,
    ]  # fmt: skip
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    scripts = str(Path(sys.executable).parent)  # ninja stands there
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]),
    }
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
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
