"""Detect this process's place in the world from the environment that its launcher left. The only module that
knows every launcher; it reads variables and writes none.

torchrun      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID
deepspeed     the same five and CROSS_RANK
dsft launch   the same five and DSFT_JOB
environment   the same five, set by hand or by another program
mpirun        OMPI_COMM_WORLD_RANK etc. (`dsft.rank.openmpi`)
srun          SLURM_PROCID etc. in a task of srun (`dsft.rank.slurm`)
python        none of them: one process

The innermost launcher counts: torchrun inside a task of srun is torchrun. Variables that are set by hand in a
task of srun or mpirun must agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsft.errors import WorldError
from dsft.rank import openmpi, slurm
from dsft.rank.launched import (
    AGENT,
    RENDEZVOUS,
    Launched,
    check_complete,
    check_ranks,
    master_port,
    optional_number,
    whole_number,
)
from dsft.system.host import free_port

__all__ = ["RENDEZVOUS", "Launched", "detect"]


def detect(environ: Mapping[str, str]) -> Launched:
    """Return this process's place in the world. Raises WorldError where the variables are incomplete, not
    numbers, or contradict each other."""
    if any(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _from_rendezvous(environ)
    if openmpi.is_process(environ):
        return openmpi.process_of(environ)
    return slurm.task_of(environ) if slurm.is_task(environ) else _alone(environ)


def _from_rendezvous(environ: Mapping[str, str]) -> Launched:
    check_complete(environ, RENDEZVOUS, "a launcher")
    check_ranks(environ, *RENDEZVOUS[:3])
    rank, world_size, local_rank = (whole_number(environ, name) for name in RENDEZVOUS[:3])
    address, port = environ["MASTER_ADDR"], master_port(environ)
    assert port is not None  # one of RENDEZVOUS
    by_torchrun, by_deepspeed = "TORCHELASTIC_RUN_ID" in environ, "CROSS_RANK" in environ
    # deepspeed's names are those of launcher/launch.py:177 MASTER_ADDR
    names = ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE") if by_torchrun else ("CROSS_SIZE", "LOCAL_SIZE")
    if not by_torchrun and not by_deepspeed:
        names = ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")  # torchrun's names, where they are set by hand
        _check_outer_launcher(environ)
    hosts, local = (optional_number(environ, name) for name in names)
    if local is not None and not local_rank < local <= world_size:
        raise WorldError(
            f"LOCAL_RANK={local_rank}, {names[1]}={local} and WORLD_SIZE={world_size} contradict each other: "
            f"local ranks count from 0 to {names[1]} - 1; unset what the launcher did not set."
        )
    if local is not None and hosts is None and local == world_size:
        hosts = 1
    if hosts is not None and (hosts > world_size or (hosts == 1 and local not in (None, world_size))):
        raise WorldError(
            f"{names[0]}={hosts}, {names[1]}={local} and WORLD_SIZE={world_size} contradict each other; "
            "unset what the launcher did not set."
        )
    own = "dsft launch" if environ.get(AGENT) else "environment"
    launcher = "torchrun" if by_torchrun else "deepspeed" if by_deepspeed else own
    marks = {"torchrun": ("TORCHELASTIC_RUN_ID",), "deepspeed": ("CROSS_RANK",), "dsft launch": (AGENT,)}
    mark = marks.get(launcher, ())
    slots = (world_size,) if hosts == 1 else None
    return Launched(
        launcher, rank, world_size, local_rank, address, port, local, hosts, slots, (*mark, *RENDEZVOUS)
    )


def _check_outer_launcher(environ: Mapping[str, str]) -> None:
    """Check that the five variables, set by hand in a process of srun or mpirun, agree with that
    launcher's."""
    if environ.get(AGENT):
        return
    pairs = []
    if openmpi.is_process(environ):
        pairs = [("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")]
    elif slurm.is_task(environ):
        pairs = [("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")]
    elif environ.get("PMI_SIZE"):
        pairs = [("RANK", "PMI_RANK"), ("WORLD_SIZE", "PMI_SIZE")]
    for ours, theirs in pairs:
        values = [optional_number(environ, name) for name in (ours, theirs)]
        if None not in values and values[0] != values[1]:
            raise WorldError(
                f"{ours}={values[0]} (the variables set by hand) and {theirs}={values[1]} (the launcher "
                "around them) contradict each other; unset those that did not start this process."
            )


def _alone(environ: Mapping[str, str]) -> Launched:
    slurm.refuse_without_srun(environ)
    if environ.get("PMI_SIZE", "1") not in ("", "1"):
        raise WorldError(
            f"PMI_SIZE={environ['PMI_SIZE']} says that mpiexec started this process, but dsft does not read "
            "its variables; start with torchrun or deepspeed, or set "
            f"{', '.join(RENDEZVOUS)} for each process."
        )
    return Launched("python", 0, 1, 0, "127.0.0.1", free_port(), 1, 1, (1,))
