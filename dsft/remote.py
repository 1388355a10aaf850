"""Start a Python module on a host and exchange JSON messages with it, one per line, over its standard input
and output. The only channel to other hosts: directly if the host is this machine, else through ssh or srun.
Imports no torch.

caller     `Channel.open(module_command(host, module), variables)`, on asyncio
module     `own_connection()`, on asyncio

The module ends when its input does, so nothing outlives a connection. The command line that ssh passes to the
remote shell contains only the code's folder, the interpreter and the module's name, quoted. Everything else,
including secrets, goes through standard input, where `ps` does not show it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from dsft.errors import WorldError
from dsft.generate.scripts import environment

if TYPE_CHECKING:
    from dsft.spec.schema import Cluster

Message = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
"""The folder that contains the package `dsft`: the same path on every host."""

SSH_ARGS = "DSFT_SSH_ARGS"
"""Further options of ssh, as a shell reads them, such as `-F lab_config -p 2222`. If it is not set,
PDSH_SSH_ARGS_APPEND is read, the variable of pdsh that DeepSpeed's users know."""

CONNECT = 5  # seconds that a host may take to answer
MARK = b"dsft:"  # begins a message; output of a shell's start-up file lacks it
LONGEST = 2**26  # bytes of a message
FULL = 2**20  # bytes waiting to be written above which messages with may_drop are dropped
KEPT_LINES = 50  # lines kept of the other side's further output

FORWARDED = (
    "HF_*", "HUGGING_FACE_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "WANDB_*", "SWANLAB_*",
    "MLFLOW*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "MV2_*", "OMP_*", "MKL_*", "KMP_*", "GOMP_*", "TORCH_*",
    "PYTORCH_*", "TRITON_*", "CUDA_*", "DS_*", "DEEPSPEED_*", "DSFT_*", "PYTHON*", "LD_LIBRARY_PATH", "CC",
    "CXX", "CFLAGS", "CXXFLAGS", "MAX_JOBS", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "LANG", "LC_ALL", "TZ",
)  # fmt: skip
"""Variables that other hosts get from this one; further ones are set by `cluster.env`."""

NOT_FORWARDED = frozenset({
    "CUDA_VISIBLE_DEVICES", "DS_ENV_FILE", "DSFT_HEARTBEAT", "DSFT_JOB", "DSFT_LOGS", "DSFT_SSH_ARGS",
})  # fmt: skip
"""Those of them that differ from host to host, or are for this process alone."""

_FORWARDED = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in FORWARDED))

_SET_BY_LAUNCHERS = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|MASTER_ADDR|MASTER_PORT|CROSS_RANK|CROSS_SIZE|"
    r"GROUP_.*|ROLE_.*|TORCHELASTIC_.*|OMPI_.*|PMIX?_.*|NODE_RANK|NNODES|NPROC_PER_NODE|ADDR|PORT|"
    r"DSFT_(?:HEARTBEAT|JOB|LOGS)|"
    r"SLURM_(?:PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_.*|STEPID|TASKS_PER_NODE|NTASKS_PER_NODE|GTIDS|TASK_PID)"
)
"""Variables by which a launcher gives a process its place. A process that starts modules here is not a rank,
and the ranks that a module starts get their own."""


def forwarded(environ: Mapping[str, str], cluster: Cluster | None) -> dict[str, str]:
    """Return the variables for every program of dsft on another host: those of FORWARDED, then those of the
    spec's cluster."""
    named = {
        name: value
        for name, value in environ.items()
        if _FORWARDED.fullmatch(name) and name not in NOT_FORWARDED
    }
    return {**named, **environment(cluster)}


def is_this_machine(host: str) -> bool:
    """Return whether the name is this host's, or resolves only to addresses of its interfaces. Asks the name
    service."""
    if host == "localhost" or host in {socket.gethostname(), socket.gethostname().partition(".")[0]}:
        return True
    try:
        found = {str(place[4][0]) for place in socket.getaddrinfo(host, None)}
    except OSError:  # unknown: connecting will fail with a message
        return False
    own = {address.address.partition("%")[0] for each in psutil.net_if_addrs().values() for address in each}
    return all(address in own or address.startswith("127.") for address in found)


def module_command(
    host: str, module: str, through: Literal["ssh", "srun"] = "ssh", environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the argument vector of `python -m module` on the host, in the folder ROOT. through: srun inside
    a Slurm job, whose hosts may not allow ssh.

    Raises WorldError for an invalid host name: ssh would read `-o…` as an option, and a shell `$(…)`.
    """
    from dsft.spec.hosts import is_host  # imported here: a started module needs no pydantic

    if not is_host(host):
        raise WorldError(
            f"{host!r} is neither a host name (letters, digits, '-' and '.') nor an IP address; correct it."
        )
    program = [sys.executable, "-m", module]
    if through == "srun":
        step = ["--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", "--quiet", f"--chdir={ROOT}"]
        return ["srun", f"--nodelist={host}", *step, "--", *program]
    if is_this_machine(host):
        return program
    line = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(program)}"
    return [*ssh_command(environ), "--", host, line]


def ssh_command(environ: Mapping[str, str] = os.environ) -> Sequence[str]:
    """Return `ssh` with options: no prompts, a short connection timeout, keep-alives. Raises WorldError if
    the further options are not valid shell words."""
    name = SSH_ARGS if environ.get(SSH_ARGS) else "PDSH_SSH_ARGS_APPEND"
    try:
        further = shlex.split(environ.get(name) or "")
    except ValueError as error:
        raise WorldError(
            f"{name}={environ[name]!r} is not a list of options ({error}); correct its quotes."
        ) from None
    options = ("BatchMode=yes", f"ConnectTimeout={CONNECT}", "ServerAliveInterval=5", "ServerAliveCountMax=3")
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), *further]


class NoAnswer(Exception):
    """A module gave no (further) answer.

    code    exit code of the process started for it; None while that runs
    output  other output of it, or of ssh
    """

    def __init__(self, text: str, code: int | None, output: str) -> None:
        super().__init__(text)
        self.code, self.output = code, output


class Lines:
    """Messages over a pair of streams, on either side. other_output: the last lines that are not messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.other_output: deque[str] = deque(maxlen=KEPT_LINES)

    def send(self, message: Mapping[str, Any], *, may_drop: bool = False) -> None:
        """Queue a message without waiting: a host whose link is down reads nothing. may_drop: drop it if more
        than FULL bytes are waiting."""
        transport = self._writer.transport
        if not transport.is_closing() and not (may_drop and transport.get_write_buffer_size() > FULL):
            self._writer.write(_line(message))

    async def receive(self) -> Message | None:
        """Return the next message; None once the other side has ended."""
        while True:
            try:
                line = await self._reader.readline()
            except (OSError, ValueError):  # reset; longer than LONGEST
                return None
            if not line:
                return None
            message = self._read(line)
            if message is not None:
                return message

    async def flush(self, seconds: float) -> None:
        """Wait until everything is written, for at most `seconds`."""
        until, transport = time.monotonic() + seconds, self._writer.transport
        while transport.get_write_buffer_size() and time.monotonic() < until and not transport.is_closing():
            await asyncio.sleep(0.01)

    def _read(self, line: bytes) -> Message | None:
        before, mark, after = line.partition(MARK)
        message = _parsed(after) if mark else None
        other = before if message is not None else line
        if other.strip():
            self.other_output.append(other.decode(errors="replace").strip()[:1000])
        return message


class Channel(Lines):
    """The caller's side. Use it with `async with`, or call `close`. errors: the last lines of standard
    error."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        super().__init__(process.stdout, process.stdin)
        self.errors: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = process
        self._keeping = asyncio.create_task(self._keep_errors())

    @classmethod
    async def open(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Channel:
        """Start the process. argv: from `module_command`; environ: variables that the module gets before its
        first message. The process has its own session, so that Ctrl-C in a terminal does not reach it. Raises
        NoAnswer if there is no such program."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=ROOT, start_new_session=True, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=LONGEST
            )
        except OSError as error:
            text = f"{error.filename}: {error.strerror}"
            raise NoAnswer(text, 127, text) from None
        channel = cls(process)
        channel.send({"environ": dict(environ)})
        return channel

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def code(self) -> int | None:
        """The exit code of the process on this machine (the module's own, ssh's or srun's); None while it
        runs."""
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: Mapping[str, Any], seconds: float) -> Message:
        """Send a message and return the next one. Raises NoAnswer if none arrives within `seconds`; do not
        ask again then, since a late answer would be taken for the next one."""
        self.send(message)
        try:
            answer = await asyncio.wait_for(self.receive(), seconds)
            why = await self.reason() if answer is None else ""
        except TimeoutError:
            answer, why = None, f"no answer within {seconds:g} s"
        if answer is None:
            raise NoAnswer(why, self.code, "\n".join([*self.errors, *self.other_output]))
        return answer

    async def reason(self) -> str:
        """Return why the process ended: the last line of its output, else its exit code."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(self._process.wait(), asyncio.shield(self._keeping)), 1.0)
        for lines in (self.errors, self.other_output):
            if lines:
                return lines[-1]
        return "no answer" if self.code is None else f"exit code {self.code}"

    def cut(self) -> None:
        """Kill the process and make `receive` return None at once."""
        self._process._transport.close()  # type: ignore[attr-defined]

    async def close(self, seconds: float = 2.0) -> None:
        """Close the process's input so that it ends; kill it if it still runs after `seconds`."""
        self._writer.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        if self.code is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        self.cut()  # pipes that a grandchild keeps open

    async def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError, ValueError):
            async for line in self._process.stderr:
                if line.strip():
                    self.errors.append(line.decode(errors="replace").strip()[:1000])


async def own_connection() -> Lines:
    """Return the connection of a module that a Channel started, after setting the environment that the caller
    sent."""
    loop = asyncio.get_running_loop()
    output = _own_output()
    reader = asyncio.StreamReader(LONGEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0))
    pipe = os.fdopen(output, "wb", 0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    connection = Lines(reader, asyncio.StreamWriter(transport, protocol, None, loop))
    first = await connection.receive()
    set_environment((first or {}).get("environ", {}))
    return connection


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that give a process its rank and the world size: for a program
    that starts ranks inside another launcher's process."""
    return {name: value for name, value in environ.items() if not _SET_BY_LAUNCHERS.fullmatch(name)}


def set_environment(variables: Mapping[str, str]) -> None:
    """Make this process's environment that of a program the caller starts: without the variables of a rank,
    with the caller's, and this interpreter first on PATH."""
    for name in os.environ.keys() - without_rank_variables(os.environ).keys():
        del os.environ[name]
    paths = [str(Path(sys.executable).parent), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    os.environ["PATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.update(variables)
    for place in reversed(variables.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(1, place)


def _own_output() -> int:
    """Return a descriptor for messages; from now on, what this process prints goes to standard error, line by
    line, since it may end by `os._exit`."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return output


def _line(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a line. It begins with a newline, since a shell's start-up file may have printed
    half a line."""
    return b"\n" + MARK + json.dumps(message).encode() + b"\n"


def _parsed(text: bytes) -> Message | None:
    try:
        message = json.loads(text)
    except ValueError:  # truncated
        return None
    return message if isinstance(message, dict) else None
