"""This process's place in the world, as a launcher told it, and how its variables are read. Takes environment
variables, gives frozen values; writes none but those that DeepSpeed and torch look for (`export`)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dsft.errors import WorldError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """rank of world_size processes; local_rank on this host; where rank 0 listens; who started it.

    local_world_size  processes on this host, None where the launcher does not tell
    hosts             number of hosts, None where the launcher does not tell
    slots             processes of each host, in the order of the hosts, None where the launcher does not tell
    told_by           the variables that were believed, for the run's first line
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
    told_by: tuple[str, ...] = ()

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Write the rendezvous variables, for a launcher that does not."""
        values = (self.rank, self.world_size, self.local_rank, self.master_addr, self.master_port)
        environ.update({name: str(value) for name, value in zip(RENDEZVOUS, values, strict=True)})

    def line(self) -> str:
        """Which launcher was seen, by what, and what it started."""
        if self.launcher == "python":
            return "launcher: none, python alone: 1 process"
        hosts = "" if self.hosts is None else f" on {counted(self.hosts, 'host')}"
        world = f"{counted(self.world_size, 'process')}{hosts}"
        return (
            f"launcher: {self.launcher} ({', '.join(self.told_by)}): {world}, rank 0 listens at "
            f"{self.master_addr} port {self.master_port}"
        )


def counted(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`, `3 processes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Of a variable that is set. Raises WorldError where it is no whole number."""
    try:
        return int(environ[name])
    except ValueError:
        raise WorldError(
            f"{name}={environ[name]!r} in the environment is not a whole number; launchers set it, unset it "
            "or give a number."
        ) from None


def optional_number(environ: Mapping[str, str], *names: str) -> int | None:
    """Of the first that is set."""
    name = next((name for name in names if environ.get(name)), None)
    return None if name is None else whole_number(environ, name)


def master_port(environ: Mapping[str, str]) -> int | None:
    """MASTER_PORT, where it is set. Raises WorldError where it is none."""
    port = optional_number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise WorldError(f"MASTER_PORT={port} is no port; give one of 1 to 65535, or unset it.")
    return port


def check_ranks(environ: Mapping[str, str], rank: str, world_size: str, local_rank: str) -> None:
    """Raises WorldError where the numbers of these three variables contradict each other."""
    mine, world, local = (whole_number(environ, name) for name in (rank, world_size, local_rank))
    if not 0 <= mine < world or not 0 <= local < world:
        raise WorldError(
            f"{rank}={mine}, {local_rank}={local} and {world_size}={world} contradict each other: ranks "
            f"count from 0 to {world_size} - 1; give each process its own."
        )


def check_complete(environ: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    """Raises WorldError where one of the variables that the launcher sets is missing."""
    absent = [name for name in names if not environ.get(name)]
    if absent:
        present = [name for name in names if environ.get(name)]
        raise WorldError(
            f"the environment has {', '.join(present)} but not {', '.join(absent)}: {launcher} sets all of "
            f"{', '.join(names)}; set those too, or start with deepspeed or torchrun."
        )


def port_of_job(number: int) -> int:
    """The same port on every rank of a job, and another for the next job: below those that the kernel gives
    away by itself (32768 and up)."""
    return 10_000 + number % 20_000
