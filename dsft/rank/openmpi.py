"""Read Open MPI's variables: the place in the world of a process of `mpirun`. No MPI library is needed, since
dsft's processes communicate through torch.

mpirun sets the ranks, but not rank 0's address. Open MPI 3 and 4 set the address of mpirun itself
(OMPI_MCA_orte_hnp_uri), which is rank 0's host if the first line of the hostfile is this machine. Rank 0
checks that it is; if it is not, rank 0 exits and mpirun ends all ranks (orte_abort_on_non_zero_status).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dsft.errors import WorldError
from dsft.rank.launched import (
    Launched,
    check_complete,
    check_ranks,
    master_port,
    optional_number,
    port_of_job,
    whole_number,
)

PROCESS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
MPIRUN, DAEMON = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"

WAY_OUT = (
    "give mpirun `-x MASTER_ADDR=HOST` with the first host's name (deepspeed --launcher openmpi: "
    '--launcher_args "-x MASTER_ADDR=HOST")'
)


def is_process(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in PROCESS)


def process_of(environ: Mapping[str, str]) -> Launched:
    """Return this process's place. Raises WorldError where variables are missing or contradict each other,
    and where no variable gives rank 0's address."""
    check_complete(environ, PROCESS, "mpirun")
    check_ranks(environ, *PROCESS)
    rank, world_size, local_rank = (whole_number(environ, name) for name in PROCESS)
    local = optional_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    hosts = 1 if local == world_size else None
    port = master_port(environ)
    if port is None:
        port = port_of_job(int(re.sub(r"\D", "", environ.get("PMIX_NAMESPACE", "")) or 19_500))
    by_name = "MASTER_ADDR" if environ.get("MASTER_ADDR") else MPIRUN
    return Launched(
        "mpirun", rank, world_size, local_rank, _address(environ, rank, hosts), port, local, hosts,
        variables=PROCESS if hosts == 1 and by_name == MPIRUN else (*PROCESS, by_name),
    )  # fmt: skip


def _address(environ: Mapping[str, str], rank: int, hosts: int | None) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if hosts == 1:
        return "127.0.0.1"
    # `1077084160.0;tcp://10.77.0.1,192.168.3.1:53515;tcp6://[fd00::2]:59243`
    found = re.search(r";tcp://([0-9.]+)", environ.get(MPIRUN, ""))
    if found is None:
        raise WorldError(
            f"mpirun gives no address of rank 0, as MASTER_ADDR and {MPIRUN} are not set; {WAY_OUT}."
        )
    if rank == 0 and environ.get(DAEMON) != environ[MPIRUN]:
        raise WorldError(
            f"rank 0 is not on the host where mpirun runs ({found[1]}), so the others cannot know where it "
            f"is; {WAY_OUT}."
        )
    return found[1]
