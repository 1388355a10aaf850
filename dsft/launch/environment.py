"""Takes the environment that a launcher left, gives this process's place in the world.

Known: `deepspeed` and `torchrun` (both set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), the
same five set by hand, and nothing at all (one process). It reads variables and writes none but those
that DeepSpeed and torch look for in a process that was started alone (`export`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dsft.errors import WorldError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Launchers that start many processes without the variables above: training N copies of the same run
# beside each other is what would follow, so they are refused until they are understood.
UNREAD_LAUNCHERS = {"SLURM_NTASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


@dataclass(frozen=True)
class Launched:
    """rank of world_size processes; local_rank on this host; where rank 0 listens; who started it;
    local_world_size: processes on this host, None where the launcher does not tell."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    local_world_size: int | None = None

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Write the rendezvous variables for a process that was started alone."""
        values = (self.rank, self.world_size, self.local_rank, self.master_addr, self.master_port)
        environ.update({name: str(value) for name, value in zip(RENDEZVOUS, values, strict=True)})


def detect(environ: Mapping[str, str]) -> Launched:
    """Raises WorldError where the variables are set by half, are no numbers, or contradict each other."""
    present = [name for name in RENDEZVOUS if environ.get(name)]
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(present):
        return _alone(environ)
    absent = [name for name in RENDEZVOUS if name not in present]
    if absent:
        raise WorldError(
            f"the environment has {', '.join(present)} but not {', '.join(absent)}: a launcher sets all of "
            f"{', '.join(RENDEZVOUS)}; set those too, or start with deepspeed or torchrun."
        )
    rank, world_size, local_rank, port = (
        _whole_number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    if not 0 <= rank < world_size or not 0 <= local_rank < world_size:
        raise WorldError(
            f"RANK={rank}, LOCAL_RANK={local_rank} and WORLD_SIZE={world_size} contradict each other: ranks "
            "count from 0 to WORLD_SIZE - 1; give each process its own."
        )
    launcher, address = _launcher(environ), environ["MASTER_ADDR"]
    return Launched(launcher, rank, world_size, local_rank, address, port, _local_world_size(environ))


def _local_world_size(environ: Mapping[str, str]) -> int | None:
    """As torchrun and deepspeed (launcher/launch.py:182) name it."""
    name = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(name)), None)
    return None if name is None else _whole_number(environ, name)


def _alone(environ: Mapping[str, str]) -> Launched:
    for name, command in UNREAD_LAUNCHERS.items():
        if environ.get(name, "1") not in ("", "1"):
            raise WorldError(
                f"{name}={environ[name]} says that {command} started {environ[name]} processes, which this "
                "version does not read; start with torchrun or deepspeed, or set "
                f"{', '.join(RENDEZVOUS)} for each process."
            )
    return Launched("python", 0, 1, 0, "127.0.0.1", free_port())


def _launcher(environ: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in environ else "environment"


def _whole_number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise WorldError(
            f"{name}={environ[name]!r} in the environment is not a whole number; launchers set it, unset it "
            "or give a number."
        ) from None


def free_port() -> int:
    """One of this host that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
