"""Represent this process's place in the world as its launcher set it, parse the variables, and check that
rank 0's port is free. Writes no variables but those that DeepSpeed and torch read (`Launched.export`)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dsft.errors import WorldError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

AGENT = "DSFT_JOB"
"""Set where `dsft launch` started this process: its five variables override those of a surrounding Slurm or
MPI task."""


@dataclass(frozen=True)
class Launched:
    """A process's place in the world: its rank and local rank, the world size, the address and port at which
    rank 0 listens, and the launcher's name.

    local_world_size  processes on this host; None where the launcher does not set it
    hosts             number of hosts; None where the launcher does not set it
    slots             processes of each host, in the order of the hosts; None where it does not set it
    variables         the variables that were used, for the run's first line
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    local_world_size: int | None = None
    hosts: int | None = None
    slots: tuple[int, ...] | None = None
    variables: tuple[str, ...] = ()

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Write the rendezvous variables, for a launcher that does not set them."""
        values = (self.rank, self.world_size, self.local_rank, self.master_addr, self.master_port)
        environ.update({name: str(value) for name, value in zip(RENDEZVOUS, values, strict=True)})

    def line(self) -> str:
        """Return a log line: the launcher, the variables it was recognized by, and what it started."""
        if self.launcher == "python":
            return "launcher: none, python alone: 1 process"
        hosts = "" if self.hosts is None else f" on {counted(self.hosts, 'host')}"
        world = f"{counted(self.world_size, 'process')}{hosts}"
        return (
            f"launcher: {self.launcher} ({', '.join(self.variables)}): {world}, rank 0 listens at "
            f"{self.master_addr} port {self.master_port}"
        )


def counted(number: int, noun: str) -> str:
    """Format `1 host`, `2 hosts`, `3 processes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Return the value of a variable that is set. Raises WorldError if it is not a whole number."""
    try:
        return int(environ[name])
    except ValueError:
        raise WorldError(
            f"{name}={environ[name]!r} in the environment is not a whole number; launchers set it: unset it, "
            "or give a number."
        ) from None


def optional_number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first of these variables that is set; None if none is."""
    name = next((name for name in names if environ.get(name)), None)
    return None if name is None else whole_number(environ, name)


def master_port(environ: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT, or None if it is not set. Raises WorldError if it is not a port."""
    port = optional_number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise WorldError(f"MASTER_PORT={port} is not a port; give one from 1 to 65535, or unset it.")
    return port


def check_ranks(environ: Mapping[str, str], rank: str, world_size: str, local_rank: str) -> None:
    """Raise WorldError if the values of these three variables contradict each other."""
    mine, world, local = (whole_number(environ, name) for name in (rank, world_size, local_rank))
    if not 0 <= mine < world or not 0 <= local < world:
        raise WorldError(
            f"{rank}={mine}, {local_rank}={local} and {world_size}={world} contradict each other: ranks "
            f"count from 0 to {world_size} - 1; give each process its own."
        )


def check_complete(environ: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    """Raise WorldError if one of the variables that the launcher sets is missing."""
    absent = [name for name in names if not environ.get(name)]
    if absent:
        present = [name for name in names if environ.get(name)]
        raise WorldError(
            f"the environment has {', '.join(present)} but not {', '.join(absent)}: {launcher} sets all of "
            f"{', '.join(names)}; set those too, or start with deepspeed or torchrun."
        )


def port_of_job(number: int) -> int:
    """Return a port that is the same on every rank of a job and usually differs between jobs: 10000 to 29999,
    below the kernel's ephemeral ports (32768 and up)."""
    return 10_000 + number % 20_000


def check_port(launched: Launched, environ: Mapping[str, str]) -> None:
    """Raise WorldError on rank 0 if another program listens at its port. Called in the first second, before
    other ranks connect to that program, which may be another run.

    Under torchrun nothing is checked: there torchrun listens at the port, not rank 0.
    """
    if launched.rank != 0 or launched.launcher == "torchrun":
        return
    with socket.socket() as probe:
        # Same option as torch's TCPStore. No listen(), so that no rank takes this socket for rank 0's.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launched.master_port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_taken(launched, environ) from None


def port_taken(launched: Launched, environ: Mapping[str, str]) -> WorldError:
    """Return the error, which names what chooses the port: the launcher's flag, or a variable."""
    if environ.get(AGENT):
        way = "unset MASTER_PORT, so that dsft launch finds a free one, or start again"
    elif launched.launcher in ("deepspeed", "torchrun"):
        way = f"give {launched.launcher} another one (--master_port N)"
    elif launched.launcher == "python":
        way = "start again, which finds a free one"
    else:
        way = "set MASTER_PORT to another one, for every rank"
    return WorldError(
        f"port {launched.master_port}, at which rank 0 is to listen for the others, is taken by another "
        f"program on {socket.gethostname()}, perhaps another run; {way}."
    )
