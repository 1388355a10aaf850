"""Build each host's command from the hosts and their slots and train.py's own arguments. Pure.

The agent of a host starts its ranks itself, with torch's variables (RANK, WORLD_SIZE, …).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from dsft.remote import module_command

AGENT = "dsft.launcher.agent"
TRAIN = Path(__file__).resolve().parents[1] / "train.py"


@dataclass(frozen=True)
class HostCommand:
    """What one host runs: argv in `folder`, once per rank. Its processes are recognized by `DSFT_JOB=job`.

    environ  variables of every rank, beside the host's own
    logs     folder of rank-N.log; "": a temporary one
    ranks    global ranks on this host
    """

    host: str
    job: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    folder: str
    logs: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """All hosts and ranks of a run.

    through   what reaches other hosts
    hosts     host -> slots, in the order of the ranks
    program   train.py with its arguments
    folder    working folder, the same on every host
    logs      folder of the run's logs
    """

    through: Literal["ssh", "srun"]
    hosts: Mapping[str, int]
    program: tuple[str, ...]
    folder: str
    logs: str
    job: str

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        ends = accumulate(self.hosts.values())
        return {
            host: tuple(range(end - slots, end))
            for (host, slots), end in zip(self.hosts.items(), ends, strict=True)
        }

    def job_of(self, host: str) -> str:
        """Return the job's id on a host. Each host has its own: two hosts may share one machine's
        processes."""
        return f"{self.job}.{list(self.hosts).index(host)}"

    def agent(self, host: str) -> list[str]:
        """Return the command that starts the host's agent."""
        return module_command(host, AGENT, self.through)

    def command_of(self, host: str, address: str, port: int | str) -> HostCommand:
        """Return the host's command. address, port: rank 0's."""
        numbers = {
            "WORLD_SIZE": sum(self.hosts.values()), "LOCAL_WORLD_SIZE": self.hosts[host],
            "GROUP_WORLD_SIZE": len(self.hosts), "MASTER_ADDR": address, "MASTER_PORT": port,
        }  # fmt: skip
        environ = {name: str(value) for name, value in numbers.items()}
        argv = (sys.executable, "-u", *self.program)
        return HostCommand(host, self.job_of(host), argv, environ, self.folder, self.logs, self.ranks[host])


def address_of(host: str, addresses: Mapping[str, Sequence[str]], interface: str | None) -> str:
    """Return the address at which other hosts reach this one: the given interface's, else the first that is
    not a loopback; 127.0.0.1 if there is no other."""
    if interface is not None and addresses.get(interface):
        return addresses[interface][0]
    local = ("127.", "fe80:", "::1")
    found = [each for listed in addresses.values() for each in listed if not each.startswith(local)]
    if host in found:
        return host
    return next((each for each in found if ":" not in each), next(iter(found), "127.0.0.1"))
